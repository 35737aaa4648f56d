"""Flags and queues by which threads wait for each other, for a checker of stream order (tests.support.stream_order)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import pytest

from tests.support.stream_order import Clock, StreamOrder

T = TypeVar("T")


class OrderedEvent(threading.Event):
    """threading.Event: what was done before `set` is known to whoever finds it set."""

    order: StreamOrder

    def __init__(self) -> None:
        super().__init__()
        self._clock = Clock()

    def set(self) -> None:
        with self.order.lock:
            self._clock.join(self.order.clocks[threading.get_ident()])
        super().set()

    def is_set(self) -> bool:
        found = super().is_set()
        self._know(found)
        return found

    def wait(self, timeout: float | None = None) -> bool:
        found = super().wait(timeout)
        self._know(found)
        return found

    def _know(self, found: bool) -> None:
        if found:
            with self.order.lock:
                self.order.clocks[threading.get_ident()].join(self._clock)


class OrderedQueue:
    """queue.SimpleQueue: what was done before `put` is known to whoever gets."""

    order: StreamOrder

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Any, Clock]] = queue.SimpleQueue()

    def __class_getitem__(cls, item: object) -> type[OrderedQueue]:
        return cls

    def put(self, item: Any) -> None:
        with self.order.lock:
            clock = Clock(self.order.clocks[threading.get_ident()])
        self._queue.put((item, clock))

    def get(self) -> Any:
        item, clock = self._queue.get()
        with self.order.lock:
            self.order.clocks[threading.get_ident()].join(clock)
        return item


class InOneThread:
    """A pool of threads that has none: what it is given is done at once."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    @staticmethod
    def map(work: Callable[[Any], T], items: Iterable[Any]) -> Iterator[T]:
        return iter([work(item) for item in items])


def ordered_threads(order: StreamOrder, monkeypatch: pytest.MonkeyPatch, modules: Sequence[ModuleType]) -> None:
    """Flags and queues of these modules order what their threads do. (Locks and starting a thread do not: what they
    protect is not watched.)"""
    event = type("Event", (OrderedEvent,), {"order": order})
    fifo = type("Queue", (OrderedQueue,), {"order": order})
    names = {name: getattr(threading, name) for name in ("Thread", "Lock", "current_thread", "get_native_id")}
    for module in modules:
        if hasattr(module, "threading"):
            monkeypatch.setattr(module, "threading", SimpleNamespace(Event=event, **names))
        if hasattr(module, "queue"):
            monkeypatch.setattr(module, "queue", SimpleNamespace(SimpleQueue=fifo))
        if hasattr(module, "ThreadPoolExecutor"):
            monkeypatch.setattr(module, "ThreadPoolExecutor", InOneThread)
