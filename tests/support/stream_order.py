"""A device whose streams only keep a record: a checker of stream order that needs no GPU.

Tensors lie in memory and torch computes at once, so values are right whatever the order. What is recorded is which
memory each operation of each stream reads and writes, and what is ordered before what: operations of one stream, what a
thread does, events (a stream or a thread waits for one), and the locks, queues and flags by which threads wait for each
other. Two accesses of one place, one of which writes, must be ordered; `violations` tells of those that are not.

Happens-before by vector clocks: a clock says of each stream and thread how many of its steps are known to have happened
(Lamport 1978; Mattern 1989). An access that another one's clock does not know is not ordered before it.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.device import Device, Event, Graph, GraphPool, Stream

T = TypeVar("T")
ALLOCATING = ("aten::empty_like", "aten::new_empty")
"""Operations that look at a tensor's shape alone."""
Agent = object
"""A stream, or a thread."""


class Clock(defaultdict[Agent, int]):
    """Steps of each agent that are known to have happened."""

    def __init__(self, known: dict[Agent, int] | None = None) -> None:
        super().__init__(int, known or {})

    def join(self, other: dict[Agent, int]) -> None:
        for agent, steps in other.items():
            self[agent] = max(self[agent], steps)


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes low .. high - 1 of a buffer, by an agent at one of its steps."""

    low: int
    high: int
    writes: bool
    agent: Agent
    step: int
    what: str


@dataclass(slots=True)
class Buffer:
    """Memory that is watched. keep: so that no other gets its address."""

    name: str
    address: int
    size: int
    keep: Tensor
    accesses: list[Access] = field(default_factory=list)


class RecordedEvent(Event):
    """clock: of what happened before it; None: never recorded."""

    def __init__(self, order: StreamOrder) -> None:
        self.order = order
        self.clock: Clock | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = self.order.current_stream() if stream is None else stream
        with self.order.lock:
            self.clock = Clock(self.order.launch(stream))

    def synchronize(self) -> None:
        self.order.known_to_thread(self.clock, "synchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        return 1.0


class RecordedStream(Stream):
    """used: whether it ever had something to do or to wait for."""

    def __init__(self, order: StreamOrder, name: str) -> None:
        self.order, self.name, self.used = order, name, False

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, RecordedEvent)
        self.used = True
        self.order.known_to_stream(self, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or self.order.event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.order.known_to_thread(self.order.clocks[self], "synchronize")

    def __repr__(self) -> str:
        return self.name


class StreamOrder(Device):
    """dropped: (function, kind) of places in the code whose waits do nothing; kind: "wait_event", "synchronize". seen:
    those that there were."""

    type = "cuda"
    place = torch.device("cpu")
    name = "a record of streams"
    processors = 4

    def __init__(self, dropped: tuple[str, str] | None = None) -> None:
        self.dropped, self.seen = dropped, set[tuple[str, str]]()
        self.violations: list[str] = []
        self.lock = threading.RLock()
        self.clocks: defaultdict[Agent, Clock] = defaultdict(Clock)
        self._buffers: list[Buffer] = []
        self._host: set[int] = set()
        self._local = threading.local()
        self._compute = RecordedStream(self, "compute")
        self._count = 0

    # -- Device

    def missing(self) -> str | None:
        return None

    def holds(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() not in self._host

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.watch(torch.zeros(*shape, dtype=dtype), "pinned memory", held=False)

    def graph(self, run: Callable[[], T], pool: GraphPool | None = None) -> tuple[Graph, T]:
        raise NotImplementedError("graphs are not recorded here")

    def stream(self) -> Stream:
        with self.lock:
            self._count += 1
            return RecordedStream(self, f"stream {self._count}")

    def current_stream(self) -> Stream:
        return getattr(self._local, "stream", self._compute)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        try:
            with self.recording():
                yield
        finally:
            self._local.stream = before

    def event(self, timing: bool = False, blocking: bool = False) -> Event:
        return RecordedEvent(self)

    def synchronize(self) -> None:
        for agent in [each for each in self.clocks if isinstance(each, RecordedStream)]:
            self.known_to_thread(self.clocks[agent], "synchronize")

    def free_memory(self) -> int:
        return 1 << 30

    def peak_memory(self, run: Callable[[], object]) -> int:
        run()
        return 0

    # -- what tests tell it

    def watch(self, x: Tensor, name: str, held: bool = True) -> Tensor:
        """From now on accesses of x are checked. held: x lies on the device, as all does that is not said to be the
        host's."""
        storage = x.untyped_storage()
        with self.lock:
            self._buffers.append(Buffer(name, storage.data_ptr(), storage.nbytes(), x))
            if not held:
                self._host.add(storage.data_ptr())
        return x

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within it torch's operations of this thread are launches on its current stream."""
        with _Recorder(self):
            yield

    def host(self, data: Any, writes: bool) -> None:
        """The thread itself reads or writes memory (a buffer or an array)."""
        array = np.frombuffer(data, dtype=np.uint8)
        low = array.ctypes.data
        with self.lock:
            self._touch(low, low + array.nbytes, writes, threading.get_ident(), self._tick_thread(), "the host")

    # -- order

    def known_to_thread(self, clock: Clock | None, kind: str) -> None:
        with self.lock:
            if clock is not None and self._counts(kind):
                self.clocks[threading.get_ident()].join(clock)

    def known_to_stream(self, stream: RecordedStream, clock: Clock | None) -> None:
        with self.lock:
            self.clocks[stream].join(self.clocks[threading.get_ident()])
            if clock is not None and self._counts("wait_event"):
                self.clocks[stream].join(clock)

    def _counts(self, kind: str) -> bool:
        """Whether this wait is one that holds."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename == __file__ and frame.f_back is not None:
            frame = frame.f_back
        name = frame.f_code.co_name
        if name == "wait" and frame.f_back is not None:  # a ticket's: who waits for it
            name = f"{name} in {frame.f_back.f_code.co_name}"
        place = (name, kind)
        self.seen.add(place)
        return place != self.dropped

    def launch(self, stream: Stream) -> Clock:
        """The clock of a stream that this thread has given one thing more to do."""
        self._tick_thread()
        clock = self.clocks[stream]
        clock.join(self.clocks[threading.get_ident()])
        clock[stream] += 1
        return clock

    def _tick_thread(self) -> int:
        thread = threading.get_ident()
        self.clocks[thread][thread] += 1
        return self.clocks[thread][thread]

    # -- accesses

    def launched(self, what: str, ranges: list[tuple[int, int, bool]]) -> None:
        """An operation on the thread's current stream that touches these addresses."""
        with self.lock:
            stream = self.current_stream()
            stream.used = True  # type: ignore[attr-defined]
            step = self.launch(stream)[stream]
            for low, high, writes in ranges:
                self._touch(low, high, writes, stream, step, what)

    def _touch(self, low: int, high: int, writes: bool, agent: Agent, step: int, what: str) -> None:
        clock = self.clocks[agent]
        for buffer in self._buffers:
            begin, end = max(low, buffer.address), min(high, buffer.address + buffer.size)
            if begin >= end:
                continue
            mine = Access(begin - buffer.address, end - buffer.address, writes, agent, step, what)
            for other in buffer.accesses:
                apart = other.high <= mine.low or mine.high <= other.low
                if not apart and (writes or other.writes) and clock[other.agent] < other.step:
                    self.violations.append(_told(buffer, other, mine))
            buffer.accesses.append(mine)


