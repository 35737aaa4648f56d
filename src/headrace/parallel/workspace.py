"""Memory for the keys and values of one layer that travel between ranks, and what is under way in it.

C: chunks; Hk: KV heads, D: head size, in the layout of the pools (kv.storage). int8 has scales beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.attention.plan import Int32
from headrace.config import AttentionSpec
from headrace.kernels.records import Pool
from headrace.memory import zeros
from headrace.parallel.transport import Transfer

DEPTH = 3
"""Layers that have a buffer each: one is received ahead, one is computed, one is still being sent."""


class LayerBuffer:
    """K, V (and scales) of C chunks; `works` are the transfers that use it."""

    def __init__(self, spec: AttentionSpec, chunks: int, dtype: torch.dtype) -> None:
        self.pool = Pool.make(chunks, spec.kv_heads, spec.head_dim, dtype, zeros)
        self.works: list[Transfer] = []

    def drain(self) -> None:
        """Waits until nobody reads or writes the buffer any more."""
        for work in self.works:
            work.drain()
        self.works.clear()


class Workspace:
    """DEPTH buffers, as large as the largest group so far; layer l has buffer l % DEPTH."""

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype) -> None:
        self.spec, self.dtype = spec, dtype
        self.chunks = 0
        self.buffers: list[LayerBuffer] = []

    def reserve(self, chunks: int) -> None:
        """Makes room for `chunks` chunks a layer; what is under way is finished first if it must move."""
        if chunks > self.chunks:
            self.drain()
            self.chunks = chunks
            self.buffers = [LayerBuffer(self.spec, chunks, self.dtype) for _ in range(DEPTH)]

    def at(self, layer: int) -> LayerBuffer:
        return self.buffers[layer % DEPTH]

    def drain(self) -> None:
        for buffer in self.buffers:
            buffer.drain()


def copy_chunks_alone(source: Pool, source_at: Int32, target: Pool, target_at: Int32) -> None:
    """copy_chunks by this thread alone, beside the computation's threads: a large Tensor.copy_ starts a team."""
    for here, there, count in _stretches(source_at, target_at):
        for x, y in zip(source.tensors, target.tensors, strict=True):
            np.copyto(_bytes(y[there : there + count]), _bytes(x[here : here + count]))


def _bytes(x: torch.Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = x.detach().view(-1).view(torch.uint8).numpy()
    return found


def copy_chunks(source: Pool, source_at: Int32, target: Pool, target_at: Int32) -> None:
    """target[target_at[i]] = source[source_at[i]] for each tensor, by stretches that are contiguous in both."""
    for here, there, count in _stretches(source_at, target_at):
        for x, y in zip(source.tensors, target.tensors, strict=True):
            y[there : there + count].copy_(x[here : here + count])


def _stretches(source_at: Int32, target_at: Int32) -> Iterator[tuple[int, int, int]]:
    """(first of the source, first of the target, count)."""
    if not len(source_at):
        return
    breaks = np.flatnonzero((np.diff(source_at) != 1) | (np.diff(target_at) != 1)) + 1
    edges = [0, *breaks.tolist(), len(source_at)]
    for begin, end in pairwise(edges):
        yield int(source_at[begin]), int(target_at[begin]), end - begin
