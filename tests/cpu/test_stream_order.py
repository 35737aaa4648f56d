"""What tiers do on streams of a device: every read and every reuse of memory is ordered, and each wait is needed."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from headrace import device
from headrace.offload.copy_streams import CudaTicket
from headrace.offload.emulated_link import EmulatedLink
from headrace.offload.ranked import words
from headrace.offload.tiers.base import BlobKind
from tests.support.pool_on_streams import KINDS, PoolOnStreams
from tests.support.stream_order import StreamOrder


def run(order: StreamOrder, monkeypatch: pytest.MonkeyPatch, lends: bool, replayed: bool = False) -> None:
    """Chunks are computed, stored and overwritten; they come back twice into slots that were in use before, and are
    attended while they come. What comes a third time nobody attends: its slots are written to when it is there."""
    with device.use(order), order.recording():
        engine = PoolOnStreams(order, monkeypatch, lends)
        first, second = [0, 1, 2, 3], [4, 5, 6, 7]
        engine.write(first, seed=1)
        truth = engine.read(first)
        engine.store(first)
        engine.write(first, seed=2)
        for slots in (second, first):
            engine.read(slots)  # a step is still at them
            engine.bring(slots, KINDS)
            attended = engine.replay(slots) if replayed else engine.read(slots)
            assert all(torch.equal(*pair) for pair in zip(attended, truth, strict=True))
            assert engine.answers.get().good == len(slots)
            engine.agent.obey(words.EndBring(8, 7), engine.answers.put)
            engine.answers.get()
        engine.bring(second, "kkkk")
        engine.answers.get()
        engine.write(second, seed=3)
        engine.agent.obey(words.CloseTiers(9, 1.0), engine.answers.put)


NEEDED = {
    ("_carry", "wait_event"), ("wait in read", "wait_event"), ("wait in wait", "wait_event"), ("filled", "wait_event"),
    ("filled", "synchronize"), ("finish", "synchronize"),
}  # fmt: skip
"""Functions that wait, and how."""
LANDING = ("take", "synchronize")
"""What is read elsewhere passes through memory that is used again."""
TIMES = {("seconds", "synchronize")}
"""Waits that order nothing: for times."""


@pytest.mark.parametrize("lends", [True, False], ids=["lent", "read"])
def test_all_is_ordered(lends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    order = StreamOrder()
    run(order, monkeypatch, lends)
    assert not order.violations
    assert order.seen == NEEDED | TIMES | (set() if lends else {LANDING})


@pytest.mark.parametrize("place", sorted(NEEDED | {LANDING}), ids="-".join)
def test_a_dropped_wait_is_found(place: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    order = StreamOrder(dropped=place)
    run(order, monkeypatch, lends=place != LANDING)
    assert order.violations


@pytest.mark.parametrize("dropped", [None, ("wait in wait_for_all", "wait_event")], ids=["ordered", "dropped"])
def test_a_replayed_step_waits_for_all_layers(dropped: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no copy is known to have ended before it is attended: else a thread that knows would order it."""
    order, attended = StreamOrder(dropped), threading.Event()
    finish, bring, replay = CudaTicket.finish, PoolOnStreams.bring, PoolOnStreams.replay

    def finished(self: CudaTicket, link: EmulatedLink) -> None:
        attended.wait(9)
        finish(self, link)

    def brought(self: PoolOnStreams, slots: Sequence[int], kinds: Sequence[BlobKind], number: int = 7) -> None:
        if kinds is KINDS:  # they are attended
            attended.clear()
        bring(self, slots, kinds, number)

    def replayed(self: PoolOnStreams, slots: Sequence[int]) -> list[Tensor]:
        found = replay(self, slots)
        attended.set()
        return found

    attended.set()
    monkeypatch.setattr(CudaTicket, "finish", finished)
    monkeypatch.setattr(PoolOnStreams, "bring", brought)
    monkeypatch.setattr(PoolOnStreams, "replay", replayed)
    run(order, monkeypatch, lends=True, replayed=True)
    assert bool(order.violations) == (dropped is not None)


@pytest.mark.parametrize(
    ("row", "behind", "ordered"),
    [(1, "late", True), (1, "early", False), (1, "", False), (2, "", True)],
    ids=["behind-the-write", "behind-an-event-of-before", "behind-nothing", "elsewhere"],
)
def test_what_counts_as_ordered(row: int, behind: str, ordered: bool) -> None:
    order = StreamOrder()
    with order.recording():
        x, other, events = order.watch(torch.zeros(4, 8), "x"), order.stream(), {}
        events["early"] = order.current_stream().record_event()
        x[1] = 1
        events["late"] = order.current_stream().record_event()
        with order.on(other):
            if behind:
                other.wait_event(events[behind])
            x[row].clone()
        x[3] = 1
    assert not order.violations if ordered else "bytes 32..63" in order.violations[0]


def test_reads_need_no_order() -> None:
    order = StreamOrder()
    with order.recording():
        x = order.watch(torch.zeros(4, 8), "x")
        x.clone()
        with order.on(order.stream()):
            x.clone()
            assert not order.violations
            x[1] = 1
    assert order.violations, "but what is read is not written to meanwhile"


def test_a_thread_knows_what_it_waited_for() -> None:
    for waits in (True, False):
        order = StreamOrder()
        with order.recording():
            x, there = order.pinned((64,), torch.uint8), order.watch(torch.ones(64, dtype=torch.uint8), "there")
            x.copy_(there)
            event = order.current_stream().record_event()
            if waits:
                event.synchronize()
        order.host(x.numpy(), writes=False)
        assert bool(order.violations) != waits
