"""Communicators and host links that are none: what transports of a device's tensors (parallel) stand on, in memory."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.device import Event, Stream, current
from headrace.parallel.nccl_transport import Direction
from headrace.parallel.transport import Loopback, LoopbackHub


class FakeCommunicator:
    """One direction between two ranks. As in NCCL messages have no tags: they meet in the order in which they are
    posted. A receive ends when its message has been posted, a send at once: its message is copied.

    As torch has it, a communicator has a stream of its own, which waits for the current one; `wait` has the stream wait
    that is current then. behind: streams that were current when messages were posted."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self.posted: list[tuple[str, int]] = []
        self.behind: list[Stream] = []
        self._own: dict[str, Stream] = {}

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        self.posted.append(("send", tag))
        return self._run("send", lambda: self.messages.put(tensors[0].clone()))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        self.posted.append(("recv", tag))
        return self._run("recv", lambda: tensors[0].copy_(self.messages.get(timeout=20)))

    def _run(self, end: str, kernel: Callable[[], object]) -> _Ended:
        there = current()
        own, behind = self._own.setdefault(end, there.stream()), there.current_stream()
        self.behind.append(behind)
        if getattr(behind, "used", False):  # what is recorded on an idle stream has happened
            own.wait_event(behind.record_event())
        with there.on(own):
            kernel()
            return _Ended(own.record_event())


class _Ended:
    def __init__(self, over: Event) -> None:
        self.over = over

    def wait(self) -> None:
        current().current_stream().wait_event(self.over)


class GlooCommunicator:
    """One end of a direction by a process group of gloo, made in this process, in which a send waits for its receive.
    All messages have one tag: they meet in the order in which they are posted, as in NCCL."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=20)
        self.group = dist.ProcessGroupGloo(store, rank, 2, options)  # type: ignore[call-arg]

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        return self.group.send(tensors, to, 0)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        return self.group.recv(tensors, source, 0)


def gloo_directions(size: int) -> Callable[[int], Any]:
    """What gives a rank its ends: (to, source) of NcclTransport."""
    made: dict[tuple[int, int, int], GlooCommunicator] = {}

    def make(a: int, b: int, rank: int, store: dist.Store) -> None:
        made[a, b, rank] = GlooCommunicator(store, rank)

    pairs = [(a, b, dist.HashStore()) for a in range(size) for b in range(size) if a != b]
    threads = [threading.Thread(target=make, args=(a, b, rank, store)) for a, b, store in pairs for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def of(rank: int) -> tuple[dict[int, Direction], dict[int, Direction]]:
        to = {b: Direction(made[a, b, 0], 1) for a, b, _ in pairs if a == rank}
        source = {a: Direction(made[a, b, 1], 0) for a, b, _ in pairs if b == rank}
        return to, source

    return of


def directions(size: int) -> tuple[dict[tuple[int, int], FakeCommunicator], Callable[[int], Any]]:
    """The communicators by (from, to), and what gives a rank its ends: (to, source) of NcclTransport."""
    made = {(a, b): FakeCommunicator() for a in range(size) for b in range(size) if a != b}

    def of(rank: int) -> tuple[dict[int, Direction], dict[int, Direction]]:
        to = {b: Direction(each, 1) for (a, b), each in made.items() if a == rank}
        source = {a: Direction(each, 0) for (a, b), each in made.items() if b == rank}
        return to, source

    return made, of


class HostLinks(Loopback):
    """Links of main memory between threads, which can be given up."""

    def fail(self, why: str) -> None:
        self.hub.fail(why)

    def settle(self, seconds: float) -> bool:
        return True

    def close(self, timeout_s: float = 2.0) -> bool:
        self.hub.fail("closed")
        return True


def host_links(size: int) -> list[HostLinks]:
    hub = LoopbackHub(size)
    return [HostLinks(hub, rank) for rank in range(size)]


class Mailbox:
    """Links of one rank to itself, in one thread: a receive is there when it is posted behind its send. on_host(x,
    writes): told when the host reads or writes memory."""

    rank, size = 0, 2

    def __init__(self, on_host: Callable[[Tensor, bool], None]) -> None:
        self.on_host, self.boxes = on_host, defaultdict[int, list[Tensor]](list)
        self.lock = threading.Lock()

    def isend(self, x: Tensor, to: int, tag: Any) -> Any:
        self.on_host(x, False)
        self.boxes[tag.number].append(torch.from_numpy(x.numpy().copy()))
        return _Done()

    def irecv(self, x: Tensor, source: int, tag: Any, relay: int | None = None) -> Any:
        def arrive() -> None:
            self.on_host(x, True)
            x.numpy()[:] = self.boxes[tag.number].pop(0).numpy()

        return _Done(arrive)

    def fail(self, why: str) -> None: ...


class _Done:
    done = True

    def __init__(self, arrive: Callable[[], None] = lambda: None) -> None:
        self.arrive = arrive

    def wait(self) -> None:
        self.arrive()

    def drain(self) -> None: ...


class StuckKernels:
    """Those of NCCL on a device, each of which waits for a rank that is gone. killed: the test is over."""

    def __init__(self) -> None:
        self.killed = threading.Event()
        self._changed = threading.Condition()
        self._left = 0

    def begun(self) -> None:
        self._left += 1

    def end(self) -> None:
        with self._changed:
            self._left -= 1
            self._changed.notify_all()

    def wait(self) -> bool:
        """As what waits for the whole device (cudaFree): whether it came."""
        with self._changed:
            while self._left and not self.killed.is_set():
                self._changed.wait(0.01)
        return not self._left


class StuckGroup:
    """A direction whose kernel waits. Its abort ends that, if it heeds it, and then waits for the device (NVIDIA/nccl
    issue 1013)."""

    def __init__(self, kernels: StuckKernels, heeds: bool = True) -> None:
        self.kernels, self.heeds, self.aborted = kernels, heeds, False
        kernels.begun()

    def abort(self) -> None:
        if self.heeds:
            self.kernels.end()
        self.aborted = self.kernels.wait()