def _told(buffer: Buffer, first: Access, then: Access) -> str:
    one, two = (
        f"{each.what} on {each.agent} {'writes' if each.writes else 'reads'} bytes {each.low}..{each.high - 1}"
        for each in (first, then)
    )
    return f"{buffer.name}: {one}, and nothing orders it before: {two}"


class _Recorder(TorchDispatchMode):
    """Tells of every operation of torch which memory it touches."""

    def __init__(self, order: StreamOrder) -> None:
        super().__init__()
        self.order = order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        if not view and schema.name not in ALLOCATING:
            ranges = []
            for place, given in zip(schema.arguments, args, strict=False):
                writes = place.alias_info is not None and place.alias_info.is_write
                for x in given if isinstance(given, list | tuple) else [given]:
                    if isinstance(x, Tensor):
                        ranges += [(*each, writes) for each in _extents(func, x, args)]
            self.order.launched(schema.name, ranges)
        return func(*args, **(kwargs or {}))


def _extents(func: Any, x: Tensor, args: Any) -> list[tuple[int, int]]:
    """Addresses that an operation may touch of x: of a pool that is indexed by rows these alone."""
    if not x.numel():
        return []
    rows = _rows(func, args) if x is args[0] else None
    parts = [x] if rows is None else [x.select(0, row) for row in rows]
    if rows is None and x.dim() > 1 and not x.is_contiguous():
        parts = list(x.unbind(0))
    found = []
    for part in parts:
        last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        found.append((part.data_ptr(), part.data_ptr() + (last + 1) * part.element_size()))
    return found


def _rows(func: Any, args: Any) -> list[int] | None:
    """Rows of the first argument that an operation touches by index; None for all."""
    name = func._schema.name
    index = None
    if name in ("aten::index", "aten::index_put_", "aten::_index_put_impl_"):
        index = args[1][0]
    elif name in ("aten::index_copy_", "aten::index_select") and args[1] == 0:
        index = args[2]
    return None if index is None else sorted(set(index.reshape(-1).tolist()))
