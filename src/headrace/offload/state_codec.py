"""Recurrent states as blobs of a tier, and back. kind "s": the state behind a chunk, one section for each layer.

A section holds the convolution's last inputs, then the matrices in fp32, as they lie in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kv.storage import StateStorage
from headrace.offload import frame
from headrace.offload.tiers.base import BlobParts


class StateCodec:
    """identity: 32 bytes that the model, its types and arithmetic went into."""

    def __init__(self, storage: StateStorage, identity: bytes) -> None:
        self.storage, self.identity, self.layers = storage, identity, storage.spec.layers
        self.section_bytes = sum(part.nbytes for part in self._parts(0, 0))
        self.blob_bytes = frame.section_at(self.layers, self.section_bytes, self.layers)

    def _parts(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """The bytes of one layer's state where they lie: uint8, flat."""
        states = self.storage.layers[layer]
        last, matrices = (each[slot].view(-1).view(torch.uint8) for each in (states.last, states.matrices))
        return last, matrices

    @torch.inference_mode()
    def encode(self, slot: int, digest: bytes) -> BlobParts:
        """The blob of the state in a slot, in memory of its own."""
        payload = torch.cat([part for layer in range(self.layers) for part in self._parts(layer, slot)]).cpu()
        view, size = memoryview(payload.numpy().data).cast("B"), self.section_bytes
        sums = [frame.checksum(view[layer * size : (layer + 1) * size]) for layer in range(self.layers)]
        layout = frame.BlobLayout(self.identity, self.layers, size, "s", "raw")
        return frame.make_header(layout, digest, sums), view

    @torch.inference_mode()
    def decode(self, blob: Tensor, digest: bytes, slot: int) -> None:
        """Puts the state of a blob, uint8 [blob_bytes], into a slot, once all of it is sound. Raises DamagedBlob."""
        view, size = memoryview(blob.numpy().data).cast("B"), self.section_bytes
        header = frame.read_header(view, digest, "s", self.identity)
        if (header.layers, header.section_bytes) != (self.layers, size):
            raise frame.DamagedBlob(f"has {header.layers} layers of {header.section_bytes} bytes")
        starts = [frame.section_at(self.layers, size, layer) for layer in range(self.layers)]
        for layer, start in enumerate(starts):
            header.check(layer, view[start : start + size])
        for layer, start in enumerate(starts):
            last, matrices = self._parts(layer, slot)
            last.copy_(blob[start : start + len(last)])
            matrices.copy_(blob[start + len(last) : start + size])
