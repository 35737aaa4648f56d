"""The limited transport over the loopback: what arrives, in which order, and when it may at the earliest."""

from __future__ import annotations

import time

import pytest
import torch

from headrace.parallel.rate_limit import RateLimitedTransport
from headrace.parallel.transport import LoopbackHub, RankLost, Tag


def ends(count: int, **settings: float) -> tuple[LoopbackHub, list[RateLimitedTransport]]:
    hub = LoopbackHub(count)
    options = {"bandwidth_bytes_s": 1e9, **settings}
    return hub, [RateLimitedTransport(hub.transport(rank), **options) for rank in range(count)]  # type: ignore[arg-type]


def test_what_arrives_is_what_was_sent_also_by_relay() -> None:
    hub, (first, second, third) = ends(3, latency_s=0.001)
    messages = [torch.randn(5 + i) for i in range(8)]
    passed = [torch.empty(5 + i) for i in range(8)]
    final = [torch.empty(5 + i) for i in range(8)]
    works = [second.irecv(x, 0, Tag(0, i, 0), relay=2) for i, x in enumerate(passed)]
    works += [third.irecv(x, 1, Tag(0, i, 0)) for i, x in enumerate(final)]
    for i in reversed(range(8)):
        first.isend(messages[i], 1, Tag(0, i, 0)).wait()
    for work in works:
        work.drain()
    for sent, once, twice in zip(messages, passed, final, strict=True):
        assert torch.equal(sent, once) and torch.equal(sent, twice)
    assert first.traffic.messages == {1: 8} and second.traffic.messages == {2: 8} and not third.traffic.messages
    assert second.traffic.bytes == {2: sum(x.nbytes for x in messages)}
    assert hub.left_over() == 0
    assert all(end.close(60) for end in (first, second, third))


def test_nothing_arrives_before_the_line_allows() -> None:
    """Lower bounds only: 4 messages of 40,000 bytes at 1 MB/s, 20 ms latency."""
    _, (first, second) = ends(2, bandwidth_bytes_s=1e6, latency_s=0.02)
    buffers = [torch.empty(10_000) for _ in range(4)]
    works = [second.irecv(x, 0, Tag(0, i, 0)) for i, x in enumerate(buffers)]
    began = time.perf_counter()
    sends = [first.isend(torch.zeros(10_000), 1, Tag(0, i, 0)) for i in range(4)]
    for i, work in enumerate(works):
        work.wait()
        assert time.perf_counter() - began >= 0.04 * (i + 1) + 0.02
    for send in sends:
        send.wait()
    assert second.traffic.wait_s >= 0.15


def test_two_links_do_not_share_a_line() -> None:
    """One is occupied for 400 seconds; the message on the other arrives nevertheless."""
    _, (first, _, third) = ends(3, bandwidth_bytes_s=100)
    first.isend(torch.zeros(10_000), 1, Tag(0, 0, 0))
    first.isend(torch.ones(1), 2, Tag(0, 0, 0))
    x = torch.empty(1)
    third.irecv(x, 0, Tag(0, 0, 0)).wait()
    assert x.item() == 1


def test_jitter_is_drawn_per_message_and_repeats_with_the_seed() -> None:
    def times(seed: int) -> list[float]:
        _, (first, _) = ends(2, bandwidth_bytes_s=1e6, jitter=0.5, seed=seed)
        first.isend(torch.zeros(1), 1, Tag(0, 0, 0)).wait()
        line = first._lines[1]
        line.free = 0.0
        return [line.leaves(1000, asked=float(i)) - i for i in range(1, 200)]

    drawn = times(1)
    assert drawn == times(1) != times(2)
    assert 0.0005 <= min(drawn) < 0.0006 and 0.0014 < max(drawn) <= 0.0015


def test_own_rate_is_deducted_and_bounds_what_can_be_asked() -> None:
    _, (first, _) = ends(2, bandwidth_bytes_s=1e6, own_bytes_s=4e6)
    first.isend(torch.zeros(1), 1, Tag(0, 0, 0)).wait()
    line = first._lines[1]
    line.free = 0.0
    assert line.leaves(1000, 1.0) == pytest.approx(1.00075) and line.free == pytest.approx(1.001)
    with pytest.raises(ValueError, match="ask for less bandwidth"):
        ends(2, own_bytes_s=5e8)


def test_a_lost_rank_reaches_who_waits() -> None:
    hub, (first, second) = ends(2, latency_s=0.01)
    receive = first.irecv(torch.empty(3), 1, Tag(0, 0, 0), relay=1)
    hub.fail("rank 1 is gone")
    for call in (receive.wait, receive.drain):
        with pytest.raises(RankLost, match="rank 1 is gone"):
            call()
    with pytest.raises(RankLost):
        second.irecv(torch.empty(3), 0, Tag(0, 0, 1)).wait()


@pytest.mark.parametrize("wrong", [{"bandwidth_bytes_s": 0.0}, {"latency_s": -1.0}, {"jitter": 1.0}])
def test_settings_that_cannot_work(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        ends(2, **wrong)


def test_a_relay_is_not_waiting_of_the_rank() -> None:
    """The relay is under way for 0.1 s, while its rank does something else."""
    _, (first, second, third) = ends(3, latency_s=0.1)
    passed, final = torch.empty(4), torch.empty(4)
    received = second.irecv(passed, 0, Tag(0, 0, 0), relay=2)
    arrives = third.irecv(final, 1, Tag(0, 0, 0))
    first.isend(torch.ones(4), 1, Tag(0, 0, 0))
    arrives.wait()
    assert received.relayed is not None
    received.relayed.handed_on.wait()  # set when the relay's thread has done its part
    assert second.traffic.wait_s == 0.0 and second.traffic.messages == {2: 1}
