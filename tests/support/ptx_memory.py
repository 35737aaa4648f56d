"""Memory that PTX touches as it is executed on the CPU (ptx_block): bounds of both kinds, races of the shared one.

Addresses and values are uint64 [n], one for each thread that takes part.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tests.support.memory_checker import bounds

Words = NDArray[np.uint64]
Bools = NDArray[np.bool_]
WARP = 32
WINDOW = np.uint64(0xFFFFFFFF)


class Fault(Exception):
    """An access that a GPU would end with an error, or an instruction that is not known."""


class GlobalMemory:
    """Tensors in memory, by name; views of the same memory count as one."""

    def __init__(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        spans: list[tuple[int, int, str]] = []
        for begin, end, name in sorted((*bounds(x), name) for name, x in tensors if x.numel()):
            if spans and begin < spans[-1][1]:
                before = spans.pop()
                begin, end, name = before[0], max(before[1], end), f"{before[2]}, {name}"
            spans.append((begin, end, name))
        self._names = [name for *_, name in spans]
        self._begin = np.array([begin for begin, *_ in spans], np.uint64)
        self._size = np.array([end - begin for begin, end, _ in spans], np.uint64)
        self._bytes = [np.frombuffer((ctypes.c_uint8 * (e - b)).from_address(b), np.uint8) for b, e, _ in spans]

    def load(self, at: Words, size: int) -> Words:
        found = np.zeros(len(at), np.uint64)
        for part, places, mine in self._parts(at, size):
            found[mine] = np.ascontiguousarray(self._bytes[part][places]).view(f"u{size}")[:, 0]
        return found

    def store(self, at: Words, values: Words, size: int) -> None:
        data = values.astype(f"u{size}").view(np.uint8).reshape(-1, size)
        for part, places, mine in self._parts(at, size):
            self._bytes[part][places] = data[mine]

    def _parts(self, at: Words, size: int) -> list[tuple[int, Any, Bools]]:
        """Of each tensor that is touched: its number, places of bytes [n, size], and which of the addresses."""
        near = np.maximum(np.searchsorted(self._begin, at, side="right").astype(np.int64) - 1, 0)
        inside = at - self._begin[near]
        wrong = np.flatnonzero((inside + np.uint64(size) > self._size[near]) | (at % np.uint64(size) != 0))
        if len(wrong):
            name, first = self._names[near[wrong[0]]], int(at[wrong[0]]) - int(self._begin[near[wrong[0]]])
            raise Fault(f"{size} bytes at byte {first} of {name}, which has {self._size[near[wrong[0]]]}")
        steps = np.arange(size, dtype=np.int64)
        return [(int(p), inside[near == p].astype(np.int64)[:, None] + steps, near == p) for p in np.unique(near)]


class SharedMemory:
    """Of one block. races: what two warps touch between two barriers, one of them writing, by instruction; and what an
    instruction of the asynchronous proxy (wgmma) reads without a fence since it was written.

    Asynchronous copies land when the block waits for them: what is read before is what was there.
    """

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.races: set[str] = set()
        self._epoch = 1
        self._written, self._read = np.zeros((2, size), np.int64), np.zeros((2, size), np.int64)
        self._unfenced = np.zeros(size, bool)
        self._open: list[tuple[Any, Any]] = []
        self._groups: list[list[tuple[Any, Any]]] = []

    def barrier(self) -> None:
        self._epoch += 1

    def fence(self, warps: NDArray[np.int64]) -> None:
        """These warps order what they have written, or what a barrier lets them see, before the asynchronous proxy."""
        epoch, by = self._written
        self._unfenced &= ~(np.isin(by, warps) | (epoch < self._epoch))

    def load_fenced(self, at: Words, size: int, warps: NDArray[np.int64], told: str) -> Words:
        """`load` by the asynchronous proxy."""
        if self._unfenced[self._places(at, size)].any():
            self.races.add(f"reads what no fence is behind: {told}")
        return self.load(at, size, warps, told)

    def load(self, at: Words, size: int, warps: NDArray[np.int64], told: str) -> Words:
        places = self._places(at, size)
        self.read(places, warps, told)
        return np.ascontiguousarray(self.bytes[places]).view(f"u{size}")[:, 0].astype(np.uint64)

    def store(self, at: Words, values: Words, size: int, warps: NDArray[np.int64], told: str, later: bool) -> None:
        places = self._places(at, size)
        self._write(places, warps[:, None], told)
        data = values.astype(f"u{size}").view(np.uint8).reshape(-1, size)
        if later:
            self._open.append((places, data))
        else:
            self.bytes[places] = data
            self._unfenced[places] = True

    def issue(self, at: Words, size: int, warp: int, told: str) -> Any:
        """Notes that a copy by the GPU itself, which this warp issues, writes there: places of bytes [n, size]."""
        places = self._places(at, size)
        self._write(places, np.full((len(places), 1), warp), told)
        return places

    def land(self, copies: list[tuple[Any, Any]]) -> None:
        """Copies that have been waited for, by whoever reads them."""
        for places, data in copies:
            self.bytes[places] = data
            self._written[0][places], self._unfenced[places] = 0, False

    def commit(self) -> None:
        self._groups.append(self._open)
        self._open = []

    def wait(self, pending: int) -> None:
        """For all groups of copies but the last `pending`."""
        done = max(0, len(self._groups) - pending)
        for group in self._groups[:done]:
            for places, data in group:
                self.bytes[places] = data
                self._unfenced[places] = True
        self._groups = self._groups[done:]

    def read(self, places: Any, warps: NDArray[np.int64], told: str) -> None:
        """Notes that warps read bytes [n, size]."""
        epoch, by = self._written
        if ((epoch[places] == self._epoch) & (by[places] != warps[:, None])).any():
            self.races.add(f"reads what another warp writes: {told}")
        epoch, readers = self._read
        readers[places[epoch[places] != self._epoch]] = 0
        epoch[places] = self._epoch
        np.bitwise_or.at(readers, places, np.broadcast_to(1 << warps[:, None], places.shape))

    def _write(self, places: Any, warps: NDArray[np.int64], told: str) -> None:
        epoch, by = self._written
        read, readers = self._read
        taken = (epoch[places] == self._epoch) & (by[places] != warps)
        taken |= (read[places] == self._epoch) & ((readers[places] & ~(1 << warps)) != 0)
        if taken.any():
            self.races.add(f"writes what another warp touches: {told}")
        epoch[places], by[places] = self._epoch, np.broadcast_to(warps, places.shape)

    def _places(self, at: Words, size: int) -> Any:
        at = at & WINDOW
        if (at + np.uint64(size) > np.uint64(len(self.bytes))).any() or (at % np.uint64(size) != 0).any():
            raise Fault(f"{size} bytes at byte {int(at.max())} of {len(self.bytes)} in shared memory")
        return at.astype(np.int64)[:, None] + np.arange(size)
