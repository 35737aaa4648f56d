"""Ranks as processes: how they meet, what happens when one is lost, and that none stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress

import pytest
import torch

from headrace.config import EngineConfig
from headrace.parallel.launch import open_group, spawn
from headrace.parallel.supervisor import WorkerProcess
from headrace.parallel.transport import RankLost, Tag
from tests.support import fake_rank
from tests.support.fake_rank import step
from tests.support.rank_groups import opened, runs, until

pytestmark = pytest.mark.usefixtures("importable")


@pytest.mark.matrix
def test_two_level_mesh() -> None:
    with opened(2, 2) as group:
        assert group.workers is not None
        assert group.mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert (group.context.size, group.tensor.size) == (2, 2)
        group.workers.wait_ready()
        group.workers.send(step(1, fake_rank.REDUCE))
        x = torch.zeros(1)
        torch.distributed.all_reduce(x, group=group.tensor_group)
        assert x.item() == 1
        group.context.irecv(x, 1, Tag(1, 0, 0)).wait()
        assert x.item() == 5


@pytest.mark.parametrize(
    "action", [*(pytest.param(each, marks=pytest.mark.matrix) for each in (None, fake_rank.SLEEP)), fake_rank.WAIT_FOR]
)
def test_killed_worker_is_named_and_nobody_stays(action: int | None) -> None:
    """Idle; computing while the driver waits for it; all waiting for each other (rank 2 may end over it first)."""
    lost = "rank [12] is gone" if action == fake_rank.WAIT_FOR else "rank 1 is gone"
    with opened(3) as group:
        assert group.workers is not None
        group.workers.wait_ready()
        if action is not None:
            group.workers.send(step(1, action, 1))
        waiting = group.context.irecv(torch.empty(1), 2, Tag(7, 0, 0))
        os.kill(group.workers.pids[1], signal.SIGKILL)
        with pytest.raises(RankLost, match=lost):
            waiting.wait()
        assert group.workers.failed.wait() and group.workers.reason is not None and "SIGKILL" in group.workers.reason
        with pytest.raises(RankLost, match=r"rank 1 is gone: .* SIGKILL"):
            group.workers.send(step(2, fake_rank.SLEEP))
        with pytest.raises(RankLost):
            group.context.isend(torch.empty(1), 2, Tag(8, 0, 0)).wait()


def test_hanging_worker_is_noticed() -> None:
    with opened(2, rank_timeout_s=2.0) as group:
        assert group.workers is not None
        group.workers.wait_ready()
        os.kill(group.workers.pids[1], signal.SIGSTOP)
        with pytest.raises(RankLost, match=r"rank 1 does not answer \(rank_timeout_s is 2\)"):
            group.context.irecv(torch.empty(1), 1, Tag(7, 0, 0)).wait()


@pytest.mark.matrix
def test_a_busy_worker_is_not_lost_and_a_failing_one_says_why() -> None:
    with opened(3, rank_timeout_s=2.5) as group:
        assert group.workers is not None
        group.workers.wait_ready()
        group.workers.send(step(1, fake_rank.RAISE, 9))
        group.workers.send(step(2, fake_rank.WAIT_FOR, 1))
        assert not group.workers.failed.wait(3.5)
        with suppress(RankLost):  # rank 1 may have failed before rank 2 is told
            group.workers.send(step(3, fake_rank.RAISE, 1))
        assert group.workers.failed.wait()
        with pytest.raises(RankLost, match="rank 1 failed: ValueError: asked to fail"):
            group.workers.check()


@pytest.mark.matrix
def test_maker_that_is_not_there() -> None:
    """In a process of its own: what torch does to meet the others cannot be taken back."""
    code = """if True:
        from headrace.config import EngineConfig
        from headrace.parallel.launch import open_group
        group = open_group(EngineConfig(context_parallel_size=2), "tests.support.fake_rank:nothing")
        group.workers.wait_ready()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "RankLost: rank 1 failed: ValueError: no function 'nothing' in tests.support.fake_rank" in done.stderr


def test_worker_with_a_wrong_secret(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def spawn_with_another(
        config: EngineConfig, address: str, secret: str, met: ExitStack
    ) -> Mapping[int, WorkerProcess]:
        return spawn(config, address, secret[::-1], met)

    monkeypatch.setattr("headrace.parallel.launch.spawn", spawn_with_another)
    with pytest.raises(RankLost, match=r"rank 1 is gone before it came: its process .* ended with status 1"):
        open_group(EngineConfig(context_parallel_size=2), "tests.support.fake_rank:FakeRank")
    assert "the other side does not know the secret" in caplog.text


def test_workers_end_with_their_driver() -> None:
    """Also those that compute."""
    code = f"""if True:
        import time
        from headrace.config import EngineConfig
        from tests.support.rank_groups import MAKER, open_group
        from tests.support.fake_rank import step
        group = open_group(EngineConfig(context_parallel_size=3), MAKER)
        group.workers.wait_ready()
        group.workers.send(step(1, {fake_rank.WAIT_FOR}, 1))
        print(*group.workers.pids.values(), flush=True)
        time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2 and all(runs(pid) for pid in pids)
        driver.kill()
    for pid in pids:
        until(pid)
