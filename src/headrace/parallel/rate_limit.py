"""A transport with limited bandwidth, latency and jitter on each link, for experiments (`bench prefill`)."""

from __future__ import annotations

import queue
import random
import threading
import time
from dataclasses import dataclass, field

from torch import Tensor

from headrace.parallel.transport import RankLost, Tag, Traffic, Transfer, Transport
from headrace.parallel.waiters import Waiters


class RateLimitedTransport:
    """Each link (sender -> receiver) of `transport` as a serial line of `bandwidth_bytes_s`.

    A message leaves when the line is free, occupies it for bytes / bandwidth * (1 + u), u uniform in [-jitter, jitter]
    and drawn per message, and arrives `latency_s` after that. Relays are sends on their own link. The draws of a link
    depend on (seed, sender, receiver) and the order of its messages only.

    What the transport underneath takes comes on top; `own_bytes_s`, its measured rate, is how much of that to deduct
    (a line faster than that cannot be imitated: ValueError).
    """

    def __init__(
        self,
        transport: Transport,
        bandwidth_bytes_s: float,
        latency_s: float = 0.0,
        jitter: float = 0.0,
        seed: int = 0,
        own_bytes_s: float | None = None,
    ) -> None:
        if bandwidth_bytes_s <= 0 or latency_s < 0:
            raise ValueError(f"need bandwidth above 0 and latency of at least 0, got {bandwidth_bytes_s}, {latency_s}")
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter must be in [0, 1), got {jitter}")
        if own_bytes_s is not None and own_bytes_s * (1 - jitter) < bandwidth_bytes_s:
            raise ValueError(
                f"the transport attains {own_bytes_s:.3g} bytes/s, which cannot imitate {bandwidth_bytes_s:.3g} "
                f"with jitter {jitter}: ask for less bandwidth"
            )
        self.transport = transport
        self.bandwidth, self.latency, self.jitter, self.seed = bandwidth_bytes_s, latency_s, jitter, seed
        self.own_s_per_byte = 0.0 if own_bytes_s is None else 1 / own_bytes_s
        self.traffic = Traffic()
        self._lock = threading.Lock()
        self._lines: dict[int, _LimitedLink] = {}
        self._waiters = Waiters("headrace-rate-limit")

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def size(self) -> int:
        return self.transport.size

    def isend(self, x: Tensor, to: int, tag: Tag) -> _LimitedSend:
        with self._lock:
            self.traffic.sent(to, x)
            if to not in self._lines:
                self._lines[to] = _LimitedLink(self, to)
            return self._lines[to].put(x, tag)

    def irecv(self, x: Tensor, source: int, tag: Tag, relay: int | None = None) -> Transfer:
        received = _LimitedReceive(self.traffic, self.transport.irecv(x, source, tag))
        if relay is not None:
            received.relayed = _LimitedSend(self.traffic)
            self._waiters.run(lambda: self._relay(received, x, relay, tag))
        return received

    def _relay(self, received: _LimitedReceive, x: Tensor, relay: int, tag: Tag) -> None:
        assert received.relayed is not None
        try:
            received.inner.wait()
            sent = self.isend(x, relay, tag)
            sent.sent()
            received.relayed.finish(None, None)
        except RankLost as error:
            received.relayed.finish(None, error)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Ends the threads once they have sent what they hold; whether they all have, in that time. The transport
        underneath is left to its owner, who closes it after this."""
        with self._lock:
            lines = list(self._lines.values())
        for line in lines:
            line.messages.put(None)
        end = time.monotonic() + timeout_s
        for line in lines:
            line.thread.join(max(0.0, end - time.monotonic()))
        return self._waiters.close(max(0.0, end - time.monotonic())) and not any(x.thread.is_alive() for x in lines)


@dataclass(eq=False, slots=True)
class _QueuedMessage:
    x: Tensor
    tag: Tag
    asked: float
    work: _LimitedSend


class _LimitedLink:
    """The way to one receiver, and the thread that sends on it."""

    def __init__(self, end: RateLimitedTransport, to: int) -> None:
        self.end, self.to = end, to
        self.free = 0.0
        self.random = random.Random(f"{end.seed} {end.rank} {to}")
        self.messages: queue.SimpleQueue[_QueuedMessage | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._send, name=f"headrace-line-{to}", daemon=True)
        self.thread.start()

    def put(self, x: Tensor, tag: Tag) -> _LimitedSend:
        work = _LimitedSend(self.end.traffic)
        self.messages.put(_QueuedMessage(x, tag, time.perf_counter(), work))
        return work

    def leaves(self, size: int, asked: float) -> float:
        """When a message of `size` bytes is to be handed on; the line is occupied until `self.free`."""
        end = self.end
        stretch = 1 + self.random.uniform(-end.jitter, end.jitter)
        self.free = max(self.free, asked) + size / end.bandwidth * stretch
        return self.free + end.latency - size * end.own_s_per_byte

    def _send(self) -> None:
        while (message := self.messages.get()) is not None:
            size = message.x.numel() * message.x.element_size()
            wait = self.leaves(size, message.asked) - time.perf_counter()
            if wait > 0:
                time.sleep(wait)
            try:
                message.work.finish(self.end.transport.isend(message.x, self.to, message.tag), None)
            except (RankLost, ValueError) as error:
                message.work.finish(None, error)
            del message


@dataclass(eq=False)
class _LimitedSend:
    """A message on its line, later the send it became."""

    traffic: Traffic
    inner: Transfer | None = None
    error: Exception | None = None
    handed_on: threading.Event = field(default_factory=threading.Event)

    def finish(self, inner: Transfer | None, error: Exception | None) -> None:
        self.inner, self.error = inner, error
        self.handed_on.set()

    @property
    def done(self) -> bool:
        return self.handed_on.is_set() and (self.inner is None or self.inner.done)

    def wait(self) -> None:
        began = time.perf_counter()
        self.sent()
        self.traffic.wait_s += time.perf_counter() - began

    drain = wait

    def sent(self) -> None:
        """As wait, but nobody is held up: the waiting of a relay's thread is not the rank's."""
        self.handed_on.wait()
        if self.error is not None:
            raise self.error
        if self.inner is not None:
            self.inner.wait()


@dataclass(eq=False)
class _LimitedReceive:
    """A receive, and the relay that follows it."""

    traffic: Traffic
    inner: Transfer
    relayed: _LimitedSend | None = None

    @property
    def done(self) -> bool:
        return self.inner.done

    def wait(self) -> None:
        began = time.perf_counter()
        self.inner.wait()
        self.traffic.wait_s += time.perf_counter() - began

    def drain(self) -> None:
        self.wait()
        if self.relayed is not None:
            self.relayed.wait()
