"""The stack of tiers: who is asked and written to, and queues that stay within their bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.offload.tiers.base import BlobFormat, BlobParts, Read, TierStats
from headrace.offload.tiers.stack import Tiers
from headrace.offload.tiers.writer import Write, Writer
from headrace.planner.machine import PieceRate
from tests.support.redis_servers import wait_for

pytestmark = pytest.mark.unit

FAR_S = 20.0


class FakeTier:
    """Keeps blobs in a dict. Writes wait for `gate`; `accepts` and `raises` say how they end."""

    format: BlobFormat = "raw"
    read_guess = PieceRate(1e-9, 1e-4)

    def __init__(self, kind: str) -> None:
        self.kind, self.in_memory = kind, kind == "host"
        self.blobs: dict[bytes, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.writing = threading.Event()
        self.accepts, self.raises, self.closed = True, False, 0
        self.asked: list[list[bytes]] = []
        self.puts: list[bytes] = []
        self.dropped = 0

    def has(self, names: Sequence[bytes]) -> list[bool]:
        self.asked.append(list(names))
        return [name in self.blobs for name in names]

    def put(self, name: bytes, tenant: bytes, parts: BlobParts) -> bool:
        self.puts.append(name)
        self.writing.set()
        assert self.gate.wait(FAR_S)
        if self.raises:
            raise RuntimeError("a defect")
        if self.accepts:
            self.blobs.setdefault(name, b"".join(parts))
        self.dropped += not self.accepts
        return self.accepts

    def read(self, reads: Sequence[Read]) -> list[bool]:
        for read in reads:
            read.into[:] = self.blobs[read.name][read.offset :][: len(read.into)]
        return [True] * len(reads)

    def drop(self, names: Sequence[bytes]) -> None:
        for name in names:
            self.blobs.pop(name, None)

    def stats(self) -> TierStats:
        return TierStats(blobs=len(self.blobs), dropped=self.dropped)

    def close(self) -> None:
        self.closed += 1


class Stack:
    def __init__(self, queue_bytes: int = 100, timeout_s: float = 0.05) -> None:
        self.host, self.disk, self.remote = FakeTier("host"), FakeTier("disk"), FakeTier("remote")
        self.tiers = Tiers([self.host, self.disk, self.remote], queue_bytes, timeout_s)

    def offer(self, index: int, name: bytes, size: int = 10) -> bool:
        return self.tiers.offer(index, name, b"", [bytes(size)], size)

    def close(self) -> None:
        for tier in (self.host, self.disk, self.remote):
            tier.gate.set()
        self.tiers.close(FAR_S)


@pytest.fixture
def stack() -> Iterator[Stack]:
    made = Stack()
    yield made
    made.close()


def test_find_asks_later_tiers_for_the_rest(stack: Stack) -> None:
    stack.host.blobs, stack.disk.blobs, stack.remote.blobs = {b"a": b""}, {b"a": b"", b"b": b""}, {b"c": b""}
    assert stack.tiers.find([b"a", b"b", b"c", b"d", b"b"]) == [0, 1, 2, None, 1]
    assert stack.disk.asked == [[b"b", b"c", b"d", b"b"]] and stack.remote.asked == [[b"c", b"d"]]
    assert stack.tiers.find([b"a"]) == [0] and stack.tiers.find([]) == []
    assert len(stack.disk.asked) == len(stack.remote.asked) == 1


def test_read_and_drop(stack: Stack) -> None:
    stack.host.blobs, stack.disk.blobs = {b"a": b"host"}, {b"a": b"disk"}
    into = bytearray(3)
    assert stack.tiers.read(1, [Read(b"a", 1, memoryview(into))]) == [True] and into == b"isk"
    stack.tiers.drop([b"a"])
    assert not stack.host.blobs and not stack.disk.blobs


def test_host_is_written_at_once(stack: Stack) -> None:
    assert stack.offer(0, b"a")
    assert stack.host.blobs == {b"a": bytes(10)} and not stack.tiers.pending(0, b"a")
    stack.host.accepts = False
    assert not stack.offer(0, b"b")


def test_others_are_written_behind(stack: Stack) -> None:
    for tier in (stack.disk, stack.remote):
        tier.gate.clear()
    assert stack.offer(1, b"a", 60) and stack.offer(2, b"a", 70)
    assert stack.tiers.pending(1, b"a") and not stack.disk.blobs
    assert {kind: stats.queued_bytes for kind, stats in stack.tiers.stats().items()} == {
        "host": 0,
        "disk": 60,
        "remote": 70,
    }
    assert not stack.tiers.flush(0.01)
    stack.disk.gate.set()
    stack.remote.gate.set()
    assert stack.tiers.flush(FAR_S)
    assert stack.disk.blobs == {b"a": bytes(60)} and stack.remote.blobs == {b"a": bytes(70)}
    assert all(stats.queued_bytes == 0 for stats in stack.tiers.stats().values())


def test_pending_counts_as_stored(stack: Stack) -> None:
    stack.disk.gate.clear()
    stack.host.blobs = stack.remote.blobs = {b"a": b"", b"b": b""}
    assert stack.offer(1, b"a")
    assert (
        stack.tiers.lacking(b"a") == [] and stack.tiers.lacking(b"b") == [1] and stack.tiers.lacking(b"c") == [0, 1, 2]
    )
    asked = [len(tier.asked) for tier in stack.tiers.tiers[1:]]
    assert stack.tiers.doubtful(b"c") == [0, 1, 2] and stack.tiers.doubtful(b"a")[:1] != [0]
    assert [len(tier.asked) for tier in stack.tiers.tiers[1:]] == asked, "a step waited for disk or network"


def test_offered_twice_written_once(stack: Stack) -> None:
    stack.disk.gate.clear()
    assert all([stack.offer(1, b"a"), stack.offer(1, b"b"), stack.offer(1, b"a"), stack.offer(1, b"b")])
    assert stack.tiers.stats()["disk"].queued_bytes == 20
    stack.disk.gate.set()
    assert stack.tiers.flush(FAR_S)
    assert stack.disk.puts == [b"a", b"b"]


def test_full_queue_drops_after_its_time(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    stack.disk.gate.clear()
    assert stack.offer(1, b"a", 60) and stack.offer(1, b"b", 40)
    assert not stack.offer(1, b"c", 1) and not stack.offer(1, b"d", 1)
    assert stack.offer(1, b"b", 40)  # waits already
    assert stack.tiers.stats()["disk"].dropped == 2
    assert len(caplog.records) == 1 and "disk" in caplog.text
    assert stack.offer(2, b"c", 100)
    stack.disk.gate.set()
    assert stack.tiers.flush(FAR_S)
    assert stack.offer(1, b"c", 100)


def test_offer_waits_for_room() -> None:
    stack = Stack(timeout_s=FAR_S)
    stack.disk.gate.clear()
    assert stack.offer(1, b"a", 100)
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(stack.offer, 1, b"b", 100)
        assert stack.disk.writing.wait(FAR_S) and not second.done()
        stack.disk.gate.set()
        assert second.result(FAR_S)
    assert stack.tiers.flush(FAR_S) and stack.disk.puts == [b"a", b"b"]
    assert stack.tiers.stats()["disk"].dropped == 0
    stack.close()


def test_only_the_first_offer_waits_for_a_stuck_tier() -> None:
    """The next ones do not wait until a write has ended: a test of 100 such waits would take 100 times as long."""
    stack = Stack(timeout_s=1.0)
    stack.disk.gate.clear()
    assert stack.offer(1, b"a", 100)
    with ThreadPoolExecutor(1) as threads:
        refused = threads.submit(lambda: [stack.offer(1, b"%d" % i, 100) for i in range(100)])
        assert refused.result(FAR_S) == [False] * 100
    stack.close()


def test_too_large_for_the_queue(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    assert not stack.offer(1, b"a", 101) and not stack.offer(1, b"b", 102)
    assert stack.offer(1, b"c", 100)
    assert stack.tiers.stats()["disk"].dropped == 2 and len(caplog.records) == 1
    assert "--kv-offload-queue-mb" in caplog.text


def test_refused_and_failing_writes(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    stack.disk.accepts, stack.remote.raises = False, True
    assert stack.offer(1, b"a") and stack.offer(2, b"a")
    assert stack.tiers.flush(FAR_S)
    stats = stack.tiers.stats()
    assert (stats["disk"].dropped, stats["remote"].dropped) == (1, 1) and "a defect" in caplog.text
    stack.disk.accepts, stack.remote.raises = True, False
    assert stack.offer(1, b"a") and stack.offer(2, b"a") and stack.tiers.flush(FAR_S)
    assert stack.disk.blobs.keys() == stack.remote.blobs.keys() == {b"a"}


def test_close_writes_what_waits(stack: Stack) -> None:
    for i in range(10):
        assert stack.offer(1, b"%d" % i)
    stack.tiers.close(FAR_S)
    assert len(stack.disk.blobs) == 10
    assert (stack.host.closed, stack.disk.closed, stack.remote.closed) == (1, 1, 1)
    assert not stack.offer(1, b"late") and not stack.tiers.pending(1, b"late")
    stack.tiers.close(FAR_S)


def test_close_leaves_a_stuck_write_behind(caplog: pytest.LogCaptureFixture) -> None:
    stack = Stack()
    stack.disk.gate.clear()
    assert stack.offer(1, b"a") and stack.disk.writing.wait(FAR_S) and stack.offer(1, b"b")
    with ThreadPoolExecutor(1) as threads:
        threads.submit(stack.tiers.close, 0.01).result(FAR_S)
    assert "20 bytes were not written" in caplog.text and "left behind" in caplog.text
    assert stack.tiers.stats()["disk"].dropped == 1 and stack.disk.closed == 1
    stack.disk.gate.set()
    wait_for(lambda: stack.tiers.stats()["disk"].queued_bytes == 0)
    assert stack.disk.puts == [b"a"]


def test_close_ends_a_waiting_offer() -> None:
    stack = Stack(timeout_s=0.5)
    stack.disk.gate.clear()
    assert stack.offer(1, b"a", 100)
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(stack.offer, 1, b"b", 100)
        threads.submit(stack.tiers.close, 0.0).result(FAR_S)
        assert not waiting.result(FAR_S)
    stack.close()


@pytest.mark.parametrize(
    ("kinds", "queue_bytes", "timeout_s"),
    [(["disk", "disk"], 1, 1.0), (["disk"], 0, 1.0), (["disk"], 1, 0.0), (["disk"], 1, float("inf"))],
)
def test_settings_refused(kinds: list[str], queue_bytes: int, timeout_s: float) -> None:
    with pytest.raises(ValueError, match=r"tiers|queue_bytes"):
        Tiers([FakeTier(kind) for kind in kinds], queue_bytes, timeout_s)


class SteppedTier(FakeTier):
    """Ends one write per release()."""

    def __init__(self) -> None:
        super().__init__("disk")
        self.turns = threading.Semaphore(0)

    def put(self, name: bytes, tenant: bytes, parts: BlobParts) -> bool:
        assert self.turns.acquire(timeout=FAR_S)
        self.puts.append(name)
        if self.accepts:
            self.blobs[name] = b"".join(parts)
        return self.accepts


class Queue(RuleBasedStateMachine):
    """Offers and writes in any order: the queue holds what was taken and not written, within its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = SteppedTier()
        self.writer = Writer(self.tier, 100)
        self.waiting: list[tuple[bytes, int]] = []
        self.written: list[bytes] = []
        self.refused = 0

    @rule(name=st.sampled_from([b"a", b"b", b"c", b"d"]), size=st.integers(0, 120))
    def offer(self, name: bytes, size: int) -> None:
        held = sum(size for _, size in self.waiting)
        taken = self.writer.offer(Write(name, b"", [bytes(size)], size), 0.0)
        there = name in dict(self.waiting)
        assert taken == (size <= 100 and (there or held + size <= 100))
        if taken and not there:
            self.waiting.append((name, size))
        self.refused += not taken

    @precondition(lambda self: self.waiting)
    @rule(accepts=st.booleans())
    def write(self, accepts: bool) -> None:
        self.tier.accepts = accepts
        name, _ = self.waiting.pop(0)
        self.written.append(name)
        self.tier.turns.release()
        wait_for(lambda: self.writer.queued_bytes == sum(size for _, size in self.waiting) and not self.behind())

    def behind(self) -> bool:
        return len(self.tier.puts) < len(self.written) or any(
            self.writer.pending(name) != (name in dict(self.waiting)) for name in (b"a", b"b", b"c", b"d")
        )

    @invariant()
    def within_its_bytes(self) -> None:
        assert self.writer.queued_bytes == sum(size for _, size in self.waiting) <= 100
        assert self.tier.puts == self.written
        assert self.writer.dropped == self.refused

    def teardown(self) -> None:
        self.writer.stop()
        for _ in self.waiting:
            self.tier.turns.release()


