"""Lanes: transfers that run beside the computation, and a link as slow as one likes to run them over.

The paper's streams (KVPR, section 3.3 and Algorithm 1): weights, KV, activations and hidden states in, KV and hidden
states out. All that goes in shares one link, and what is submitted first arrives first; so does all that goes out.
On a CPU a lane is a thread. On a GPU it is a thread too, which drives a stream of its own.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

PINNED_BYTES = 8 << 20
"""Of each of the two buffers that pageable memory goes through on its way to or from a GPU."""


class Link:
    """A line between two memories: a transfer of n bytes takes at least latency_s + n / bytes_s, one after the other.

    bytes_s None: as fast as the machine is. jitter: each transfer takes up to this share longer or shorter, the same
    ones for the same seed. Waits by sleeping, so that nothing is taken from the computation.
    """

    def __init__(
        self, bytes_s: float | None = None, latency_s: float = 0.0, jitter: float = 0.0, seed: int = 0
    ) -> None:
        if (bytes_s is not None and not bytes_s > 0) or not latency_s >= 0:
            raise ValueError(f"a link needs bytes_s above 0 and latency_s of at least 0, got {bytes_s}, {latency_s}")
        if not 0 <= jitter < 1:
            raise ValueError(f"a link's jitter must be at least 0 and below 1, got {jitter}")
        self.bytes_s, self.latency_s, self.jitter, self.seed = bytes_s, latency_s, jitter, seed
        self._random = random.Random(seed)
        self._free = 0.0

    def twin(self) -> Link:
        """Another line like this one, with nothing on it: the way back."""
        return Link(self.bytes_s, self.latency_s, self.jitter, self.seed + 1)

    def carried(self, size: int, began: float) -> None:
        """Returns when a transfer of `size` bytes that began at `began` (time.perf_counter) has arrived."""
        line = self.latency_s + (0.0 if self.bytes_s is None else size / self.bytes_s)
        if self.jitter:
            line *= 1.0 + self._random.uniform(-self.jitter, self.jitter)
        self._free = max(self._free, began) + line
        wait = self._free - time.perf_counter()
        if wait > 0:
            time.sleep(wait)


@dataclass(slots=True, eq=False)
class Ticket:
    """A transfer under way. began_s, ended_s: time.perf_counter. cpu_s: what it took of a core, waiting not counted.
    error: what it raised, None if it went well."""

    size: int
    stream: str
    began_s: float = 0.0
    ended_s: float = 0.0
    cpu_s: float = 0.0
    error: BaseException | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    @property
    def busy_s(self) -> float:
        """How long the lane was at it; 0 before its end."""
        return self.ended_s - self.began_s if self.done else 0.0

    def end(self, error: BaseException | None) -> None:
        self.ended_s, self.error = time.perf_counter(), error
        self._ended.set()

    def wait(self) -> None:
        """Until it has ended; raises what the transfer raised."""
        self._ended.wait()
        if self.error is not None:
            raise self.error


@dataclass(slots=True)
class Carried:
    """What went over a lane on one stream."""

    transfers: int = 0
    bytes: int = 0
    busy_s: float = 0.0
    cpu_s: float = 0.0


class CopyStream(Protocol):
    """Transfers in the order in which they were submitted."""

    def submit(self, run: Callable[[], object], size: int, stream: str) -> Ticket:
        """Runs `run`, which moves `size` bytes. Raises ValueError after `close`."""

    def copy(self, into: Tensor, source: Tensor, stream: str) -> Ticket:
        """Copies a tensor into another of its shape; both are left alone until the ticket's end. ValueError as above,
        and for shapes that differ."""

    def stats(self) -> dict[str, Carried]:
        """By stream, what has ended so far."""

    def close(self) -> None:
        """Ends the lane after what was submitted. May be called again."""


class ThreadStream:
    """A lane that is a thread, over a link of its own."""

    def __init__(self, name: str, link: Link | None = None) -> None:
        self.link = link or Link()
        self._work: queue.SimpleQueue[tuple[Ticket, Callable[[], object]] | None] = queue.SimpleQueue()
        self._stats: dict[str, Carried] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"headrace-{name}", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], object], size: int, stream: str) -> Ticket:
        ticket = Ticket(size, stream)
        with self._lock:
            if self._closed:
                raise ValueError("the lane is closed; open another one")
            self._work.put((ticket, run))
        return ticket

    def copy(self, into: Tensor, source: Tensor, stream: str) -> Ticket:
        check_alike(into, source)
        return self.submit(lambda: copy_alone(into, source), into.nbytes, stream)

    def stats(self) -> dict[str, Carried]:
        with self._lock:
            return {stream: replace(carried) for stream, carried in self._stats.items()}

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            ticket, run = item
            ticket.began_s, error, taken = time.perf_counter(), None, time.thread_time()
            try:
                run()
                ticket.cpu_s = time.thread_time() - taken
                self.link.carried(ticket.size, ticket.began_s)
            except BaseException as raised:  # whatever it is, it belongs to who waits for the ticket
                error = raised
            self._end(ticket, error)
            del item, run, ticket, error

    def _end(self, ticket: Ticket, error: BaseException | None) -> None:
        ticket.ended_s = time.perf_counter()
        with self._lock:
            carried = self._stats.setdefault(ticket.stream, Carried())
            carried.transfers += 1
            carried.bytes += ticket.size if error is None else 0
            carried.busy_s += ticket.ended_s - ticket.began_s
            carried.cpu_s += ticket.cpu_s
        ticket.end(error)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._work.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()


class StreamLane(ThreadStream):
    """A lane of a CUDA device: a thread that drives a stream of its own, so that copies run beside the kernels.

    A copy begins after what the submitting thread's current stream was given before it. Its ticket ends when the copy
    has: what is computed after `Ticket.wait` sees it, on any stream. Memory that is not pinned goes through two pinned
    buffers in turn, since copies from pageable memory do not run beside kernels. Work given to `submit` runs with the
    lane's stream as the current one.
    """

    def __init__(self, name: str, device: torch.device, link: Link | None = None) -> None:
        if device.type != "cuda":
            raise ValueError(f"a stream lane needs a CUDA device, got {device}; use a ThreadLane")
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._pinned = [torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._free: list[torch.cuda.Event | None] = [None, None]
        super().__init__(name, link)

    def submit(self, run: Callable[[], object], size: int, stream: str) -> Ticket:
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.device))

        def on_stream() -> None:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                self.stream.wait_event(ready)
                run()
                self.stream.synchronize()

        return super().submit(on_stream, size, stream)

    def copy(self, into: Tensor, source: Tensor, stream: str) -> Ticket:
        check_alike(into, source)
        return self.submit(lambda: self._copy(into, source), into.nbytes, stream)

    def _copy(self, into: Tensor, source: Tensor) -> None:
        """On the lane's thread and stream."""
        host = source if into.is_cuda else into
        flat = into.is_contiguous() and source.is_contiguous() and into.dtype == source.dtype
        if host.is_cuda or host.is_pinned() or not flat:
            into.copy_(source, non_blocking=True)
            return
        there, here = into.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8)
        for turn, at in enumerate(range(0, here.numel(), PINNED_BYTES)):
            self._through(there[at : at + PINNED_BYTES], here[at : at + PINNED_BYTES], turn % 2)

    def _through(self, into: Tensor, source: Tensor, turn: int) -> None:
        """A piece through one of the pinned buffers."""
        buffer, free = self._pinned[turn][: into.numel()], self._free[turn]
        if free is not None:
            free.synchronize()
        if into.is_cuda:
            copy_alone(buffer, source)
            into.copy_(buffer, non_blocking=True)
            self._free[turn] = self.stream.record_event()
            return
        buffer.copy_(source, non_blocking=True)
        self.stream.synchronize()
        copy_alone(into, buffer)


