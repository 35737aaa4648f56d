"""Ranks that torchrun started, with the fake rank. Ray: test_ray.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.parallel import launch
from tests.support.rank_groups import ROOT

pytestmark = pytest.mark.usefixtures("importable")


def torchrun(processes: int, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes", "1", "--nproc-per-node"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return subprocess.run(
            [*command, str(processes), str(ROOT / "tests/support/rank_program.py")], capture_output=True, text=True
        )


@pytest.mark.matrix  # make test has what torchrun says: tests/unit/test_torchrun.py
@pytest.mark.parametrize("secret", [None, "a secret given by hand"])
def test_torchrun(secret: str | None, tmp_path: Path) -> None:
    """Without a secret in the environment a file carries one, and does not stay."""
    given = {"TMPDIR": str(tmp_path)} | ({"HEADRACE_RANK_SECRET": secret} if secret else {})
    done = torchrun(2, **given)
    assert done.returncode == 0, done.stderr
    assert "seen True 1 of 2, tiny, None, 127.0.0.1" in done.stdout
    assert not list(tmp_path.glob("headrace*"))


def test_a_worker_ends_without_finalizing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of its may be inside torch, which Python's finalization would unwind: that aborts the process."""
    told = {"headrace/driver": b"127.0.0.1:1", "headrace/secret": b""}

    def ended(status: int) -> None:
        raise SystemError(f"ended with {status}")

    monkeypatch.setenv("HEADRACE_RANK_SECRET", "a secret given by hand")
    monkeypatch.setattr(launch.TorchRun, "read", lambda: launch.TorchRun(1, 2, 2))
    monkeypatch.setattr(launch.TorchRun, "store", lambda self: SimpleNamespace(get=told.__getitem__))
    monkeypatch.setattr(launch, "rank_main", lambda *arguments: 0)
    monkeypatch.setattr(os, "_exit", ended)
    with pytest.raises(SystemError, match="ended with 0"):
        launch.serve_if_worker("127.0.0.1")


@pytest.mark.matrix
def test_torchrun_with_another_number_of_processes() -> None:
    """All of them end. What is refused: tests/unit/test_torchrun.py."""
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


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("secret", "told"), [("the same secret on both", "seen True 1 of 2"), (None, "set HEADRACE_RANK")]
)
def test_torchrun_on_two_hosts(hosts: list[list[str]], secret: str | None, told: str) -> None:
    started = []
    for i, enter in enumerate(hosts):
        environment = {**os.environ, "HEADRACE_RANK_INTERFACE": f"10.77.0.{i + 1}"}
        environment |= {"HEADRACE_RANK_SECRET": secret} if secret else {}
        command = f"-m torch.distributed.run --nnodes 2 --node-rank {i} --nproc-per-node 1 --master-addr 10.77.0.1"
        words = [*enter, sys.executable, *command.split(), str(ROOT / "tests/support/rank_program.py")]
        started.append(
            subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        )
    outputs = [process.communicate()[0] for process in started]
    assert told in outputs[0], outputs
    assert [process.returncode == 0 for process in started] == [secret is not None] * 2
