"""Chunks copied from one pool to another of the same layout, by slots."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.device import current
from headrace.kernels.records import Pool

Slots = NDArray[np.int32]


def copy_chunks(source: Pool, source_at: Slots, target: Pool, target_at: Slots) -> None:
    """target[target_at[i]] = source[source_at[i]] for each tensor, by stretches that are contiguous in both."""
    for here, there, count in _stretches(source_at, target_at):
        for x, y in zip(source.tensors, target.tensors, strict=True):
            y[there : there + count].copy_(x[here : here + count])


def copy_chunks_alone(source: Pool, source_at: Slots, target: Pool, target_at: Slots) -> None:
    """copy_chunks by this thread alone, beside the computation's threads: a large Tensor.copy_ starts a team. A copy
    from or to a device is given to the current stream."""
    device = current()
    on_host = not device.holds(source.k) and not device.holds(target.k)
    for here, there, count in _stretches(source_at, target_at):
        for x, y in zip(source.tensors, target.tensors, strict=True):
            into, taken = y[there : there + count], x[here : here + count]
            if on_host:
                np.copyto(_bytes(into), _bytes(taken))
            else:
                into.copy_(taken, non_blocking=True)


def _bytes(x: torch.Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = x.detach().view(-1).view(torch.uint8).numpy()
    return found


def _stretches(source_at: Slots, target_at: Slots) -> Iterator[tuple[int, int, int]]:
    """(first of the source, first of the target, count)."""
    if not len(source_at):
        return
    breaks = np.flatnonzero((np.diff(source_at) != 1) | (np.diff(target_at) != 1)) + 1
    edges = [0, *breaks.tolist(), len(source_at)]
    for begin, end in pairwise(edges):
        yield int(source_at[begin]), int(target_at[begin]), end - begin
