"""Which device a rank takes, how its tensors travel, and what several ranks on GPUs are refused."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace import device
from headrace.config import EngineConfig
from headrace.device import Stream
from headrace.engine import ranked_pools
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

    def claim(self, index: int) -> None:
        self.claimed = index


@pytest.mark.parametrize(("rank", "here", "index"), [(0, 2, 0), (1, 2, 1), (2, 3, 0)])
def test_a_rank_takes_the_device_of_its_number(
    rank: int, here: int, index: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    caplog.set_level(logging.INFO)
    made = SeveralDevices()
    with device.use(made):
        assert devices.claim(rank, here) == (here == 2)
    assert made.claimed == index
    assert ("3 ranks here have 2" in caplog.text) == (here == 3)


def test_torchrun_says_which_number_a_rank_has_on_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not so what others have left in the environment: started by Headrace, rank 0 would have the same device."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    made = SeveralDevices()
    with device.use(made):
        devices.claim(0, 2)
        assert made.claimed == 0
        for name in torchrun_environment.VARIABLES:
            monkeypatch.setenv(name, "6")
        devices.claim(6, 2)
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


def group_of(rank: int, context: int, tensor: int, others: str = "1", on: str = FakeDevice.name) -> Any:
    """A group of which the others have said whether they have devices to themselves, and what these are."""
    kept = {f"headrace/alone/{each}": others for each in range(context * tensor) if each != rank}
    kept |= {f"headrace/computes/{each}": f"{on}, Triton {devices._triton()}" for each in range(context * tensor)}
    mesh = SimpleNamespace(size=lambda axis: (context, tensor)[axis])
    store = SimpleNamespace(set=kept.__setitem__, get=lambda name: kept[name].encode())
    return SimpleNamespace(
        rank=rank, size=context * tensor, mesh=mesh, store=store, nccl=NcclGroups(),
        context=host_links(context)[rank // tensor], tensor=host_links(tensor)[rank % tensor],
    )  # fmt: skip


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """World ranks of the communicators that were asked of torch, in that order."""
    asked: list[list[int]] = []

    def new_group(ranks: list[int], timeout: Any, backend: str) -> object:
        assert backend == "nccl"
        asked.append(ranks)
        return SimpleNamespace(ranks=sorted(ranks))

    monkeypatch.setattr(os, "environ", {each: value for each, value in os.environ.items() if each not in SETTINGS})
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
        assert devices.connect(group, "auto", True, "127.0.0.1") == "NCCL"
    assert made == [[0, 2], [2, 0], [1, 3], [3, 1], [0, 1], [1, 0], [2, 3], [3, 2]]
    for links, other in ((group.context, (rank + 2) % 4), (group.tensor, rank ^ 1)):
        assert isinstance(links, NcclTransport)
        for ends in (links._to, links._source):
            [direction] = ends.values()
            assert direction.communicator.ranks[direction.other] == other  # type: ignore[attr-defined]
        links.close()
    assert len(group.nccl) == 4


def test_torch_ends_no_process_for_an_error_of_nccl(made: list[list[int]]) -> None:
    """It may be a user's. What the environment says holds."""
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "1"
    group = group_of(0, 2, 1)
    with device.use(SeveralDevices()):
        devices.connect(group, "nccl", True, "127.0.0.1")
    group.context.close()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"


@pytest.mark.parametrize(("asked", "others"), [("host", "1"), ("auto", "0")])
def test_otherwise_tensors_go_through_the_host(asked: Any, others: str, made: list[list[int]]) -> None:
    group = group_of(0, 2, 1, others)
    with device.use(SeveralDevices()):
        assert devices.connect(group, asked, True, "127.0.0.1") == "pinned memory"
    assert isinstance(group.context, StagedTransport) and not made


def test_nccl_is_refused_where_a_device_is_shared(made: list[list[int]]) -> None:
    with device.use(SeveralDevices()), pytest.raises(ValueError, match="ranks share a device; use 'host' or 'auto'"):
        devices.connect(group_of(0, 2, 1, "0"), "nccl", True, "127.0.0.1")


def test_gpus_of_several_kinds_are_refused() -> None:
    """Each computes bits of its own."""
    with device.use(SeveralDevices()), pytest.raises(ValueError, match=r"rank 1 computes on an H9, .*use GPUs of one"):
        devices.connect(group_of(0, 2, 1, on="an H9"), "host", True, "127.0.0.1")


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
