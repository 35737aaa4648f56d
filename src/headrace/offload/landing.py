"""Landing: host memory that blobs are read into on their way to the pool, and in which they are checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise, starmap
from typing import Protocol

import torch
from torch import Tensor

from headrace.device import Device, Event

HOST_PIECE, DEVICE_PIECE = 2 << 20, 16 << 20
BUFFERS = 3
"""Of pinned memory: one is filled, one copied from, and one is between the two."""
READERS = max(2, min(8, (os.cpu_count() or 4) // 2))
"""Threads that read and check a piece for a GPU, whose link is faster than one core reads."""


class Landing(Protocol):
    """piece_bytes: what is best read, checked and moved on together. ahead: pieces that may be read before the one
    that is moved on. One thread takes and leaves."""

    piece_bytes: int
    ahead: int

    def take(self, size: int) -> Tensor:
        """Memory to be filled, uint8 [size]. Valid until as many were taken as may be read ahead, and one."""

    def left(self, memory: Tensor) -> None:
        """The current stream was given the copies from memory that was taken."""

    def read(self, count: int, work: Callable[[range], list[str]]) -> Iterator[str]:
        """What work(part), which reads and checks a part of items 0 .. count-1, says of each, in order."""


class HostLanding(Landing):
    """For a pool in host memory, which takes what it is given at once: little enough to stay in a core's cache."""

    piece_bytes, ahead = HOST_PIECE, 0

    def __init__(self) -> None:
        self._memory = torch.empty(self.piece_bytes, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size]

    def left(self, memory: Tensor) -> None:
        pass

    def read(self, count: int, work: Callable[[range], list[str]]) -> Iterator[str]:
        return iter(work(range(count)))


class PinnedLanding(Landing):
    """For a pool on a device: pinned buffers in turn, each used again when it was copied from. Several threads read."""

    piece_bytes, ahead = DEVICE_PIECE, 1

    def __init__(self, device: Device) -> None:
        self.device, self._turn = device, 0
        self._memory = [device.pinned((self.piece_bytes,), torch.uint8) for _ in range(BUFFERS)]
        self._copied: list[Event | None] = [None] * BUFFERS
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="headrace-read")

    def take(self, size: int) -> Tensor:
        self._turn = (self._turn + 1) % BUFFERS
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        if len(self._memory[self._turn]) < size:
            self._memory[self._turn] = self.device.pinned((size,), torch.uint8)
        return self._memory[self._turn][:size]

    def left(self, memory: Tensor) -> None:
        turn = next(i for i, mine in enumerate(self._memory) if mine.data_ptr() == memory.data_ptr())
        copied = self._copied[turn] or self.device.event(blocking=True)
        copied.record(self.device.current_stream())
        self._copied[turn] = copied

    def read(self, count: int, work: Callable[[range], list[str]]) -> Iterator[str]:
        parts = min(READERS, count)
        cuts = [count * part // parts for part in range(parts + 1)] if parts else []
        return chain.from_iterable(self._readers.map(work, starmap(range, pairwise(cuts))))
