"""Ranks that torchrun or Ray started, with the fake rank."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.parallel.launch import open_group
from headrace.parallel.transport import RankLost
from tests.processes import fake_rank
from tests.processes.fake_rank import step
from tests.processes.groups import MAKER, ROOT, echoes, importable, opened

__all__ = ["importable"]


def torchrun(processes: int, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes", "1", "--nproc-per-node"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return subprocess.run(
            [*command, str(processes), str(ROOT / "tests/processes/rank_program.py")], capture_output=True, text=True
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


@pytest.fixture
def hosts() -> Iterator[list[list[str]]]:
    """Two network namespaces with addresses 10.77.0.1 and .2: for each the words that run a command in it."""
    names = [f"headrace-{os.getpid()}-{i}" for i in range(2)]
    ends = [f"hr{i}-{os.getpid()}" for i in range(2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command 'ip'")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        for i, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.77.0.{i}/24", "dev", end)
            for link in (end, "lo"):
                ip("-n", name, "link", "set", link, "up")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.parametrize(
    ("secret", "told"), [("the same secret on both", "seen True 1 of 2"), (None, "set HEADRACE_RANK")]
)
def test_torchrun_on_two_hosts(hosts: list[list[str]], secret: str | None, told: str) -> None:
    started = []
    for i, enter in enumerate(hosts):
        environment = {**os.environ, "HEADRACE_RANK_INTERFACE": f"10.77.0.{i + 1}"}
        environment |= {"HEADRACE_RANK_SECRET": secret} if secret else {}
        command = f"-m torch.distributed.run --nnodes 2 --node-rank {i} --nproc-per-node 1 --master-addr 10.77.0.1"
        words = [*enter, sys.executable, *command.split(), str(ROOT / "tests/processes/rank_program.py")]
        started.append(
            subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        )
    outputs = [process.communicate()[0] for process in started]
    assert told in outputs[0], outputs
    assert [process.returncode == 0 for process in started] == [secret is not None] * 2


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
