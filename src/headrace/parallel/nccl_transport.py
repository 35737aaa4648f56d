"""Transport of a device's tensors by NCCL, from device to device.

What NCCL (torch.distributed) is like, and what follows from it:
- it knows no tags: both ends of a communicator must post the same messages in the same order. So the sender posts one
  after another, and announces each, with its tag, over the host's links; the receiver posts in the order of what is
  announced. What nobody has asked for yet is received into memory of its own: no message waits for another's receiver;
- a communicator runs one thing at a time, and a send ends with its receive: two ranks that both send first would wait
  for each other. So each direction between two ranks has a communicator, to which torch gives a stream of its own;
- that stream waits for the one that was current when a message was posted. That is one on which nothing ever runs or
  waits: what is posted is ready, and waits for no other message;
- `work.wait()` has the current stream wait, not the host: one stream waits for all that is sent, another for all that
  comes, and records their events. What has been posted on both ends ends by itself, so they delay each other, no more.
  There are few streams for this reason: two that the driver carries by one queue wait for each other, be it on two
  ranks in turn (STREAMS);
- a message whose peer is gone never ends. That it is gone the host's links notice, and `fail` wakes who waits.

A communicator is what torch's ProcessGroup is: send([x], to, tag) and recv([x], source, tag), ranks as in that group.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from headrace.device import Device, Stream
from headrace.parallel.device_transfer import DeviceTransfer
from headrace.parallel.transport import Apart, Links, RankLost, Tag, Traffic, Transfer, check_sent, flat
from headrace.parallel.waiters import Waiters

STREAMS = 3
"""Of a transport, beside one for each of its communicators."""
TURNS = 4096
"""Announcements that may be under way at a time from one rank to another."""


class Communicator(Protocol):
    """One direction between two ranks."""

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any: ...

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any: ...


class Direction(NamedTuple):
    """A communicator, and the other rank's number in it."""

    communicator: Communicator
    other: int


@dataclass(slots=True)
class _Message:
    """A transfer and where it goes on to."""

    transfer: DeviceTransfer
    tag: Tag
    relay: int | None = None


@dataclass(slots=True)
class _Incoming:
    """What comes from a rank: receives that were posted, and messages that came before theirs, by tag."""

    posted: dict[int, list[_Message]] = field(default_factory=lambda: defaultdict(list))
    early: dict[int, list[DeviceTransfer]] = field(default_factory=lambda: defaultdict(list))
    lock: threading.Lock = field(default_factory=threading.Lock)


