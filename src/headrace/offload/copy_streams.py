"""Copy streams: transfers that run beside the computation, in the order in which they are submitted.

KVPR's streams (section 3.3, Algorithm 1): weights, KV, activations and hidden states in, KV and hidden states out. All
that goes in shares one link, and so does all that goes out. On a CPU a copy stream is a thread; on a GPU it is a thread
that drives a CUDA stream of its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

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
        ticket = Ticket(size, stream)
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
            ticket, run = item
            ticket.began_s, error = time.perf_counter(), None
            try:
                run()
                self.link.carried(ticket.size, ticket.began_s)
            except BaseException as raised:  # of any kind: the caller that waits for the ticket gets it
                error = raised
            ticket.end(error)
            del item, run, ticket, error

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._work.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()


class CudaStream(ThreadStream):
    """A copy stream of a CUDA device: a thread that drives a CUDA stream, so that copies run beside the kernels.

    A copy begins after what the submitting thread's current stream was given before it. Its ticket ends when the copy
    has: what is computed after `Ticket.wait` sees it, on any stream. Memory that is not pinned goes through two pinned
    buffers in turn, since copies from pageable memory do not run beside kernels. Work given to `submit` runs with that
    stream as the current one.
    """

    def __init__(self, name: str, device: torch.device, link: EmulatedLink | None = None) -> None:
        if device.type != "cuda":
            raise ValueError(f"a CUDA copy stream needs a CUDA device, got {device}; use a ThreadStream")
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
        """On the thread and its stream."""
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
        raise ValueError(f"a copy goes into a tensor of the same shape, got {tuple(into.shape)}, {tuple(source.shape)}")


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
    """All that comes in shares one stream, and all that goes out another."""

    into: CopyStream
    out: CopyStream

    def close(self) -> None:
        for stream in self:
            stream.close()


def open_copy_streams(device: torch.device, link: EmulatedLink | None = None) -> CopyStreams:
    """The copy streams of a device, over two links like `link`: CUDA streams of a GPU, threads of anything else."""
    there = link or EmulatedLink()
    if device.type == "cuda":
        return CopyStreams(CudaStream("in", device, there), CudaStream("out", device, there.twin()))
    return CopyStreams(ThreadStream("in", there), ThreadStream("out", there.twin()))
