"""Copy streams that are threads, and emulated links: order, errors, closing, a link's time by a clock of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from headrace.offload import emulated_link
from headrace.offload.copy_streams import CudaStream, ThreadStream, copy_alone, open_copy_streams
from headrace.offload.emulated_link import EmulatedLink
from headrace.offload.ticket import Ticket
from tests.support.fake_device import FakeDevice


@pytest.fixture
def stream() -> Iterator[ThreadStream]:
    stream = ThreadStream("test")
    yield stream
    stream.close()


class Clock:
    """Time that passes only in sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slept = 100.0, 0.0
        monkeypatch.setattr(emulated_link, "time", SimpleNamespace(perf_counter=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now, self.slept = self.now + seconds, self.slept + seconds


def test_a_link_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    link = EmulatedLink(1e6, 0.5)
    link.carried(2_000_000, clock.now)
    assert clock.now == pytest.approx(102.5)
    link.carried(0, clock.now)
    assert clock.now == pytest.approx(103.0)


def test_time_that_the_work_took_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer is not longer for what was done in it: reading, say."""
    clock = Clock(monkeypatch)
    link = EmulatedLink(1e6)
    began, clock.now = clock.now, clock.now + 0.75
    link.carried(1_000_000, began)
    assert clock.now == pytest.approx(101.0)
    began, clock.now = clock.now, clock.now + 3.0
    link.carried(1_000_000, began)
    assert clock.now == pytest.approx(104.0), "slower than the link: nothing is waited for"


def test_a_link_carries_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that began at once, on two streams, share it."""
    clock = Clock(monkeypatch)
    link = EmulatedLink(1e6)
    link.carried(1_000_000, 100.0)
    link.carried(1_000_000, 100.0)
    assert clock.now == pytest.approx(102.0)


def test_a_link_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    EmulatedLink().carried(1 << 40, clock.now)
    assert clock.slept == 0


@pytest.mark.parametrize(("given", "message"), [((0.0,), "bytes_s"), ((1.0, -1.0), "latency_s")])
def test_link_refuses(given: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmulatedLink(*given)


def test_in_order(stream: ThreadStream) -> None:
    done: list[int] = []
    tickets = [stream.submit(lambda i=i: done.append(i), 1, "kv") for i in range(100)]
    tickets[-1].wait()
    assert done == list(range(100))
    assert all(ticket.done for ticket in tickets)
    assert [ticket.began_s for ticket in tickets] == sorted(ticket.began_s for ticket in tickets)
    assert all(ticket.busy_s >= 0 for ticket in tickets)


def test_beside_the_caller(stream: ThreadStream) -> None:
    """The caller goes on while the stream works."""
    go = threading.Event()
    ticket = stream.submit(go.wait, 1, "kv")
    assert not ticket.done
    assert ticket.busy_s == 0
    go.set()
    ticket.wait()


def test_errors_are_handed_on(stream: ThreadStream) -> None:
    def fail() -> None:
        raise OSError("gone")

    def end() -> None:
        raise SystemExit

    bad, worse = stream.submit(fail, 7, "kv"), stream.submit(end, 7, "kv")
    good = stream.submit(lambda: None, 5, "kv")
    good.wait()
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            bad.wait()
    with pytest.raises(SystemExit):
        worse.wait()
    assert isinstance(bad.error, OSError)


def test_a_lost_device_ends_all_transfers() -> None:
    """After an illegal access every call fails, waiting for what was handed over before it too: nobody hangs."""

    def fails(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    device = FakeDevice()
    device.pinned = lambda shape, dtype: torch.zeros(1)  # type: ignore[method-assign]
    stream = CudaStream("test", device)
    stream.stream.synchronize = stream.stream.wait_event = fails  # type: ignore[method-assign, assignment]
    for ticket in [stream.submit(lambda: None, 1, "kv") for _ in range(2)]:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            ticket.wait()
    stream.close()


def test_copies(stream: ThreadStream) -> None:
    for source in (torch.randn(3, 5, 7).bfloat16(), torch.randn(4, 6).t(), torch.randint(9, (10,)), torch.empty(0)):
        into = torch.empty_like(source)
        ticket = stream.copy(into, source, "x")
        ticket.wait()
        assert torch.equal(into, source)
        assert ticket.size == source.nbytes
    with pytest.raises(ValueError, match="shape"):
        stream.copy(torch.empty(2), torch.empty(3), "x")


def test_copies_part_of_a_tensor() -> None:
    pool, source = torch.zeros(6, 4), torch.arange(8.0).view(2, 4)
    copy_alone(pool[2:4], source)
    assert torch.equal(pool[2:4], source)
    assert pool.sum() == source.sum()
    copy_alone(pool[:2, 1:3], source[:, :2])
    assert torch.equal(pool[:2, 1:3], source[:, :2])
    wide = torch.empty(2, 4, dtype=torch.float64)
    copy_alone(wide, source)
    assert torch.equal(wide, source.double())


def test_closing_ends_what_was_submitted() -> None:
    stream, done = ThreadStream("test"), []
    for i in range(20):
        stream.submit(lambda i=i: done.append(i), 1, "kv")
    stream.close()
    assert done == list(range(20))
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        stream.submit(lambda: None, 1, "kv")


def test_closing_while_others_submit() -> None:
    """What was taken is done; what comes too late is refused: nobody waits for ever."""
    stream = ThreadStream("test")
    tickets: list[Ticket] = []

    def submit() -> None:
        try:
            while True:
                tickets.append(stream.submit(lambda: None, 1, "kv"))
        except ValueError:
            pass

    threads = [threading.Thread(target=submit) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not tickets:
        pass
    stream.close()
    for thread in threads:
        thread.join(10)
    assert all(ticket.done for ticket in tickets)


def test_closing_from_the_stream_itself() -> None:
    stream = ThreadStream("test")
    stream.submit(stream.close, 0, "kv").wait()
    stream.close()


def test_copy_streams_of_a_cpu() -> None:
    """Two links: one direction does not hold up the other."""
    both = open_copy_streams(None, EmulatedLink(1e9, 1e-3))
    assert isinstance(both.into, ThreadStream) and isinstance(both.out, ThreadStream)
    assert both.into.link is not both.out.link
    assert (both.out.link.bytes_s, both.out.link.latency_s) == (1e9, 1e-3)
    both.close()
    with pytest.raises(ValueError, match="closed"):
        both.out.submit(lambda: None, 1, "kv")
