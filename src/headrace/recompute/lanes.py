"""Lanes: transfers that run beside the computation, and a link as slow as one likes to run them over.

The paper's streams (KVPR, section 3.3 and Algorithm 1): weights, KV, activations and hidden states in, KV and hidden
states out. All that goes in shares one link, and what is submitted first arrives first; so does all that goes out.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class Link:
    """A line between two memories: a transfer of n bytes takes at least latency_s + n / bytes_s, one after the other.

    bytes_s None: as fast as the machine is. Waits by sleeping, so that nothing is taken from the computation.
    """

    def __init__(self, bytes_s: float | None = None, latency_s: float = 0.0) -> None:
        if (bytes_s is not None and not bytes_s > 0) or not latency_s >= 0:
            raise ValueError(f"a link needs bytes_s above 0 and latency_s of at least 0, got {bytes_s}, {latency_s}")
        self.bytes_s, self.latency_s = bytes_s, latency_s
        self._free = 0.0

    def carried(self, size: int, began: float) -> None:
        """Returns when a transfer of `size` bytes that began at `began` (time.perf_counter) has arrived."""
        line = 0.0 if self.bytes_s is None else size / self.bytes_s
        self._free = max(self._free, began) + line + self.latency_s
        wait = self._free - time.perf_counter()
        if wait > 0:
            time.sleep(wait)


@dataclass(slots=True, eq=False)
class Ticket:
    """A transfer under way. began_s, ended_s: time.perf_counter. error: what it raised, None if it went well."""

    size: int
    stream: str
    began_s: float = 0.0
    ended_s: float = 0.0
    error: Exception | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def end(self, error: Exception | None) -> None:
        self.ended_s, self.error = time.perf_counter(), error
        self._ended.set()

    def wait(self) -> None:
        """Until it has ended; raises what the transfer raised."""
        self._ended.wait()
        if self.error is not None:
            raise self.error


class Lane(Protocol):
    """Transfers in the order in which they were submitted."""

    def submit(self, run: Callable[[], object], size: int, stream: str) -> Ticket:
        """Runs `run`, which moves `size` bytes."""

    def copy(self, into: Tensor, source: Tensor, stream: str) -> Ticket:
        """Copies a tensor into another of its shape and type; both are left alone until the ticket's end."""

    def close(self) -> None:
        """Ends the lane after what was submitted."""


class ThreadLane:
    """A lane that is a thread, over a link of its own."""

    def __init__(self, name: str, link: Link | None = None) -> None:
        self.link = link or Link()
        self._work: queue.SimpleQueue[tuple[Ticket, Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"headrace-{name}", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], object], size: int, stream: str) -> Ticket:
        ticket = Ticket(size, stream)
        self._work.put((ticket, run))
        return ticket

    def copy(self, into: Tensor, source: Tensor, stream: str) -> Ticket:
        return self.submit(lambda: into.copy_(source), into.nbytes, stream)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            ticket, run = item
            ticket.began_s, error = time.perf_counter(), None
            try:
                run()
                self.link.carried(ticket.size, ticket.began_s)
            except Exception as raised:
                error = raised
            ticket.end(error)
            del item, run, ticket

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()