class NcclTransport:
    """One rank's end. host: links for announcements, and for tensors in main memory. to, source: directions by rank."""

    def __init__(
        self, host: Links, device: Device, to: Mapping[int, Direction], source: Mapping[int, Direction]
    ) -> None:
        self.host, self.device = host, device
        self.rank, self.size, self.traffic = host.rank, host.size, Traffic()
        self._to, self._source = to, source
        self._waiters, self._lock = Waiters("headrace-nccl", device.enter), threading.Lock()
        self._under_way: set[DeviceTransfer] = set()
        self._broken: str | None = None
        self._outgoing = {rank: queue.SimpleQueue[_Message | None]() for rank in to}
        self._incoming = {rank: _Incoming() for rank in source}
        self._idle, self._sent, self._come = device.stream(), device.stream(), device.stream()
        for rank in to:
            self._waiters.run(lambda rank=rank: self._send_all(rank))  # type: ignore[misc]
        for rank in source:
            self._waiters.run(lambda rank=rank: self._receive_all(rank))  # type: ignore[misc]

    def isend(self, x: Tensor, to: int, tag: Tag) -> Transfer:
        """As TorchTransport.isend."""
        self.traffic.sent(to, x)
        if not self.device.holds(x):
            return self.host.isend(x, to, tag)
        message = _Message(self._begin(x), tag)
        self._outgoing[to].put(message)
        return message.transfer

    def irecv(self, x: Tensor, source: int, tag: Tag, relay: int | None = None) -> Transfer:
        """As TorchTransport.irecv."""
        if not self.device.holds(x):
            return self.host.irecv(x, source, tag, relay)
        message, incoming = _Message(self._begin(x), tag, relay), self._incoming[source]
        with incoming.lock:
            early = incoming.early[tag.number]
            came = early.pop(0) if early else None
            if came is None:
                incoming.posted[tag.number].append(message)
        if came is not None:
            self._copied(came, message)
        return message.transfer

    def _begin(self, x: Tensor) -> DeviceTransfer:
        check_sent(x)
        transfer = DeviceTransfer(self.device, self.traffic, x)
        with self._lock:
            if self._broken is not None:
                raise RankLost(self._broken)
            self._under_way.add(transfer)
        return transfer

    # -- what goes

    def _send_all(self, to: int) -> None:
        """On a thread of the direction: what is to be sent, in the order in which it was given."""
        count = 0
        while (message := self._outgoing[to].get()) is not None:
            try:
                message.transfer.begun.synchronize()
                note = torch.tensor([message.tag.number, message.transfer.x.nbytes])
                announced = self.host.isend(note, to, Tag(Apart.announced, 0, count % TURNS))
                direction = self._to[to]
                with torch.inference_mode(), self.device.on(self._idle):
                    bytes_of = flat(message.transfer.x)
                    work = direction.communicator.send([bytes_of], direction.other, message.tag.number)
                self._ended(work, message.transfer, self._sent)
                self._handed_over(message.transfer)
                announced.wait()
            except RuntimeError as error:  # RankLost among them
                self.fail(str(error))
                return
            count += 1
            del message

    def _ended(self, work: Any, transfer: DeviceTransfer, stream: Stream) -> None:
        """Has the stream tell of the end of a message."""
        with self.device.on(stream):
            work.wait()
            transfer.over.record(stream)

    def _handed_over(self, transfer: DeviceTransfer) -> None:
        """Keeps what it uses until it is over."""

        def keep() -> None:
            transfer.over.synchronize()
            self._under_way.discard(transfer)

        self._waiters.run(keep)
        transfer.hand_over()

    # -- what comes

    def _receive_all(self, source: int) -> None:
        """On a thread of the direction: what is announced, in that order."""
        incoming, count = self._incoming[source], 0
        while True:
            note = torch.zeros(2, dtype=torch.int64)
            try:
                self.host.irecv(note, source, Tag(Apart.announced, 0, count % TURNS)).wait()
                self._receive(incoming, self._source[source], *note.tolist())
            except RuntimeError as error:
                self.fail(str(error))
                return
            count += 1

    def _receive(self, incoming: _Incoming, direction: Direction, number: int, size: int) -> None:
        with incoming.lock:
            posted = incoming.posted[number]
            message = posted.pop(0) if posted else None
            early = None if message is not None else self._room(size)
            if early is not None:
                incoming.early[number].append(early)
        transfer = early if message is None else message.transfer
        assert transfer is not None
        transfer.begun.synchronize()
        with torch.inference_mode(), self.device.on(self._idle):
            work = direction.communicator.recv([flat(transfer.x)], direction.other, number)
        self._ended(work, transfer, self._come)
        self._relay(message)
        self._handed_over(transfer)

    def _room(self, size: int) -> DeviceTransfer:
        """Memory for a message that nobody has asked for yet."""
        with torch.inference_mode(), self.device.on(self._come):
            return self._begin(torch.empty(size, dtype=torch.uint8, device=self.device.place))

    def _copied(self, came: DeviceTransfer, message: _Message) -> None:
        """Copies what came early to where it was asked for, once that may be written: the stream of what comes has
        waited for the message, and must wait for nothing else."""

        def copy() -> None:
            try:
                came.wait_handed()
                message.transfer.begun.synchronize()
                with torch.inference_mode(), self.device.on(self._come):
                    flat(message.transfer.x).copy_(came.x, non_blocking=True)
                    message.transfer.over.record(self._come)
                self._relay(message)
                self._handed_over(message.transfer)
            except RuntimeError as error:
                message.transfer.hand_over(str(error))

        self._waiters.run(copy)

    def _relay(self, message: _Message | None) -> None:
        """Sends on what has come, behind its arrival."""
        if message is None or message.relay is None:
            return
        x = message.transfer.x
        self.traffic.sent(message.relay, x)
        sent = _Message(DeviceTransfer(self.device, self.traffic, x, message.transfer.over), message.tag)
        with self._lock:
            self._under_way.add(sent.transfer)
        message.transfer.relayed = sent.transfer
        self._outgoing[message.relay].put(sent)

    # -- the end

    def fail(self, why: str) -> None:
        """Everybody who waits, and who will, gets RankLost(why). The first reason stays."""
        with self._lock:
            self._broken = self._broken or why
            lost = list(self._under_way)
        for transfer in lost:
            transfer.hand_over(self._broken)
        self.host.fail(why)

    def settle(self, seconds: float) -> bool:
        """Waits until nothing is under way but receives of announcements; whether that was so in time."""
        end = time.monotonic() + seconds
        while self._under_way and time.monotonic() < end:
            time.sleep(0.005)
        return not self._under_way

    def close(self, timeout_s: float = 2.0) -> bool:
        """See TorchTransport.close. What is under way is given up."""
        self.fail("the link was closed")
        for waiting in self._outgoing.values():
            waiting.put(None)
        ended = self.host.close(timeout_s)
        return self._waiters.close(timeout_s) & ended
