"""What a GPU copies by itself (TMA) as PTX is executed on the CPU, and the barriers in shared memory that tell of it.

A copy is read when it is issued, and lands when its barrier has been waited for: what is read before is what was there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from tests.support.ptx_memory import Fault, GlobalMemory, SharedMemory

SWIZZLE = 128
"""Bytes of a row of a box, whose parts of 16 change places by the row: the one way of these kernels."""
PATIENCE = 1000
"""Attempts at a barrier that nothing can end: all threads take part in them."""


@dataclass
class Tiles:
    """A tensor [rows, columns] as a tensor map describes it, its rows `stride` bytes apart, in boxes of so many rows
    and columns. What lies outside of the tensor is copied as 0."""

    base: int
    shape: tuple[int, int]
    stride: int
    size: int
    box: tuple[int, int]

    @classmethod
    def of(cls, described: Any) -> Tiles:
        """A descriptor of Gluon's. Raises Fault for another swizzle than that of 128 bytes."""
        base: Tensor = described.base
        size, block = base.element_size(), described.block_shape
        if described.layout.swizzle_byte_width != SWIZZLE or described.strides[1] != 1:
            raise Fault(f"a tensor map of another kind: {described.layout}")
        box = block[0], min(block[1], SWIZZLE // size)
        return cls(base.data_ptr(), tuple(described.shape), described.strides[0] * size, size, box)

    def read(self, memory: GlobalMemory, row: int, column: int) -> tuple[Any, Any]:
        """The box from there on: where its numbers lie from its beginning on, and their bytes [n, size]."""
        at_row, at_column = (each.ravel() for each in np.indices(self.box))
        inside = (row + at_row < self.shape[0]) & (column + at_column < self.shape[1])
        from_ = self.base + (row + at_row) * self.stride + (column + at_column) * self.size
        found = np.zeros(len(inside), np.uint64)
        found[inside] = memory.load(from_[inside].astype(np.uint64), self.size)
        return at_row * SWIZZLE + at_column * self.size, found.astype(f"u{self.size}").view(np.uint8).reshape(
            -1, self.size
        )


@dataclass
class _Barrier:
    """count: arrivals of a phase; awaited: those that it lacks; bytes: that are on their way; phase: its number."""

    count: int
    awaited: int
    bytes: int = 0
    phase: int = 0
    landing: list[tuple[Any, Any]] = field(default_factory=list)
    refused: int = 0

    def settle(self) -> None:
        if self.awaited == 0 and self.bytes == 0:
            self.phase, self.awaited = self.phase + 1, self.count


class Barriers:
    """Of one block, by their addresses in shared memory."""

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared
        self._known: dict[int, _Barrier] = {}

    def make(self, at: int, count: int) -> None:
        self._known[at] = _Barrier(count, count)

    def arrive(self, at: int, bytes_: int = 0) -> None:
        """Raises Fault for more arrivals than a phase has."""
        barrier = self._at(at)
        if barrier.awaited == 0:
            raise Fault(f"the barrier at {at} has been arrived at often enough")
        barrier.awaited, barrier.bytes = barrier.awaited - 1, barrier.bytes + bytes_
        barrier.settle()

    def copied(self, at: int, into: int, places: Any, data: Any, warp: int, told: str) -> None:
        """Bytes [n, size], at so many from `into` on, were copied, of which the barrier is told."""
        barrier, where = self._at(at), into + places
        moved = where ^ ((where >> 7 & 7) << 4)
        bytes_ = self._shared.issue(moved.astype(np.uint64), data.shape[1], warp, told)
        barrier.landing.append((bytes_, data))
        barrier.bytes -= data.size
        barrier.settle()

    def passed(self, at: int, parity: int) -> bool:
        """Whether the phase of this parity is over: then all that it waited for has landed. Raises Fault where it
        never will be."""
        barrier = self._at(at)
        if (barrier.phase & 1) == parity:
            barrier.refused += 1
            if barrier.refused > PATIENCE:
                raise Fault(f"the barrier at {at} is waited for in vain")
            return False
        barrier.refused = 0
        if barrier.bytes < 0:
            raise Fault(f"{-barrier.bytes} bytes more than the barrier at {at} was told of")
        self._shared.land(barrier.landing)
        barrier.landing = []
        return True

    def _at(self, at: int) -> _Barrier:
        if at not in self._known:
            raise Fault(f"no barrier at {at} of shared memory")
        return self._known[at]
