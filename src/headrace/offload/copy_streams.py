"""Copy streams: transfers that run beside the computation, in the order in which they are submitted.

KVPR's streams (section 3.3, Algorithm 1): weights, KV, activations and hidden states in, KV and hidden states out. All
that goes in shares one link, and so does all that goes out. On a CPU a copy stream is a thread; on a GPU it is a thread
that hands copies to a CUDA stream, whose end is an event: the computation's stream waits for it, not the host.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.arrival import Arrival
from headrace.device import Device, Event, current
from headrace.offload.emulated_link import EmulatedLink
from headrace.offload.ticket import Ticket

PINNED_BYTES = 8 << 20
"""Of each of the two buffers that pageable memory goes through on its way to or from a GPU."""


class CopyStream(Protocol):
    """Transfers in the order in which they were submitted."""

    def submit(self, run: Callable[[], object], size: int, stream: str) -> Ticket:
        """Runs `run`, which moves `size` bytes. Raises ValueError after `close`."""

    def copy(self, into: Tensor, source: Tensor, stream: str) -> Ticket:
        """Copies a tensor into another of its shape; both are left alone until the ticket's end. ValueError as above,
        and for shapes that differ."""

    def close(self) -> None:
        """Ends the stream after what was submitted. May be called again."""


class ThreadStream:
    """A copy stream that is a thread, over a link of its own."""

    def __init__(self, name: str, link: EmulatedLink | None = None) -> None:
        self.link = link or EmulatedLink()
        self._work: queue.SimpleQueue[tuple[Ticket, Callable[[], object]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"headrace-{name}", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], object], size: int, stream: str) -> Ticket:
        return self._put(Ticket(size, stream), run)

    def _put(self, ticket: Ticket, run: Callable[[], object]) -> Ticket:
        with self._lock:
            if self._closed:
                raise ValueError("the copy stream is closed; open another one")
            self._work.put((ticket, run))
        return ticket

    def copy(self, into: Tensor, source: Tensor, stream: str) -> Ticket:
        check_alike(into, source)
        return self.submit(lambda: copy_alone(into, source), into.nbytes, stream)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            self._carry(*item)
            del item

    def _carry(self, ticket: Ticket, run: Callable[[], object]) -> None:
        ticket.began_s, error = time.perf_counter(), None
        try:
            run()
            self.link.carried(ticket.size, ticket.began_s)
        except BaseException as raised:  # of any kind: the caller that waits for the ticket gets it
            error = raised
        ticket.end(error)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._work.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()


class CudaTicket(Ticket):
    """A transfer by a stream of a device. It ends when its copies have; its times are the device's.

    `wait` waits until they are handed over, and has the caller's current stream wait for their end: what is computed
    after it sees them, and the host goes on. Behind an emulated link, of which a stream knows nothing, the host waits.
    """

    __slots__ = ("_handed", "began", "device", "emulated", "keeps", "over", "ready")

    def __init__(self, size: int, stream: str, device: Device, emulated: bool) -> None:
        super().__init__(size, stream)
        self.device, self.emulated, self._handed = device, emulated, Arrival()
        self.keeps: object = None  # memory that is copied from, which nobody else may be given before the end
        self.ready, self.began = device.event(), device.event(timing=True)
        self.over = device.event(timing=True, blocking=True)
        self.ready.record(device.current_stream())

    @property
    def handed(self) -> Arrival:
        return self if self.emulated else self._handed

    def follow(self) -> None:
        self.device.current_stream().wait_event(self.over)

    def wait(self) -> None:
        if self.emulated:
            self.synchronize()
        self._until(self._handed)
        if self.error is not None:
            raise self.error
        self.device.current_stream().wait_event(self.over)

    def hand_over(self, error: BaseException | None = None) -> None:
        """The stream was given all of it; or what was raised instead."""
        self.error = error
        self._handed.end(error)

    def finish(self, link: EmulatedLink) -> None:
        """Waits for its end on the device, and ends it."""
        try:
            if self.error is None:
                self.over.synchronize()
                self.began_s = time.perf_counter() - self.began.elapsed_time(self.over) / 1e3
                link.carried(self.size, self.began_s)
        except BaseException as raised:  # the caller that waits for the ticket gets it
            self.error = raised
        self.keeps = None
        self.end(self.error)


class CudaStream(ThreadStream):
    """A copy stream of a GPU: a thread hands copies to a stream of the device, so that they run beside kernels, and
    another waits for their end.

    A copy begins after what the submitting thread's current stream was given before it. See CudaTicket for when it has
    come. Memory that is not pinned goes through two pinned buffers in turn, since copies from pageable memory do not
    run beside kernels. Work given to `submit` runs with the copy stream as the current one, and hands over what it
    copies without waiting for it.
    """

    def __init__(self, name: str, device: Device, link: EmulatedLink | None = None) -> None:
        self.device, self.stream = device, device.stream()
        self._pinned = [device.pinned((PINNED_BYTES,), torch.uint8) for _ in range(2)]
        self._free: list[Event | None] = [None, None]
        self._under_way: queue.SimpleQueue[CudaTicket | None] = queue.SimpleQueue()
        self._finisher = threading.Thread(target=self._finish, name=f"headrace-{name}-end", daemon=True)
        self._finisher.start()
        super().__init__(name, link)

    def submit(self, run: Callable[[], object], size: int, stream: str) -> Ticket:
        return self._put(CudaTicket(size, stream, self.device, self.link.slow), run)

    def copy(self, into: Tensor, source: Tensor, stream: str) -> Ticket:
        check_alike(into, source)
        return self.submit(lambda: self._copy(into, source), into.nbytes, stream)

    def _carry(self, ticket: Ticket, run: Callable[[], object]) -> None:
        assert isinstance(ticket, CudaTicket)
        ticket.keeps, error = run, None
        try:
            with torch.inference_mode(), self.device.on(self.stream):
                self.stream.wait_event(ticket.ready)
                ticket.began.record(self.stream)
                run()
                ticket.over.record(self.stream)
        except BaseException as raised:  # as above
            error = raised
            with suppress(RuntimeError):  # of a device that computes no more, on which nothing is under way
                self.stream.synchronize()  # what was handed over before the error
        ticket.hand_over(error)
        self._under_way.put(ticket)

    def _run(self) -> None:
        self.device.enter()
        super()._run()

    def _finish(self) -> None:
        self.device.enter()
        while (ticket := self._under_way.get()) is not None:
            ticket.finish(self.link)
            del ticket

    def close(self) -> None:
        super().close()
        self._under_way.put(None)
        if threading.current_thread() is not self._finisher:
            self._finisher.join()

    def _copy(self, into: Tensor, source: Tensor) -> None:
        """On the thread and its stream."""
        pageable = [x for x in (into, source) if not self.device.holds(x) and not x.is_pinned()]
        flat = into.is_contiguous() and source.is_contiguous() and into.dtype == source.dtype
        if not pageable or not flat:
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
        if self.device.holds(into):
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
        raise ValueError(f"a copy goes into a tensor of the same shape, got {tuple(into.shape)}, {tuple(source.shape)}")


def copy_alone(into: Tensor, source: Tensor) -> None:
    """Copies between host tensors by this thread alone and without the interpreter's lock.

    Tensor.copy_ would start a team of threads for a large one, which fights the computation's for its cores. A copy
    from or to a device is given to the current stream.
    """
    device = current()
    on_host = not device.holds(into) and not device.holds(source)
    if not on_host or into.dtype != source.dtype or not (into.is_contiguous() and source.is_contiguous()):
        into.copy_(source, non_blocking=True)
        return
    there, here = (x.detach().view(-1).view(torch.uint8).numpy() for x in (into, source))
    np.copyto(there, here)


class CopyStreams(NamedTuple):
    """All that comes in shares one stream, and all that goes out another."""

    into: CopyStream
    out: CopyStream

    def close(self) -> None:
        for stream in self:
            stream.close()


def open_copy_streams(device: Device | None = None, link: EmulatedLink | None = None) -> CopyStreams:
    """The copy streams of a device, over two links like `link`; of the host, where there is none, threads."""
    there = link or EmulatedLink()
    if device is not None:
        return CopyStreams(CudaStream("in", device, there), CudaStream("out", device, there.twin()))
    return CopyStreams(ThreadStream("in", there), ThreadStream("out", there.twin()))
