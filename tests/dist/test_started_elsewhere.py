"""Ranks that torchrun or Ray started, with the fake rank."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.parallel.launch import open_group
from headrace.parallel.transport import RankLost
from tests.dist import fake_rank
from tests.dist.fake_rank import step
from tests.dist.groups import MAKER, ROOT, echoes, importable, opened, runs, until

__all__ = ["importable"]


def torchrun(processes: int, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes", "1", "--nproc-per-node"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return subprocess.run(
            [*command, str(processes), str(ROOT / "tests/dist/rank_program.py")], capture_output=True, text=True
        )


@pytest.mark.parametrize("secret", [None, "a secret given by hand"])
def test_torchrun(secret: str | None, tmp_path: Path) -> None:
    """Without a secret in the environment a file carries one, and does not stay."""
    given = {"TMPDIR": str(tmp_path)} | ({"HEADRACE_RANK_SECRET": secret} if secret else {})
    done = torchrun(2, **given)
    assert done.returncode == 0, done.stderr
    assert "seen True 1 of 2, tiny, None, 127.0.0.1" in done.stdout
    assert not list(tmp_path.glob("headrace*"))


def test_torchrun_with_another_number_of_processes() -> None:
    done = torchrun(3)
    assert done.returncode != 0
    assert "torchrun started 3 processes, but context_parallel_size * tensor_parallel_size is 2" in done.stderr


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two Ray nodes on this machine. They can hold two workers of one CPU each."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'headrace[ray]'")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
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


def test_ray(cluster: Any) -> None:
    with opened(3, distributed_backend="ray") as group:
        assert group.crew is not None
        assert group.crew.wait_ready() == {rank: f"{rank} of 3, tiny, None, 127.0.0.1".encode() for rank in (1, 2)}
        assert echoes(group, 1)


def test_ray_actor_that_is_killed(cluster: Any) -> None:
    import ray

    with opened(3, distributed_backend="ray") as group:
        assert group.crew is not None
        group.crew.wait_ready()
        group.crew.send(step(1, fake_rank.SLEEP))
        actors = group.crew._processes
        ray.kill(actors[2]._actor)  # type: ignore[attr-defined]
        assert group.crew.failed.wait()
        with pytest.raises(RankLost, match="rank 2 is gone"):
            group.crew.check()
        pids = dict(group.crew.pids)
    for pid in pids.values():
        until(pid)
    assert not any(runs(pid) for pid in pids.values())


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
