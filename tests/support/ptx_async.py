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
SWIZZLED = 3
"""How a tensor map names it."""
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
    def of(cls, described: Any, meta: dict[str, Any]) -> Tiles:
        """Of a descriptor, for a kernel whose compiler says this of its boxes. Raises Fault for another swizzle than
        that of 128 bytes."""
        base: Tensor = described.base
        size, box = base.element_size(), tuple(meta["block_size"])
        if meta["swizzle"] != SWIZZLED or box[1] * size != SWIZZLE or described.strides[1] != 1:
            raise Fault(f"a tensor map of another kind: {meta}")
        return cls(base.data_ptr(), tuple(described.shape), described.strides[0] * size, size, box)


@dataclass
class Box:
    """One of such boxes, from a row and a column on."""

    tiles: Tiles
    row: int
    column: int

    def read(self, memory: GlobalMemory) -> tuple[Any, Any]:
        """Where its numbers lie in shared memory, from its beginning on, and their bytes [n, size]."""
        places, from_, inside = self._numbers()
        found = np.zeros(len(inside), np.uint64)
        found[inside] = memory.load(from_[inside], self.tiles.size)
        return places, found.astype(f"u{self.tiles.size}").view(np.uint8).reshape(-1, self.tiles.size)

    def write(self, memory: GlobalMemory, shared: SharedMemory, at: int, warp: int, told: str) -> None:
        """From shared memory, by the asynchronous proxy; what lies outside of the tensor is left out."""
        places, into, inside = self._numbers()
        there = swizzled(at + places).astype(np.uint64)
        found = shared.load_fenced(there, self.tiles.size, np.full(len(there), warp), told)
        memory.store(into[inside], found[inside], self.tiles.size)

    def _numbers(self) -> tuple[Any, Any, Any]:
        """Of each number: its place in the box, its address, and whether it is in the tensor."""
        tiles, (row, column) = self.tiles, (each.ravel() for each in np.indices(self.tiles.box))
        rows, columns = self.row + row, self.column + column
        inside = (rows >= 0) & (rows < tiles.shape[0]) & (columns >= 0) & (columns < tiles.shape[1])
        address = np.where(inside, tiles.base + rows * tiles.stride + columns * tiles.size, 0)
        return row * SWIZZLE + column * tiles.size, address.astype(np.uint64), inside


def swizzled(at: Any) -> Any:
    """Where bytes of a box lie whose parts change places."""
    return at ^ ((at >> 7 & 7) << 4)


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

    def end(self, at: int) -> None:
        """Raises Fault for one that copies are on their way to."""
        if self._at(at).bytes:
            raise Fault(f"the barrier at {at} ends while bytes are on their way")
        del self._known[at]

    def arrive(self, at: int, bytes_: int = 0) -> None:
        """Raises Fault for more arrivals than a phase has."""
        barrier = self._at(at)
        if barrier.awaited == 0:
            raise Fault(f"the barrier at {at} has been arrived at often enough")
        barrier.awaited, barrier.bytes = barrier.awaited - 1, barrier.bytes + bytes_
        barrier.settle()

    def copied(self, at: int, into: int, places: Any, data: Any, warp: int, told: str) -> None:
        """Bytes [n, size], at so many from `into` on, were copied, of which the barrier is told."""
        barrier = self._at(at)
        bytes_ = self._shared.issue(swizzled(into + places).astype(np.uint64), data.shape[1], warp, told)
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
