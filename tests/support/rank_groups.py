"""Groups of fake ranks, and what the kernel knows of their processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from headrace.config import EngineConfig
from headrace.parallel.group import Group
from headrace.parallel.launch import open_group
from headrace.parallel.transport import Tag
from tests.support.fake_rank import ECHO, MANY, message, step

ROOT = Path(__file__).parents[2]
MAKER = "tests.support.fake_rank:FakeRank"


@contextmanager
def opened(context: int, tensor: int = 1, **settings: object) -> Iterator[Group]:
    """A group, and that its workers are gone afterwards."""
    config = EngineConfig(
        context_parallel_size=context, tensor_parallel_size=tensor, api_key="not for workers", **settings
    )  # type: ignore[arg-type]
    group = open_group(config, MAKER)
    assert group.workers is not None
    try:
        yield group
    finally:
        group.close()
    for pid in group.workers.pids.values():
        if config.ranks.launcher == "ray":
            until(pid)  # Ray tells the end of an actor a little before it
        assert not runs(pid)


def echoes(group: Group, number: int) -> bool:
    """Whether every worker sends back what it was sent, in step `number`."""
    assert group.workers is not None
    group.workers.send(step(number, ECHO))
    links = group.context
    sends = [
        links.isend(message(number, i), rank, Tag(number, i, 0)) for i in range(MANY) for rank in range(1, links.size)
    ]
    same = all(
        torch.equal(x, message(number, i)) for rank in range(1, links.size) for i, x in collect(group, number, rank)
    )
    for send in sends:
        send.wait()
    return same


def collect(group: Group, number: int, rank: int) -> list[tuple[int, torch.Tensor]]:
    """What a worker sends back."""
    seen = [torch.empty_like(message(number, i)) for i in range(MANY)]
    for work in [group.context.irecv(x, rank, Tag(number, i, rank)) for i, x in enumerate(seen)]:
        work.wait()
    return list(enumerate(seen))


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
