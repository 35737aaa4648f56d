"""Chunks of the pool as blobs of a tier, and back, a layer at a time.

kind "k": keys and values. kind "x": activations, the residual stream as it enters each layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.config import AttentionSpec
from headrace.kernels import chunk_formats
from headrace.kernels.records import Layout
from headrace.kv.storage import KVStorage
from headrace.offload import frame
from headrace.offload.tiers.base import BlobFormat, BlobKind, BlobParts


class ChunkCodec:
    """The pool of a model as blobs. identity: 32 bytes that the model, its types and arithmetic went into.

    layout: how chunks lie in the pool (Backend.layout). heads: which of the KV heads of a stored chunk the pool has, if
    not all; such a codec loads only.

    `encode` may be called by one thread at a time, beside others that load: its result is valid until the next call.
    """

    def __init__(
        self,
        storage: KVStorage,
        spec: AttentionSpec,
        identity: bytes,
        dtype: torch.dtype,
        layout: Layout,
        heads: range | None = None,
    ) -> None:
        self.storage, self.spec, self.identity, self.dtype = storage, spec, identity, dtype
        self.layout, self.heads = layout, heads
        self.header_bytes = frame.header_bytes(spec.layers)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    @property
    def keeps_activations(self) -> bool:
        return self.storage.keeps_activations

    def section_bytes(self, kind: BlobKind, form: BlobFormat) -> int:
        """Bytes of one layer's section."""
        if kind == "k":
            return chunk_formats.kv_bytes(self.spec.kv_heads, self.spec.head_dim, self.storage.dtype, form)
        return chunk_formats.x_bytes(self.activations(0).shape[-1], self.dtype, form)

    def blob_bytes(self, kind: BlobKind, form: BlobFormat) -> int:
        return self.header_bytes + self.spec.layers * self.section_bytes(kind, form)

    @torch.inference_mode()
    def encode(self, slot: int, digest: bytes, kind: BlobKind, form: BlobFormat) -> BlobParts:
        """The blob of the chunk in a slot; as "raw" where its numbers cannot be rounded so."""
        size, layers = self.section_bytes(kind, form), self.spec.layers
        if len(self._scratch) < layers * size:
            self._scratch = torch.empty(layers * size, dtype=torch.uint8)
        rows = self._scratch[: layers * size].view(layers, size)
        if not all(self._store(rows[layer], layer, slot, kind, form) for layer in range(layers)):
            return self.encode(slot, digest, kind, "raw")
        payload = memoryview(rows.numpy().data).cast("B")
        sums = [frame.checksum(payload[layer * size : (layer + 1) * size]) for layer in range(layers)]
        layout = frame.BlobLayout(self.identity, layers, size, kind, form)
        return frame.make_header(layout, digest, sums), payload

    def _store(self, section: Tensor, layer: int, slot: int, kind: BlobKind, form: BlobFormat) -> bool:
        where = torch.tensor([slot], dtype=torch.int32)
        if kind == "x":
            return chunk_formats.store_x_many(section[None], self.activations(layer), where, form)[0]
        pool = self.storage.pool(layer)
        return chunk_formats.store_kv_many(section[None], pool, where, form, self.dtype, self.layout)[0]

    def activations(self, layer: int) -> Tensor:
        """The pool [slots, 64, H] of a layer."""
        assert self.storage.x is not None, "the pool keeps no activations"
        return self.storage.x[layer]

    def header(self, data: memoryview, digest: bytes, kind: BlobKind) -> frame.BlobHeader:
        """Raises frame.DamagedBlob for a blob that is not this chunk's, or not as this pool needs it."""
        header = frame.read_header(data, digest, kind, self.identity)
        if header.layers != self.spec.layers or header.section_bytes != self.section_bytes(kind, header.format):
            raise frame.DamagedBlob(f"{header.layers} layers of {header.section_bytes} bytes do not fit the pool")
        return header

    @torch.inference_mode()
    def load(self, layer: int, kind: BlobKind, form: BlobFormat, sections: Tensor, slots: list[int]) -> None:
        """Puts checked sections of a layer, uint8 [n, section bytes], into n slots."""
        where = torch.tensor(slots, dtype=torch.int32)
        if kind == "x":
            chunk_formats.load_x_many(sections, self.activations(layer), where, form)
        else:
            if self.heads is not None:
                spec, kept = self.spec, self.storage.dtype
                sections = chunk_formats.some_heads(sections, self.heads, spec.kv_heads, spec.head_dim, kept, form)
            chunk_formats.load_kv_many(sections, self.storage.pool(layer), where, form, self.dtype, self.layout)