Queue.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestQueue = Queue.TestCase


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 60)), max_size=12), min_size=2, max_size=4))
def test_several_threads(offers: list[list[tuple[int, int]]]) -> None:
    """What is queued never exceeds its bytes, what was taken is written, and not by two at a time."""
    peak = 0
    lock = threading.Lock()

    class Counting(FakeTier):
        def put(self, name: bytes, tenant: bytes, parts: BlobParts) -> bool:
            nonlocal peak
            with lock:
                peak = max(peak, writer.queued_bytes)
            return super().put(name, tenant, parts)

    tier = Counting("disk")
    writer = Writer(tier, 100)

    def work(mine: list[tuple[int, int]]) -> set[bytes]:
        taken = {b"%d" % i for i, size in mine if writer.offer(Write(b"%d" % i, b"", [bytes(size)], size), FAR_S)}
        assert writer.queued_bytes <= 100
        return taken

    with ThreadPoolExecutor(len(offers)) as threads:
        taken = set().union(*threads.map(work, offers))
    assert writer.flush(time.monotonic() + FAR_S)
    writer.stop()
    assert writer.join(time.monotonic() + FAR_S) and peak <= 100 and writer.dropped == 0
    assert tier.blobs.keys() == taken == {b"%d" % i for mine in offers for i, _ in mine}
