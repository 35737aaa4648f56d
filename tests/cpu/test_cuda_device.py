"""Recordings of a CUDA device by the rules of torch and of the driver (tests.support.torch_cuda)."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from headrace.device import Cuda, GraphPool
from tests.support import torch_cuda
from tests.support.torch_cuda import STREAMS, Driver, Graph

driver, cuda = torch_cuda.driver, torch_cuda.cuda


def test_what_is_recorded_is_not_done_until_it_is_replayed(driver: Driver, cuda: Cuda) -> None:
    graph, made = cuda.graph(lambda: (driver.launch(), driver.launch(), "made"))
    assert made[2] == "made" and driver.done == []
    graph.replay()
    assert driver.done == [0, 0] and not driver.open and not driver.capturing


def test_recordings_share_their_memory_and_their_stream(driver: Driver, cuda: Cuda) -> None:
    seen = []
    kept = [cuda.graph(lambda: seen.append(driver.current)) for _ in range(3 * STREAMS)]
    assert len(set(seen)) == 1 and list(driver.users.values()) == [len(kept) + 1]


def test_each_engine_has_memory_for_its_graphs(driver: Driver, cuda: Cuda) -> None:
    """It stays while the engine does, though no graph is left, and goes with it."""
    mine, other = GraphPool(), GraphPool()
    kept = [cuda.graph(driver.launch, pool) for pool in (mine, other, mine)]
    assert list(driver.users.values()) == [3, 2]
    kept.clear()
    assert list(driver.users.values()) == [1, 1]
    del other
    cuda.graph(driver.launch, mine)
    assert list(driver.users.values()) == [1, 0]


@pytest.mark.parametrize("before", [0, 1, STREAMS - 1, STREAMS, 2 * STREAMS - 1])
def test_no_copy_stream_is_the_one_that_is_recorded_on(before: int, driver: Driver, cuda: Cuda) -> None:
    """However many there are, before the first recording and behind it. Copies that are made meanwhile are made."""
    streams: list[Any] = [cuda.stream() for _ in range(before)]
    cuda.graph(driver.launch)
    streams += [cuda.stream() for _ in range(2 * STREAMS)]

    def record() -> None:
        for each in streams:
            driver.launch(each.number)

    driver.done.clear()
    graph, _ = cuda.graph(record)
    assert driver.done == [each.number for each in streams]
    graph.replay()
    assert len(driver.done) == len(streams)


def _no_memory(driver: Driver) -> None:
    raise torch.OutOfMemoryError("no memory")


def _forbidden(driver: Driver) -> None:
    driver.unsafe()


def _forbidden_unseen(driver: Driver) -> None:
    """As one from a library that does not look at the driver's answer."""
    with pytest.raises(torch.AcceleratorError):
        driver.unsafe()


def _forbidden_then_error(driver: Driver) -> None:
    _forbidden_unseen(driver)
    raise ValueError("why")


@pytest.mark.parametrize(
    ("breaks", "error", "told"),
    [
        (_no_memory, torch.OutOfMemoryError, "no memory"),
        (_forbidden, RuntimeError, "not permitted"),
        (_forbidden_unseen, RuntimeError, "previous error"),
        (_forbidden_then_error, ValueError, "why"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_recording_that_breaks_off_spoils_nothing(
    breaks: Any, error: type[Exception], told: str, first: bool, driver: Driver, cuda: Cuda
) -> None:
    """Its error is the first one. The stream is given work again, and the allocator gives memory back, at once; the
    next recording shares the memory of those before."""
    if not first:
        _kept = cuda.graph(driver.launch)
    with pytest.raises(error, match=told):
        cuda.graph(lambda: breaks(driver))
    assert not driver.capturing
    torch.cuda.empty_cache()
    graph, _ = cuda.graph(driver.launch)
    graph.replay()
    assert driver.done == [0] and list(driver.users.values()) == [2 if first else 3]


def test_a_graph_without_memory_to_be_launched_from_is_an_error(
    driver: Driver, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its capture has ended by then: nothing is ended or given back twice."""
    cuda.graph(driver.launch)

    def without_memory() -> Graph:
        made = Graph(driver)
        made.fails_to_instantiate = True
        return made

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", without_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            cuda.graph(driver.launch)
    gc.collect()
    torch.cuda.empty_cache()
    cuda.graph(driver.launch)
    assert list(driver.users.values()) == [1]


def test_threads_record_one_after_another(driver: Driver, cuda: Cuda) -> None:
    """As those of two engines: what another is given while one is recorded would break both off."""
    made: list[int] = []

    def another() -> None:
        _, nodes = cuda.graph(lambda: (driver.launch(), len(driver.capturing))[1])
        made.append(nodes)

    thread = threading.Thread(target=another)

    def record() -> list[int]:
        thread.start()
        thread.join(0.2)
        return list(made)

    assert cuda.graph(record)[1] == []
    thread.join(20)
    assert made == [1] and not driver.capturing and not driver.open


class Pinned:
    """In a cycle, as an engine's memory is: the garbage collector unpins it."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.itself = driver, self

    def __del__(self) -> None:
        self.driver.unsafe()


def test_nothing_is_unpinned_by_the_way(driver: Driver, cuda: Cuda) -> None:
    """While a step is recorded the collector would finalize what an engine before has left."""

    def record() -> int:
        Pinned(driver)
        driver.launch()
        return len([[] for _ in range(100_000)])  # more than the collector lets pass

    assert gc.isenabled()
    cuda.graph(record)
    assert gc.isenabled()
    gc.disable()
    try:
        cuda.graph(driver.launch)
        assert not gc.isenabled(), "it stays off where it was"
    finally:
        gc.enable()
        gc.collect()
