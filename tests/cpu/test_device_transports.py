"""Transports of a device's tensors: what arrives, in which order it is posted, and that streams are ordered."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import device
from headrace.parallel import device_transfer, nccl_transport, staged_transport
from headrace.parallel.nccl_transport import Direction, NcclTransport
from headrace.parallel.pinned_room import PinnedRoom
from headrace.parallel.staged_transport import StagedTransport
from headrace.parallel.transport import Links, RankLost, Tag
from tests.support.fake_device import FakeDevice
from tests.support.fake_nccl import FakeCommunicator, Mailbox, directions, gloo_directions, host_links
from tests.support.ordered_threads import ordered_threads
from tests.support.stream_order import Clock, StreamOrder

SIZE = 3
Ends = tuple[list[Links], dict[tuple[int, int], FakeCommunicator]]


@pytest.fixture(params=["staged", "nccl", "gloo"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Three ranks' ends, and their communicators. gloo: as by NCCL, over process groups whose sends wait."""
    made, of = directions(SIZE)
    if request.param == "gloo":
        made, of = {}, gloo_directions(SIZE)
    with device.use(FakeDevice()) as used:
        place = device.current()
        assert used is not None
        hosts = host_links(SIZE)
        found: list[Links] = [
            StagedTransport(host, place) if request.param == "staged" else NcclTransport(host, place, *of(host.rank))
            for host in hosts
        ]
        yield found, made
        for each in found:
            each.close()


def test_messages_meet_by_their_tags(ends: Ends) -> None:
    """Sent and received in different orders, before and after their receives are posted, and relayed on."""
    links, made = ends
    messages = {i: torch.randn(3 + i, generator=torch.Generator().manual_seed(i)) for i in range(12)}
    order = random.Random(1)
    there: dict[int, dict[int, Tensor]] = {1: {}, 2: {}}
    works = []

    def receive(rank: int, i: int) -> None:
        there[rank][i] = torch.empty_like(messages[i])
        relay = 2 if rank == 1 else None
        works.append(links[rank].irecv(there[rank][i], rank - 1, Tag(1, 0, i), relay))

    first, second = list(messages), list(messages)
    order.shuffle(first)
    order.shuffle(second)
    for i in first[:6]:
        receive(1, i)
    for i in second:
        works.append(links[0].isend(messages[i], 1, Tag(1, 0, i)))
    for i in first[6:]:
        receive(1, i)
    for i in first:
        receive(2, i)
    for work in works:
        work.drain()
    assert all(each.done for each in works)
    for found in there.values():
        assert all(torch.equal(found[i], x) for i, x in messages.items())
    for communicator in made.values():
        sends, receives = ([tag for kind, tag in communicator.posted if kind == way] for way in ("send", "recv"))
        assert sends == receives
    assert links[0].traffic.messages == {1: 12} and links[1].traffic.messages == {2: 12}
    assert links[1].settle(1.0)


def test_ranks_that_all_send_first(ends: Ends) -> None:
    """Round a ring, and back, several at a time: nobody waits for another's receive."""
    links, _ = ends
    there: dict[tuple[int, int, int], Tensor] = {}
    works = []
    for step in range(4):
        for rank, other in [(r, (r + way) % SIZE) for r in range(SIZE) for way in (1, 2)]:
            works.append(links[rank].isend(torch.full((1 << 16,), 10.0 * rank + step), other, Tag(1, step, rank)))
    for step in reversed(range(4)):
        for rank, other in [(r, (r + way) % SIZE) for r in range(SIZE) for way in (1, 2)]:
            there[step, rank, other] = torch.empty(1 << 16)
            works.append(links[rank].irecv(there[step, rank, other], other, Tag(1, step, other)))
    for work in works:
        work.drain()
    assert all((x == 10.0 * other + step).all() for (step, _, other), x in there.items())


def test_who_waits_for_a_lost_rank_is_woken(ends: Ends) -> None:
    links, _ = ends
    work = links[0].irecv(torch.empty(4), 1, Tag(1, 0, 0))
    links[0].fail("rank 1 is gone")
    with pytest.raises(RankLost, match="rank 1 is gone"):
        work.wait()


def test_what_cannot_be_sent_is_refused(ends: Ends) -> None:
    links, _ = ends
    with pytest.raises(ValueError, match="contiguous"):
        links[0].isend(torch.zeros(4, 4).t(), 1, Tag(1, 0, 0))
    with pytest.raises(ValueError, match="empty"):
        links[0].irecv(torch.zeros(0), 1, Tag(1, 0, 0))


def layers(order: StreamOrder, links: Any, deliver: Callable[[], None]) -> None:
    """Three layers of a ring of two: what is written goes out, what comes is attended; buffers are used again. Then two
    messages that come behind each other into the same memory."""
    mine = order.watch(torch.zeros(64), "own keys")
    theirs = order.watch(torch.zeros(64), "keys that come")
    for layer in range(3):
        coming = links.irecv(theirs, 1, Tag(layer, 1, 0))
        mine.fill_(layer)
        going = links.isend(mine, 1, Tag(layer, 1, 0))
        deliver()
        coming.wait()
        assert torch.equal(theirs.clone(), torch.full((64,), float(layer)))
        going.wait()
    for piece in range(2):
        links.isend(mine, 1, Tag(3, 0, piece))
    deliver()
    for piece in range(2):
        coming = links.irecv(theirs, 1, Tag(3, 0, piece))
        deliver()
        coming.wait()
        theirs.clone()


