"""Links between processes: what arrives, in whatever order, and where they listen."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from headrace.parallel.group import Group
from headrace.parallel.transport import Tag
from tests.support import fake_rank
from tests.support.fake_rank import MANY, message, step
from tests.support.rank_groups import collect, echoes, listening, opened

pytestmark = pytest.mark.usefixtures("importable")


@pytest.fixture(scope="module")
def three() -> Iterator[Group]:
    with opened(3) as group:
        assert group.workers is not None
        reports = group.workers.wait_ready()
        assert reports == {rank: f"{rank} of 3, tiny, None, 127.0.0.1".encode() for rank in (1, 2)}
        yield group


@pytest.mark.parametrize("number", [0, 1, 510])
def test_many_tags_out_of_order(three: Group, number: int) -> None:
    three.context.traffic.bytes.clear()
    assert echoes(three, number)
    total = sum(message(number, i).nbytes for i in range(MANY))
    assert three.context.traffic.bytes == {1: total, 2: total}


def test_relay(three: Group) -> None:
    assert three.workers is not None
    three.workers.send(step(2, fake_rank.RELAY))
    for i in range(MANY):
        three.context.isend(message(2, i), 1, Tag(2, i, 0)).wait()
    back = [torch.empty_like(message(2, i)) for i in range(MANY)]
    for work in [three.context.irecv(x, 2, Tag(2, i, 0)) for i, x in enumerate(back)]:
        work.wait()
    assert all(torch.equal(x, message(2, i)) for i, x in enumerate(back))
    for rank in (1, 2):
        assert all(torch.equal(x, message(2, i)) for i, x in collect(three, 2, rank))


def test_refuses_what_it_does_not_send(three: Group) -> None:
    with pytest.raises(ValueError, match="empty"):
        three.context.isend(torch.empty(0), 1, Tag(0, 0, 0))
    with pytest.raises(ValueError, match="contiguous"):
        three.context.irecv(torch.empty(4, 4).T[1:], 1, Tag(0, 0, 0))


def test_listens_on_the_interface_only(three: Group) -> None:
    assert three.workers is not None
    gc.collect()  # groups of other tests in this process
    for pid in (os.getpid(), *three.workers.pids.values()):
        assert listening(pid) == {"0100007F"}
