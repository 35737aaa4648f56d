"""How tensors go from rank to rank: point to point, tagged, asynchronous. Strategies see this interface only.

    work = transport.irecv(buffer, source=0, tag=Tag(step, layer=3, piece=1), relay=2)
    transport.isend(mine, to=2, tag=...)
    work.wait()

A receive may name a rank to which what arrives is sent on at once, under the same tag, before anybody looks at it.
Memory given to a send or a receive stays untouched until `wait` (and, with a relay, `drain`) has returned.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class RankLost(RuntimeError):
    """Another rank is gone or does not answer; nothing that was under way with it can be finished."""


class Apart(IntEnum):
    """In place of a group's number: what belongs to no step. A link may carry all of them at a time."""

    proof = -1
    probe = -2
    announced = -3
    memory = -4


class Tag(NamedTuple):
    """Names a message between two ranks: group counts the groups of all steps, or is Apart; layer may be LAST."""

    group: int
    layer: int
    piece: int

    @property
    def number(self) -> int:
        """As one integer below 2**31, unique among messages that can be under way together."""
        group = self.group % (512 - len(Apart)) if self.group >= 0 else 512 + self.group
        return (group * 1024 + self.layer) * 4096 + self.piece


LAST = 1023
"""In place of a layer: the hidden states that go to rank 0."""


class Transfer(Protocol):
    """A send or a receive under way."""

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> None:
        """Returns when the data has left, or arrived. Raises RankLost."""
        ...

    def drain(self) -> None:
        """Returns when the memory may be written again: as `wait`, and what was to be relayed has left too."""
        ...


@dataclass(slots=True)
class Traffic:
    """What one rank sent and how long it waited: messages and bytes by receiving rank, seconds in Transfer.wait.

    `sent` may be called from several threads: the rank sends, and so does each relay.
    """

    messages: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    wait_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def sent(self, to: int, x: Tensor) -> None:
        with self._lock:
            self.messages[to] += 1
            self.bytes[to] += x.nbytes


class Transport(Protocol):
    """One rank's end of the links. Calls may come from several threads."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def traffic(self) -> Traffic: ...

    def isend(self, x: Tensor, to: int, tag: Tag) -> Transfer:
        """Sends x, which must be contiguous and not empty."""
        ...

    def irecv(self, x: Tensor, source: int, tag: Tag, relay: int | None = None) -> Transfer:
        """Receives into x, as isend takes it, of the sender's size and type; `relay`: a rank to send it on to."""
        ...


class Links(Transport, Protocol):
    """A transport that can be given up and closed."""

    def fail(self, why: str) -> None:
        """Everybody who waits, and who will, gets RankLost(why)."""

    def settle(self, seconds: float) -> bool:
        """Waits until nothing is under way; whether that was so in time."""

    def close(self, timeout_s: float = 2.0) -> bool:
        """Fails what is under way and ends the threads; whether all have ended in that time."""


def flat(x: Tensor) -> Tensor:
    """The same memory as bytes: no backend knows every type."""
    return x.detach().view(-1).view(torch.uint8)


def check_sent(x: Tensor) -> None:
    """Raises ValueError for an empty or a scattered tensor."""
    if not x.numel():
        raise ValueError("an empty tensor is not sent: leave the transfer out on both sides")
    if not x.is_contiguous():
        raise ValueError("only contiguous tensors are sent: call .contiguous() and keep what it returns")


def all_gather(
    transport: Transport, mine: Sequence[Tensor], theirs: Sequence[Sequence[Tensor]], tag: Tag
) -> list[Transfer]:
    """Sends `mine` to every other rank and receives theirs[rank] from each. theirs[own rank] is not looked at.

    Empty tensors are not sent. Returns what is under way; pieces of the tag count up from tag.piece.
    """
    works = []
    for other in range(transport.size):
        if other != transport.rank:
            works += [
                transport.irecv(x, other, tag._replace(piece=tag.piece + i))
                for i, x in enumerate(theirs[other])
                if len(x)
            ]
    for other in range(transport.size):
        if other != transport.rank:
            works += [
                transport.isend(x, other, tag._replace(piece=tag.piece + i)) for i, x in enumerate(mine) if len(x)
            ]
    return works