class OrderedRoom(PinnedRoom):
    """Whoever takes a buffer knows what was done before it was given back."""

    def __init__(self, order: StreamOrder) -> None:
        super().__init__(order)
        self.order, self.given = order, dict[int, Clock]()

    def give(self, buffer: Tensor) -> None:
        self.given[buffer.data_ptr()] = Clock(self.order.clocks[threading.get_ident()])
        super().give(buffer)

    def take(self, size: int) -> Tensor:
        buffer = super().take(size)
        self.order.clocks[threading.get_ident()].join(self.given.get(buffer.data_ptr(), {}))
        return buffer


def staged(order: StreamOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    ordered_threads(order, monkeypatch, (device_transfer,))
    waiting: list[Callable[[], None]] = []

    def deliver() -> None:
        """On threads of their own; a send before the receive that its message is for."""
        known = Clock(order.clocks[threading.get_ident()])

        def run(task: Callable[[], None]) -> None:
            order.clocks[threading.get_ident()].join(known)
            task()

        for task in reversed(waiting):
            thread = threading.Thread(target=run, args=(task,))
            thread.start()
            thread.join()
        waiting.clear()

    monkeypatch.setattr(staged_transport, "Waiters", lambda *_: SimpleNamespace(run=waiting.append))
    monkeypatch.setattr(staged_transport, "PinnedRoom", OrderedRoom)
    with device.use(order), order.recording():
        host = Mailbox(lambda x, writes: order.host(x.numpy(), writes))
        layers(order, StagedTransport(host, order), deliver)  # type: ignore[arg-type]


STAGED = {
    ("isend", "wait_event"), ("_send", "synchronize"), ("_receive", "wait_event"), ("_receive", "synchronize"),
    ("wait in layers", "wait_event"),
}  # fmt: skip


def test_all_is_ordered_that_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    order = StreamOrder()
    staged(order, monkeypatch)
    assert not order.violations
    assert order.seen == STAGED


@pytest.mark.parametrize("place", sorted(STAGED), ids="-".join)
def test_a_wait_that_is_dropped_is_found(place: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    order = StreamOrder(dropped=place)
    staged(order, monkeypatch)
    assert order.violations


class Echo:
    """Host links of a rank to itself, which tell no thread what another has done."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.notes: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()

    def isend(self, x: Tensor, to: int, tag: Tag) -> Any:
        self.notes.put(x)
        return SimpleNamespace(wait=lambda: None)

    def irecv(self, x: Tensor, source: int, tag: Tag) -> Any:
        def wait() -> None:
            note = self.notes.get()
            if note is None:
                raise RankLost("closed")
            x.copy_(note)

        return SimpleNamespace(wait=wait)

    def fail(self, why: str) -> None:
        self.notes.put(None)

    def close(self, timeout_s: float) -> bool:
        return True


def by_nccl(order: StreamOrder, monkeypatch: pytest.MonkeyPatch) -> FakeCommunicator:
    """A rank whose messages come back to it, by the transport's own threads; the last two before they are asked for."""
    ordered_threads(order, monkeypatch, (device_transfer, nccl_transport))
    with device.use(order), order.recording():
        communicator = FakeCommunicator()
        direction = Direction(communicator, 1)
        links = NcclTransport(Echo(), order, {1: direction}, {1: direction})  # type: ignore[arg-type]

        def deliver() -> None:
            end = time.monotonic() + 20
            last = links.traffic.messages[1] == 5
            while last and len([1 for kind, _ in communicator.posted if kind == "recv"]) < 5:
                assert time.monotonic() < end
                time.sleep(0.001)

        layers(order, links, deliver)
        links.close()
        return communicator


NCCL = {
    ("_send_all", "synchronize"), ("_receive", "synchronize"), ("copy", "synchronize"),
    ("wait in layers", "wait_event"), ("wait in _ended", "wait_event"),
}  # fmt: skip
KEPT = {("keep", "synchronize")}
"""So long is memory kept that is under way; nobody writes it."""


def test_all_is_ordered_that_goes_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    order = StreamOrder()
    by_nccl(order, monkeypatch)
    assert not order.violations
    assert order.seen == NCCL | KEPT


def test_no_message_is_posted_behind_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two ranks could each wait for what the other has posted behind something else."""
    behind = by_nccl(StreamOrder(), monkeypatch).behind
    assert len(behind) == 10 and not any(stream.used for stream in behind)  # type: ignore[attr-defined]


@pytest.mark.parametrize("place", sorted(NCCL), ids="-".join)
def test_a_wait_dropped_by_nccl_is_found(place: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    order = StreamOrder(dropped=place)
    by_nccl(order, monkeypatch)
    assert order.violations
