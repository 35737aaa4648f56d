"""Memory for the keys and values of one layer that travel between ranks, and what is under way in it.

C: chunks; Hk: KV heads, D: head size, in the layout of the pools (kv.storage). int8 has scales beside them.
"""

from __future__ import annotations

import math

import torch

from headrace.config import AttentionSpec
from headrace.kernels.records import Pool
from headrace.kv.storage import zeros_on
from headrace.parallel.transport import Transfer

CPU = torch.device("cpu")
DEPTH = 3
"""Layers that have a buffer each: one is received ahead, one is computed, one is still being sent."""


def bytes_per_chunk(spec: AttentionSpec, dtype: torch.dtype) -> int:
    """What a workspace takes for a chunk of a group, all of its buffers together."""
    parts = [part for heads, dim in spec.every_shape for part in Pool.parts(1, heads, dim, dtype, spec.once)]
    return DEPTH * sum(math.prod(shape) * kind.itemsize for shape, kind in parts)


class LayerBuffer:
    """K, V (and scales) of C chunks on a device, shape: (Hk, D); `works` are the transfers that use it. once: see
    Pool."""

    def __init__(
        self, shape: tuple[int, int], chunks: int, dtype: torch.dtype, device: torch.device, once: bool = False
    ) -> None:
        self.pool = Pool.make(chunks, *shape, dtype, zeros_on(device), once)
        self.works: list[Transfer] = []

    def drain(self) -> None:
        """Waits until nobody reads or writes the buffer any more."""
        for work in self.works:
            work.drain()
        self.works.clear()


class Workspace:
    """DEPTH buffers for each shape of layers, as large as the largest group so far; layer l has buffer l % DEPTH of its
    shape."""

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device = CPU) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self.chunks = 0
        self.buffers: dict[tuple[int, int], list[LayerBuffer]] = {}

    def reserve(self, chunks: int) -> None:
        """Makes room for `chunks` chunks a layer; what is under way is finished first if it must move."""
        if chunks > self.chunks:
            self.drain()
            self.chunks = chunks
            shapes = self.spec.every_shape
            self.buffers = {}  # first, so that the old ones and the new never take memory at a time
            self.buffers = {
                each: [LayerBuffer(each, chunks, self.dtype, self.device, self.spec.once) for _ in range(DEPTH)]
                for each in shapes
            }

    def at(self, layer: int) -> LayerBuffer:
        return self.buffers[self.spec.shape(layer)][layer % DEPTH]

    def drain(self) -> None:
        for buffers in self.buffers.values():
            for buffer in buffers:
                buffer.drain()
