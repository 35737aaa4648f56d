"""Groups of fake ranks, and what the kernel knows of their processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.parallel.group import Group
from headrace.parallel.launch import open_group

ROOT = Path(__file__).parents[2]
MAKER = "tests.dist.fake_rank:FakeRank"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Workers find the fake rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@contextmanager
def opened(context: int, tensor: int = 1, **settings: object) -> Iterator[Group]:
    """A group, and that its workers are gone afterwards."""
    config = EngineConfig(
        context_parallel_size=context, tensor_parallel_size=tensor, api_key="not for workers", **settings
    )  # type: ignore[arg-type]
    group = open_group(config, MAKER)
    assert group.crew is not None
    try:
        yield group
    finally:
        group.close()
    assert not [pid for pid in group.crew.pids.values() if runs(pid)]


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def until(pid: int) -> None:
    """Returns when the process has ended; the test's time limit is the limit."""
    while runs(pid):
        time.sleep(0.02)


def listening(pid: int) -> set[str]:
    """Addresses, as the kernel writes them, on which a process accepts TCP connections."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(link))
        except FileNotFoundError:
            continue
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}
