"""What waits on a GPU for a rank that is gone: it is given up, what comes of it is used by nobody, and `close` ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from headrace import LLM, SamplingParams, device
from headrace.config import EngineConfig
from headrace.engine import gpu_memory
from headrace.engine.loader import Loaded
from headrace.kernels.triton import backend
from headrace.offload.ranked import words
from headrace.offload.ranked.agent import TierAgent
from headrace.parallel import group as group_module
from headrace.parallel.group import HELD_UP, Group
from headrace.parallel.nccl_groups import NcclGroups
from headrace.parallel.transport import RankLost
from tests.support.fake_device import FakeDevice, fake_device
from tests.support.fake_nccl import StuckGroup, StuckKernels, host_links
from tests.support.thread_group import ranks_as_threads


@pytest.fixture
def kernels() -> Iterator[StuckKernels]:
    made = StuckKernels()
    yield made
    made.killed.set()


@pytest.fixture
def destroyed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch has process groups, which end at once."""
    ended: list[str] = []
    monkeypatch.setattr(group_module, "ABORT_S", 0.2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append("all"))
    return ended


def group_of(*directions: StuckGroup) -> Group:
    made = NcclGroups()
    for each in directions:
        made.add(each)
    facts: Any = SimpleNamespace()
    return Group(0, 2, facts, host_links(2)[0], host_links(1)[0], facts, None, made)


def test_communicators_are_aborted_at_the_same_time(kernels: StuckKernels, destroyed: list[str]) -> None:
    """The abort of one waits for the kernels of all."""
    directions = [StuckGroup(kernels) for _ in range(3)]
    group = group_of(*directions)
    with device.use(FakeDevice()) as used:
        assert used is not None
        group.fail("rank 1 is gone")
        assert group.released() and all(each.aborted for each in directions)
        assert group.close() and device.current().lost is None
    assert destroyed == ["all"]


def test_close_ends_where_nccl_does_not(
    kernels: StuckKernels, destroyed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The device is lost to this process: nothing of it is destroyed, which would wait for it."""
    group = group_of(StuckGroup(kernels, heeds=False), StuckGroup(kernels))
    with device.use(FakeDevice()), caplog.at_level(logging.ERROR):
        group.fail("rank 1 is gone")
        for _ in range(2):
            assert not group.released() and not group.close()
        assert device.current().lost == backend.missing() == HELD_UP
    assert not destroyed
    assert [each.message for each in caplog.records] == [HELD_UP]


def test_close_ends_where_the_end_of_a_group_does_not(
    kernels: StuckKernels, destroyed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "destroy_process_group", kernels.killed.wait)
    with device.use(FakeDevice()):
        assert not group_of(StuckGroup(kernels)).close()
        assert device.current().lost == HELD_UP


def test_a_closed_group_leaves_the_next_alone(kernels: StuckKernels, destroyed: list[str]) -> None:
    """Its `close` may be called again; how many ranks shared the device says nothing of an engine of one."""
    alone = EngineConfig(attention_backend="triton", kv_cache_tokens=4096)
    with device.use(FakeDevice()) as used:
        assert used is not None
        device.current().sharers = 2
        group = group_of(StuckGroup(kernels))
        for _ in range(2):
            assert group.close() and destroyed == ["all"]
        assert gpu_memory.sharing(alone) == 1


def test_what_was_lost_before_is_not_waited_for_again(
    kernels: StuckKernels, destroyed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait is as long as an abort may take; and ranks on CPUs have nothing to wait for."""
    group, waits = group_of(StuckGroup(kernels, heeds=False)), list[float]()
    aborted = group.nccl.aborted
    monkeypatch.setattr(group.nccl, "aborted", lambda seconds: (waits.append(seconds), aborted(seconds))[1])
    with device.use(FakeDevice()):
        assert not group.close() and not group.released() and not group.close()
        assert len(waits) == 1 and group_of().released() and group_of().close()
    assert destroyed == ["all"]


def test_a_lost_device_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_device(monkeypatch) as fake:
        fake.lost = HELD_UP
        with pytest.raises(ValueError, match="end this process"):
            LLM("tiny", attention_backend="triton", kv_cache_tokens=1024)


@pytest.mark.parametrize("released", [True, False])
def test_copies_on_a_lost_device_are_not_waited_for(released: bool) -> None:
    done: list[str] = []
    part: Callable[[str], Any] = lambda name: SimpleNamespace(close=lambda: done.append(name))  # noqa: E731
    loaded: Any = SimpleNamespace(
        structured=None, sessions=None, below=part("tiers"), executor=part("ranks"),
        ranks=SimpleNamespace(released=lambda: released),
    )  # fmt: skip
    Loaded.close(loaded)
    assert done == ["tiers", "ranks"][not released :]


def test_tokens_drawn_behind_a_lost_rank_are_no_answer() -> None:
    """A device goes on when what it waits for is given up: with whatever lies where the rank's keys should be."""
    with ranks_as_threads():
        llm = LLM("tiny", context_parallel_size=2, kv_cache_tokens=1024, dtype="float32")
        workers: Any = llm.engine.loaded.ranks.group.workers  # type: ignore[union-attr]
        computes = llm.engine.loaded.executor.run

        def run(slices: Any) -> Any:
            computed = computes(slices)
            workers._fail("rank 1 is gone")
            return computed

        llm.engine.loaded.executor = SteppedOn(llm.engine.loaded.executor, run)  # type: ignore[assignment]
        llm.engine.overlap.executor = llm.engine.loaded.executor  # type: ignore[attr-defined]
        with pytest.raises(RankLost, match="rank 1 is gone"):
            llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=1))
        llm.close()


class SteppedOn:
    """An executor with another `run`."""

    def __init__(self, inner: Any, run: Callable[[Any], Any]) -> None:
        self._inner, self.run = inner, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("lost", [False, True])
def test_chunks_computed_behind_a_lost_rank_are_not_stored(lost: bool) -> None:
    """The rank is lost while the chunk is copied."""
    offered: list[bytes] = []
    failed = threading.Event()

    def encode(*_: Any) -> tuple[bytes]:
        if lost:
            failed.set()
        return (b"chunk",)

    codec = SimpleNamespace(encode=encode, keeps_activations=False)
    tiers = SimpleNamespace(
        set_quota=lambda *_: None, lacking=lambda name: [0], queues=lambda tier: False, format=lambda tier: "raw",
        offer=lambda tier, name, *_: offered.append(name),
    )  # fmt: skip
    agent = TierAgent(lambda identity: None)  # type: ignore[arg-type, return-value]
    agent._opened = SimpleNamespace(tiers=tiers, codec=codec, storing=codec)  # type: ignore[assignment]
    agent.spoilt = failed.is_set
    parked: Any = SimpleNamespace(lock=nullcontext(), revoked=False)
    for beside in (None, parked):
        failed.clear()
        assert agent.store(words.ChunkToStore(0, bytes(32), b"", sure=True), beside) is not lost
    assert len(offered) == (0 if lost else 2)
