"""Which device a rank takes, how its tensors travel, and what several ranks on GPUs are refused."""

from __future__ import annotations

import logging
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace import device
from headrace.config import EngineConfig
from headrace.device import Stream
from headrace.engine import gpu_memory, ranked_pools
from headrace.engine.folders import model_folder
from headrace.engine.preflight import check_fit
from headrace.models.plain_config import plain_config
from headrace.offload.chunk_codec import _Outward
from headrace.offload.copy_streams import CudaStream
from headrace.parallel import devices, torchrun_environment
from headrace.parallel.nccl_groups import SETTINGS, NcclGroups
from headrace.parallel.nccl_transport import NcclTransport
from headrace.parallel.staged_transport import StagedTransport
from headrace.parallel.transport import Tag
from tests.support.fake_device import FakeDevice
from tests.support.fake_nccl import directions, host_links


class SeveralDevices(FakeDevice):
    count = 2
    claimed = -1
    identity = "GPU-0"

    def claim(self, index: int) -> None:
        self.claimed = index


@pytest.mark.parametrize(("rank", "index"), [(0, 0), (1, 1), (2, 0)])
def test_a_rank_takes_the_device_of_its_number(rank: int, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    made = SeveralDevices()
    with device.use(made):
        devices.claim(rank)
    assert made.claimed == index


def test_torchrun_says_which_number_a_rank_has_on_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not so what others have left in the environment: started by Headrace, rank 0 would have the same device."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    made = SeveralDevices()
    with device.use(made):
        devices.claim(0)
        assert made.claimed == 0
        for name in torchrun_environment.VARIABLES:
            monkeypatch.setenv(name, "6")
        devices.claim(6)
    assert made.claimed == 1


@pytest.mark.parametrize("kind", ["staged", "nccl"])
def test_threads_of_links_use_the_device_of_the_rank(kind: str) -> None:
    """A thread begins on the first device."""
    here = threading.local()

    class Claimed(FakeDevice):
        def enter(self) -> None:
            here.entered = True

        def on(self, stream: Stream) -> AbstractContextManager[object]:
            used.append(threading.current_thread() is threading.main_thread() or hasattr(here, "entered"))
            return super().on(stream)

    used: list[bool] = []
    made, of = Claimed(), directions(2)[1]
    hosts = host_links(2)
    one, two = (
        StagedTransport(host, made) if kind == "staged" else NcclTransport(host, made, *of(host.rank)) for host in hosts
    )
    there = torch.empty(3)
    with device.use(made):
        came = two.irecv(there, 0, Tag(1, 0, 0))
        one.isend(torch.arange(3.0), 1, Tag(1, 0, 0)).wait()
        came.wait()
    assert torch.equal(there, torch.arange(3.0)) and len(used) >= 2 and all(used)
    one.close(), two.close()


def test_threads_of_tiers_use_the_device_of_the_rank() -> None:
    """That which hands copies over, that which waits for their end, and any that stores."""
    entered: set[str] = set()

    class Claimed(FakeDevice):
        def enter(self) -> None:
            entered.add(threading.current_thread().name)

    made = Claimed()
    stream = CudaStream("restore", made)
    stream.submit(lambda: None, 0, "kv").synchronize()
    stream.close()
    outward = _Outward(made)
    storing = threading.Thread(target=outward.filled, args=(64, lambda data: True, False), name="storing")
    storing.start()
    storing.join()
    assert entered == {"headrace-restore", "headrace-restore-end", "storing"}


def group_of(rank: int, context: int, tensor: int, same: bool = False, on: str = FakeDevice.name) -> Any:
    """A group of which the others have said which devices they have: this rank's (`same`), or each one of its own."""
    ours = SeveralDevices.identity
    kept = {f"headrace/device/{each}": ours if same else f"GPU-{each + 1}" for each in range(context * tensor)}
    kept |= {f"headrace/computes/{each}": f"{on}, Triton {devices._triton()}" for each in range(context * tensor)}
    kept |= {f"headrace/queues/{each}": "32" for each in range(context * tensor)}
    mesh = SimpleNamespace(size=lambda axis: (context, tensor)[axis])
    store = SimpleNamespace(set=kept.__setitem__, get=lambda name: kept[name].encode())
    return SimpleNamespace(
        rank=rank, size=context * tensor, mesh=mesh, store=store, nccl=NcclGroups(),
        context=host_links(context)[rank // tensor], tensor=host_links(tensor)[rank % tensor],
    )  # fmt: skip


def _first_use(made: Any, way: str, x: list[torch.Tensor], other: int, tag: int) -> Any:
    made.first.append((way, made.ranks[other]))
    return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """World ranks of the communicators that were asked of torch, in that order."""
    asked: list[list[int]] = []

    def new_group(ranks: list[int], timeout: Any, backend: str, pg_options: Any) -> object:
        assert backend == "nccl" and pg_options._timeout == timeout and pg_options.is_high_priority_stream
        asked.append(ranks)
        made = SimpleNamespace(ranks=sorted(ranks), ctas=pg_options.config.max_ctas, first=[])
        made.send, made.recv = (partial(_first_use, made, way) for way in ("send", "recv"))
        return made

    class Options(SimpleNamespace):
        def __init__(self, **given: Any) -> None:
            super().__init__(config=SimpleNamespace(), **given)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    kept = {each: value for each, value in os.environ.items() if each not in (*SETTINGS, devices.CONNECTIONS)}
    monkeypatch.setattr(os, "environ", kept)
    devices.ask_for_queues()
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "new_group", new_group)
    return asked


def test_what_ranks_tell_of_their_memory_is_no_announcement() -> None:
    """It lies in the host's memory, and takes the links by which NCCL's messages are announced."""

    class Device(FakeDevice):
        def holds(self, x: torch.Tensor) -> bool:
            return False

    of = directions(2)[1]
    links = [NcclTransport(host, Device(), *of(host.rank)) for host in host_links(2)]
    groups: list[Any] = [SimpleNamespace(context=each, tensor=host_links(1)[0]) for each in links]
    with ThreadPoolExecutor(2) as ranks:
        try:
            told = [ranks.submit(ranked_pools._told, group, 7, ranked_pools.LOADED) for group in groups]
            assert [each.result(5) for each in told] == [[7, 7], [7, 7]]
        finally:
            for each in links:
                each.close()


@pytest.mark.parametrize("rank", range(4))
def test_each_direction_has_a_communicator(rank: int, made: list[list[int]]) -> None:
    """Two context ranks of two tensor ranks each: every rank asks for all of them in one order."""
    group = group_of(rank, 2, 2)
    with device.use(SeveralDevices()):
        assert devices.connect(group, "auto", "127.0.0.1") == "NCCL"
        assert device.current().sharers == 1
    assert made == [[0, 2], [2, 0], [1, 3], [3, 1], [0, 1], [1, 0], [2, 3], [3, 2]]
    for links, other in ((group.context, (rank + 2) % 4), (group.tensor, rank ^ 1)):
        assert isinstance(links, NcclTransport)
        for ends in (links._to, links._source):
            [direction] = ends.values()
            communicator: Any = direction.communicator
            assert communicator.ranks[direction.other] == other
            assert communicator.first == [("send" if ends is links._to else "recv", other)], "used before it is needed"
        links.close()
    assert len(group.nccl) == 4


def test_torch_ends_no_process_for_an_error_of_nccl(made: list[list[int]]) -> None:
    """It may be a user's. What the environment says holds."""
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "1"
    group = group_of(0, 2, 1)
    with device.use(SeveralDevices()):
        devices.connect(group, "nccl", "127.0.0.1")
    group.context.close()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"


@pytest.mark.parametrize(("asked", "same"), [("host", False), ("auto", True)])
def test_otherwise_tensors_go_through_the_host(
    asked: Any, same: bool, made: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    group = group_of(0, 2, 1, same)
    with device.use(SeveralDevices()), caplog.at_level(logging.INFO):
        assert devices.connect(group, asked, "127.0.0.1") == "pinned memory"
        assert device.current().sharers == 1 + same
    assert isinstance(group.context, StagedTransport) and not made
    assert ("2 ranks share it" in caplog.text) == ("ranks share a device" in caplog.text) == same


@pytest.mark.parametrize("same", [False, True])
def test_ranks_that_each_see_one_device(same: bool, made: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """As number 0, whichever it is (CUDA_VISIBLE_DEVICES by rank): what names it tells, and what memory each has."""
    one, group = SeveralDevices(), group_of(1, 2, 1, same)
    one.count = 1
    config = EngineConfig(attention_backend="triton", context_parallel_size=2, kv_cache_tokens=4096)
    with device.use(one):
        for name in torchrun_environment.VARIABLES:
            monkeypatch.setenv(name, "2")
        assert gpu_memory.sharing(config) == 1, "nobody knows yet"
        assert devices.connect(group, "auto", "127.0.0.1") == ("pinned memory" if same else "NCCL")
        assert gpu_memory.sharing(config) == 1 + same
    group.context.close()


@pytest.mark.parametrize(("context", "ctas"), [(2, 16), (8, 4), (10, 3)])
def test_kernels_of_all_communicators_run_at_the_same_time(context: int, ctas: int, made: list[list[int]]) -> None:
    """One that has no place would wait for another, which may wait for a rank where it is the other way round."""
    group, there = group_of(0, context, 1), SeveralDevices()
    there.processors = 132
    with device.use(there):
        assert devices.connect(group, "auto", "127.0.0.1") == "NCCL"
    assert {each.communicator.ctas for each in group.context._to.values()} == {ctas}
    assert 2 * (context - 1) * ctas <= 132 // 2
    group.context.close()


def test_streams_of_a_device_are_enough_for_all_links(made: list[list[int]]) -> None:
    """Those that share a queue wait for each other, be it on two ranks in turn."""
    with device.use(SeveralDevices()):
        with pytest.raises(ValueError, match=r"exchanges with 10 others, .* the streams of 9 side by side;"):
            devices.connect(group_of(0, 11, 1), "nccl", "127.0.0.1")
        assert devices.connect(group_of(0, 11, 1), "auto", "127.0.0.1") == "pinned memory"


@pytest.mark.parametrize(("said", "rank", "fits"), [("1", 0, 0), ("", 1, 0), ("17", 1, 2), ("64", 0, 9)])
def test_queues_are_those_that_the_environment_gives(said: str, rank: int, fits: int, made: list[list[int]]) -> None:
    """Which is the user's to say."""
    os.environ[devices.CONNECTIONS] = said
    devices.ask_for_queues()
    assert os.environ[devices.CONNECTIONS] == said
    group = group_of(rank, fits + 2, 1)
    with device.use(SeveralDevices()), pytest.raises(ValueError, match=f"carries the streams of {fits} side by side"):
        devices.connect(group, "nccl", "127.0.0.1")
    if fits:
        group = group_of(rank, fits + 1, 1)
        with device.use(SeveralDevices()):
            assert devices.connect(group, "nccl", "127.0.0.1") == "NCCL"
        group.context.close()


def test_the_rank_with_fewest_queues_decides_for_all(made: list[list[int]]) -> None:
    """All ranks decide alike, whoever has few."""
    group = group_of(0, 2, 1)
    group.store.set("headrace/queues/1", "8")
    with device.use(SeveralDevices()), pytest.raises(ValueError, match=r"by 8 queues \(CUDA_DEVICE_MAX_CONNECTIONS\)"):
        devices.connect(group, "nccl", "127.0.0.1")


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_ranks_use_their_communicators_in_one_order(size: int, made: list[list[int]]) -> None:
    """Each waits for the other end of what it begins with."""
    used: list[list[tuple[int, int]]] = []
    for rank in range(size):
        group, order = group_of(rank, size, 1), list[tuple[int, int]]()
        with pytest.MonkeyPatch.context() as patch, device.use(SeveralDevices()):
            patch.setattr(SeveralDevices, "synchronize", lambda self: None)
            patch.setattr(sys.modules[__name__], "_first_use", partial(_note_pair, order, rank))
            devices.connect(group, "nccl", "127.0.0.1")
        group.context.close()
        used.append(order)
    while any(used):
        ready = {each[0] for each in used if each}
        met = [pair for pair in ready if all(used[end] and used[end][0] == pair for end in pair)]
        assert met, used
        for begin, end in met:
            used[begin].pop(0), used[end].pop(0)


def _note_pair(order: list[tuple[int, int]], me: int, made: Any, way: str, x: Any, other: int, tag: int) -> Any:
    there = made.ranks[other]
    order.append((me, there) if way == "send" else (there, me))
    return SimpleNamespace(wait=lambda: None)


def test_nccl_is_refused_where_a_device_is_shared(made: list[list[int]]) -> None:
    with device.use(SeveralDevices()), pytest.raises(ValueError, match="ranks share a device; use 'host' or 'auto'"):
        devices.connect(group_of(0, 2, 1, True), "nccl", "127.0.0.1")


def test_gpus_of_several_kinds_are_refused() -> None:
    """Each computes bits of its own."""
    with device.use(SeveralDevices()), pytest.raises(ValueError, match=r"rank 1 computes on an H9, .*use GPUs of one"):
        devices.connect(group_of(0, 2, 1, on="an H9"), "host", "127.0.0.1")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"distributed_backend": "ray"}, "use mp, or torchrun"),
        ({"attention_backend": "cpu", "rank_transport": "nccl"}, "is for ranks on GPUs"),
    ],
    ids=["ray", "no-gpu"],
)
def test_what_ranks_on_gpus_do_not_do(settings: dict[str, Any], told: str) -> None:
    given = {"attention_backend": "triton", "context_parallel_size": 2, "kv_cache_tokens": 4096, **settings}
    with pytest.raises(ValueError, match=told):
        check_fit(EngineConfig(**given), plain_config(model_folder("tiny")))
