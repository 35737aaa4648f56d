"""Chunks of the pool as blobs of a tier, and back, a layer at a time.

kind "k": keys and values, or what is both. kind "x": activations, the residual stream as it
enters each layer.
A layer is one section, or where layers differ in size as many as its keys and values are times the smallest layer's;
sections have one size, and the last ones of a layer are filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from headrace.config import AttentionSpec
from headrace.device import Device
from headrace.kernels import chunk_formats
from headrace.kernels.records import Layout
from headrace.kv.storage import KVStorage
from headrace.offload import frame
from headrace.offload.landing import READERS, HostLanding, Landing, PinnedLanding
from headrace.offload.tiers.base import BlobFormat, BlobKind, BlobParts


class ChunkCodec:
    """The pool of a model as blobs. identity: 32 bytes that the model, its types and arithmetic went into.

    layout: how chunks lie in the pool (Backend.layout). heads: which of the KV heads of a stored chunk the pool has, if
    not all; such a codec loads only. device: of a pool that lies on one; what is encoded then goes by a stream of its
    own, behind what the stream that was the current one when the codec was made has been given.

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
        device: Device | None = None,
    ) -> None:
        self.storage, self.spec, self.identity, self.dtype = storage, spec, identity, dtype
        self.layout, self.heads, self.device = layout, heads, device
        self._out = None if device is None else _Outward(device)
        self.header_bytes = frame.header_bytes(self.sections("k")[-1].stop)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    @cached_property
    def landing(self) -> Landing:
        """Memory for what is loaded; of the one thread that loads."""
        return HostLanding() if self.device is None else PinnedLanding(self.device)

    @property
    def keeps_activations(self) -> bool:
        return self.storage.keeps_activations

    def section_bytes(self, kind: BlobKind, form: BlobFormat) -> int:
        """Bytes of one section."""
        if kind == "x":
            return chunk_formats.x_bytes(self.activations(0).shape[-1], self.dtype, form)
        parts = zip(self.sections(kind), range(self.layers), strict=True)
        return max(-(-self._kv_bytes(layer, form) // (len(own) * frame.ALIGN)) * frame.ALIGN for own, layer in parts)

    def _kv_bytes(self, layer: int, form: BlobFormat) -> int:
        """Bytes of a layer's keys and values before they are filled up."""
        return chunk_formats.kv_bytes(*self.spec.shape(layer), self.storage.dtype, form, self.spec.once)

    @property
    def layers(self) -> int:
        """How many are stored."""
        return self.spec.stored

    def sections(self, kind: BlobKind) -> list[range]:
        """The sections of each layer of a blob."""
        sizes = [heads * dim if kind == "k" else 1 for heads, dim in map(self.spec.shape, range(self.layers))]
        ends = [0, *accumulate(round(size / min(sizes)) for size in sizes)]
        return [range(*pair) for pair in pairwise(ends)]

    def blob_bytes(self, kind: BlobKind, form: BlobFormat) -> int:
        count = self.sections(kind)[-1].stop
        return frame.section_at(count, self.section_bytes(kind, form), count)

    @torch.inference_mode()
    def encode(self, slot: int, digest: bytes, kind: BlobKind, form: BlobFormat) -> BlobParts:
        """The blob of the chunk in a slot; as "raw" where its numbers cannot be rounded so."""
        size, sections = self.section_bytes(kind, form), self.sections(kind)
        count = sections[-1].stop

        def fill(data: Tensor) -> bool:
            parts = [data[own.start * size : own.stop * size] for own in sections]
            return all(self._store(part, layer, slot, kind, form) for layer, part in enumerate(parts))

        data = self._filled(count * size, fill, form)
        if data is None:
            return self.encode(slot, digest, kind, "raw")
        payload = memoryview(data.numpy().data).cast("B")
        each = map if self._out is None else self._out.each
        sums = list(each(frame.checksum, [payload[at : at + size] for at in range(0, count * size, size)]))
        layout = frame.BlobLayout(self.identity, count, size, kind, form)
        return frame.make_header(layout, digest, sums), payload

    def _filled(self, size: int, fill: Callable[[Tensor], bool], form: BlobFormat) -> Tensor | None:
        """Host memory, uint8 [size], that `fill` has filled, be it over the device's; None where it could not."""
        if self._out is not None:
            return self._out.filled(size, fill, over=form != "raw")
        if len(self._scratch) < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch[:size] if fill(self._scratch[:size]) else None

    def _store(self, section: Tensor, layer: int, slot: int, kind: BlobKind, form: BlobFormat) -> bool:
        if self.device is not None and form == "raw":
            parts = (self.activations(layer),) if kind == "x" else self.storage.pool(layer).tensors
            chunk_formats.take_raw(section, parts, slot)
            return True
        where = torch.tensor([slot], dtype=torch.int32)
        if kind == "x":
            return chunk_formats.store_x_many(section[None], self.activations(layer), where, form)[0]
        pool, own = self.storage.pool(layer), self._kv_bytes(layer, form)
        section[own:] = 0
        return chunk_formats.store_kv_many(section[None, :own], pool, where, form, self.dtype, self.layout)[0]

    def activations(self, layer: int) -> Tensor:
        """The pool [slots, 64, H] of a layer."""
        assert self.storage.x is not None, "the pool keeps no activations"
        return self.storage.x[layer]

    def _arrived(self, sections: Tensor | Sequence[Tensor]) -> Tensor:
        """The sections, where the pool is."""
        if self.device is None:
            return sections if isinstance(sections, Tensor) else torch.stack(list(sections))
        shape = (len(sections), len(sections[0]))
        there = torch.empty(shape, dtype=torch.uint8, device=self.device.place)
        if isinstance(sections, Tensor):
            there.copy_(sections, non_blocking=True)
        else:
            chunk_formats.gather(there, sections)
        return there

    def header(self, data: memoryview, digest: bytes, kind: BlobKind) -> frame.BlobHeader:
        """Raises frame.DamagedBlob for a blob that is not this chunk's, or not as this pool needs it."""
        header = frame.read_header(data, digest, kind, self.identity)
        count = self.sections(kind)[-1].stop
        if header.layers != count or header.section_bytes != self.section_bytes(kind, header.format):
            raise frame.DamagedBlob(f"{header.layers} sections of {header.section_bytes} bytes do not fit the pool")
        return header

    @torch.inference_mode()
    def load(
        self, layer: int, kind: BlobKind, form: BlobFormat, sections: Tensor | Sequence[Tensor], slots: list[int]
    ) -> None:
        """Puts the checked sections of a layer, uint8 [n, bytes of all of them] or each by itself, into n slots. On a
        device the current stream is given that to do, and reads them later."""
        sections = self._arrived(sections)
        where = torch.tensor(slots, dtype=torch.int32)
        if kind == "x":
            chunk_formats.load_x_many(sections, self.activations(layer), where, form)
        else:
            if self.heads is not None:
                shape, kept = self.spec.shape(layer), self.storage.dtype
                sections = chunk_formats.some_heads(sections, self.heads, *shape, kept, form)
            else:
                sections = sections[:, : self._kv_bytes(layer, form)]
            pool = self.storage.pool(layer)
            chunk_formats.load_kv_many(sections, pool, where, form, self.dtype, self.layout)


class _Outward:
    """The way of chunks from a device's memory to the host's. each: `map` by several threads."""

    def __init__(self, device: Device) -> None:
        self.device, self.stream, self.compute = device, device.stream(), device.current_stream()
        self.each = ThreadPoolExecutor(READERS, thread_name_prefix="headrace-sums").map
        self._there, self._here = torch.empty(0), torch.empty(0)

    def filled(self, size: int, fill: Callable[[Tensor], bool], over: bool) -> Tensor | None:
        """See ChunkCodec._filled. over: put together in the device's memory, and copied by one copy."""
        device, written = self.device, self.device.event()
        device.enter()  # any thread may store
        written.record(self.compute)
        with device.on(self.stream):
            self.stream.wait_event(written)
            if len(self._here) < size:
                self._here = device.pinned((size,), torch.uint8)
            if over and len(self._there) < size:
                self._there = torch.empty(size, dtype=torch.uint8, device=device.place)
            here = self._here[:size]
            fits = fill(self._there[:size] if over else here)
            if over:
                here.copy_(self._there[:size], non_blocking=True)
            copied = device.event(blocking=True)
            copied.record(self.stream)
        copied.synchronize()
        return here if fits else None