def check_alike(into: Tensor, source: Tensor) -> None:
    """Raises ValueError for tensors that cannot be copied one into the other as they are."""
    if into.shape != source.shape:
        raise ValueError(
            f"a lane copies into a tensor of the same shape, got {tuple(into.shape)}, {tuple(source.shape)}"
        )


def copy_alone(into: Tensor, source: Tensor) -> None:
    """Copies between host tensors by this thread alone and without the interpreter's lock.

    Tensor.copy_ would start a team of threads for a large one, which fights the computation's for its cores.
    """
    on_host = into.device.type == source.device.type == "cpu"
    if not on_host or into.dtype != source.dtype or not (into.is_contiguous() and source.is_contiguous()):
        into.copy_(source)
        return
    there, here = (x.detach().view(-1).view(torch.uint8).numpy() for x in (into, source))
    np.copyto(there, here)


class CopyStreams(NamedTuple):
    """All that comes in shares one lane, and all that goes out another."""

    into: CopyStream
    out: CopyStream

    def close(self) -> None:
        for lane in self:
            lane.close()


def open_lanes(device: torch.device, link: Link | None = None) -> CopyStreams:
    """The lanes of a device, over two lines like `link`: streams of a CUDA device, threads of anything else."""
    there = link or Link()
    if device.type == "cuda":
        return CopyStreams(StreamLane("in", device, there), StreamLane("out", device, there.twin()))
    return CopyStreams(ThreadStream("in", there), ThreadStream("out", there.twin()))