class LoopbackHub:
    """Ranks as threads of one process, for tests: `hub.transport(rank)` is each one's end."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.arrived = threading.Condition()
        self.boxes: dict[tuple[int, int, int], list[Tensor]] = defaultdict(list)
        self.posted: dict[tuple[int, int, int], list[_LoopbackReceive]] = defaultdict(list)
        self.broken: str | None = None

    def transport(self, rank: int) -> Loopback:
        return Loopback(self, rank)

    def fail(self, why: str) -> None:
        """Breaks all links: everybody who waits gets RankLost."""
        with self.arrived:
            self.broken = why
            self.arrived.notify_all()

    def put(self, key: tuple[int, int, int], x: Tensor) -> None:
        """Whoever sends a message that is waited for writes it to where it goes. Raises RankLost, as `post` does."""
        with self.arrived:
            self._check()
            receive = self.posted[key].pop(0) if self.posted[key] else None
            if receive is None:
                self.boxes[key].append(x.clone())
        if receive is not None:
            receive.deliver(x)

    def post(self, key: tuple[int, int, int], receive: _LoopbackReceive) -> None:
        with self.arrived:
            self._check()
            message = self.boxes[key].pop(0) if self.boxes[key] else None
            if message is None:
                self.posted[key].append(receive)
        if message is not None:
            receive.deliver(message)

    def _check(self) -> None:
        if self.broken is not None:
            raise RankLost(self.broken)

    def left_over(self) -> int:
        """Messages that nobody received."""
        return sum(len(box) for box in self.boxes.values())


class Loopback:
    """One thread's end of a LoopbackHub."""

    def __init__(self, hub: LoopbackHub, rank: int) -> None:
        self.hub, self.rank, self.size = hub, rank, hub.size
        self.traffic = Traffic()

    def isend(self, x: Tensor, to: int, tag: Tag) -> Transfer:
        check_sent(x)
        self.traffic.sent(to, x)
        self.hub.put((self.rank, to, tag.number), x)
        return _LoopbackSend()

    def irecv(self, x: Tensor, source: int, tag: Tag, relay: int | None = None) -> Transfer:
        check_sent(x)
        return _LoopbackReceive(self, x, source, tag, relay)


class _LoopbackSend:
    done = True

    def wait(self) -> None: ...

    def drain(self) -> None: ...


class _LoopbackReceive:
    """Relayed at once, while its receiver computes."""

    def __init__(self, end: Loopback, x: Tensor, source: int, tag: Tag, relay: int | None) -> None:
        self.end, self.x, self.tag, self.relay = end, x, tag, relay
        self._here = False
        end.hub.post((source, end.rank, tag.number), self)

    def deliver(self, message: Tensor) -> None:
        hub = self.end.hub
        if message.shape != self.x.shape or message.dtype != self.x.dtype:
            hub.fail(f"rank {self.end.rank}, {self.tag}: got {list(message.shape)}, expected {list(self.x.shape)}")
            return
        with torch.inference_mode():  # the buffer may have been made in it
            self.x.copy_(message)
        if self.relay is not None:
            self.end.isend(self.x, self.relay, self.tag)
        with hub.arrived:
            self._here = True
            hub.arrived.notify_all()

    @property
    def done(self) -> bool:
        return self._here

    def wait(self) -> None:
        hub, began = self.end.hub, time.perf_counter()
        with hub.arrived:
            hub.arrived.wait_for(lambda: hub.broken or self._here)
            if hub.broken:
                raise RankLost(hub.broken)
        self.end.traffic.wait_s += time.perf_counter() - began

    drain = wait
