"""Ranks on a Ray cluster of two nodes on this machine: the fake rank, and the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.config import EngineConfig
from headrace.parallel.launch import open_group
from headrace.parallel.transport import RankLost
from tests.support import fake_rank
from tests.support.fake_rank import step
from tests.support.fake_server import until
from tests.support.rank_answers import CHAIN, answers
from tests.support.rank_groups import MAKER, ROOT, echoes, opened, runs
from tests.support.server_process import process

pytestmark = [
    pytest.mark.usefixtures("importable"),
    pytest.mark.matrix,  # make test installs no Ray
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'headrace[ray]'"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two Ray nodes on this machine. They can hold two workers of one CPU each."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        options = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=options)
        try:
            cluster.add_node(**options)
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def test_ray_and_an_actor_that_is_killed(cluster: Any) -> None:
    import ray

    with opened(3, distributed_backend="ray") as group:
        assert group.workers is not None
        assert group.workers.wait_ready() == {rank: f"{rank} of 3, tiny, None, 127.0.0.1".encode() for rank in (1, 2)}
        assert echoes(group, 1)
        group.workers.send(step(2, fake_rank.SLEEP))
        actors = group.workers._processes
        ray.kill(actors[2]._actor)  # type: ignore[attr-defined]
        assert group.workers.failed.wait()
        with pytest.raises(RankLost, match="rank 2 is gone"):
            group.workers.check()


def test_ray_without_room(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.parallel.on_ray.PLACE_S", 1)
    with pytest.raises(ValueError, match="no room for 4 workers of 1 CPUs"):
        open_group(EngineConfig(context_parallel_size=5, distributed_backend="ray"), MAKER)


def test_ray_without_a_cluster() -> None:
    code = """if True:
        from headrace.config import EngineConfig
        from headrace.parallel.launch import open_group
        open_group(EngineConfig(context_parallel_size=2, distributed_backend="ray"), "x:y")
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ValueError: no Ray cluster at '127.0.0.1:1'" in done.stderr, done.stderr


def workers() -> list[psutil.Process]:
    """The actors that serve as ranks, by what Ray calls their processes; this one started the cluster."""
    return [p for p in psutil.Process().children(recursive=True) if command(p)[:1] == ["ray::Member.serve"]]


def command(process: psutil.Process) -> list[str]:
    """None of a process that has ended, waited for or not."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def test_answers_and_a_killed_actor(cluster: Any, tmp_path: Path, right: list[list[int]]) -> None:
    with process(tmp_path, "-cp", "2", "--distributed-backend", "ray", *CHAIN) as server:
        server.wait_ready()
        assert answers(server) == right
        assert server.metric("prefills_total", strategy="chain") > 0
        assert "started by ray" in server.log.read_text()
        (lost,) = workers()
        lost.send_signal(signal.SIGKILL)
        until(lambda: server.health() == 503)
        assert "rank 1 is gone: " in server.http.get("/health").text
        server.wait_ready()
        assert answers(server) == right
        (found,) = workers()
        assert server.stop() == 0
        until(lambda: not runs(found.pid))
