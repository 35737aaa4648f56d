"""torch.cuda without a GPU, as far as headrace.device.Cuda records with it: the rules of streams, captures and the
allocator that a machine without a device does not show.

Rules: torch has 32 streams and gives them out in turn (c10/cuda/CUDAStream.cpp). What a capturing stream is given is
recorded, whoever gives it. What must not be done meanwhile invalidates the capture, which then cannot be ended without
an error (CUDA Programming Guide, prohibited and unhandled operations); torch's allocator and its pool then stay as they
were while it was under way (aten/src/ATen/cuda/CUDAGraph.cpp, capture_end).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from headrace.device import Cuda, allocator

STREAMS = 32
Pool = tuple[int, int]


class Driver:
    """capturing: graph by number of stream; open: pools that the allocator takes memory of a capture from; users: of
    each pool. done: what streams have done, by number."""

    def __init__(self) -> None:
        self.capturing: dict[int, Graph] = {}
        self.open: list[Pool] = []
        self.users: dict[Pool, int] = {}
        self.done: list[int] = []
        self.current, self._handed, self._pools = 0, 0, 0

    def stream(self, place: object = None) -> Stream:
        self._handed += 1
        return Stream(self, 1 + (self._handed - 1) % STREAMS)

    def pool(self) -> Pool:
        self._pools += 1
        return 0, self._pools

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream.number
        try:
            yield
        finally:
            self.current = before

    def launch(self, stream: int | None = None) -> None:
        """Something on a stream, the current one by default."""
        number = self.current if stream is None else stream
        graph = self.capturing.get(number)
        if graph is None:
            self.done.append(number)
        else:
            graph.nodes += 1

    def unsafe(self) -> None:
        """Waiting for the device, unpinning memory, and other things that a thread that records must not do."""
        for graph in self.capturing.values():
            graph.invalid = True
        if self.capturing:
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")

    def empty_cache(self) -> None:
        if self.open:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def end_pool(self, index: int, pool: Pool) -> None:
        if pool not in self.open:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.open.remove(pool)

    def release_pool(self, index: int, pool: Pool) -> None:
        assert self.users[pool] > 0
        self.users[pool] -= 1


class Stream:
    """One of 32, or 0, the default one."""

    def __init__(self, driver: Driver, number: int) -> None:
        self.driver, self.number = driver, number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number

    def wait_stream(self, other: Stream) -> None:
        assert not {self.number, other.number} & self.driver.capturing.keys(), "a capture waits for nothing outside"


class Graph:
    """nodes: what was recorded."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.nodes, self.invalid, self.ended = driver, 0, False, False
        self.fails_to_instantiate = False

    def capture_begin(self, pool: Pool, capture_error_mode: str) -> None:
        driver = self.driver
        assert capture_error_mode == "thread_local" and driver.current, "neither others nor the default stream"
        driver.users[pool] = driver.users.get(pool, 0) + 1
        if pool in driver.open:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        driver.open.append(pool)
        if driver.current in driver.capturing:
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")
        driver.capturing[driver.current] = self
        self.pool = pool

    def capture_end(self) -> None:
        driver = self.driver
        if driver.capturing.pop(driver.current, None) is not self:
            raise torch.AcceleratorError("CUDA error: invalid argument")
        if self.invalid:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
        driver.end_pool(0, self.pool)
        self.ended = True
        if self.fails_to_instantiate:
            raise torch.AcceleratorError("CUDA error: out of memory")

    def replay(self) -> None:
        assert self.ended
        self.driver.done += [self.driver.current] * self.nodes

    def __del__(self) -> None:
        if self.ended:
            self.driver.release_pool(0, self.pool)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    zeros = torch.zeros

    def zeros_of(*shape: Any, device: Any = None, **given: Any) -> torch.Tensor:
        made.launch()
        return zeros(*shape, **given)

    monkeypatch.setattr(torch, "zeros", zeros_of)
    for name, found in {
        "Stream": made.stream, "stream": made.on, "current_stream": lambda place: Stream(made, made.current),
        "CUDAGraph": lambda: Graph(made), "graph_pool_handle": made.pool, "empty_cache": made.empty_cache,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, found)
    monkeypatch.setattr(allocator, "_cuda_endAllocateToPool", made.end_pool)
    monkeypatch.setattr(allocator, "_cuda_releasePool", made.release_pool)
    return made


@pytest.fixture
def cuda(driver: Driver) -> Cuda:
    return Cuda()
