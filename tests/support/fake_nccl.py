"""Communicators and host links that are none: what transports of a device's tensors (parallel) stand on, in memory."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.parallel.nccl_transport import Direction
from headrace.parallel.transport import Loopback, LoopbackHub


class FakeCommunicator:
    """One direction between two ranks. As in NCCL messages have no tags: they meet in the order in which they are
    posted. A receive ends when its message has been posted, a send at once: its message is copied."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self.posted: list[tuple[str, int]] = []

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        self.posted.append(("send", tag))
        self.messages.put(tensors[0].clone())
        return _Ended()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        self.posted.append(("recv", tag))
        tensors[0].copy_(self.messages.get(timeout=20))
        return _Ended()


class _Ended:
    def wait(self) -> None: ...


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
