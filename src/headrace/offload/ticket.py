"""A ticket: the handle of a transfer under way, to wait for it and to see how long it took."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Ticket:
    """began_s, ended_s: time.perf_counter. stream: what is moved ("kv", "x", "weights", "hidden"). error: what the
    transfer raised, None if it went well."""

    size: int
    stream: str
    began_s: float = 0.0
    ended_s: float = 0.0
    error: BaseException | None = None
    _ended: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _calls: list[Callable[[], None]] | None = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    @property
    def busy_s(self) -> float:
        """How long the copy stream was at it; 0 before its end."""
        return self.ended_s - self.began_s if self.done else 0.0

    def end(self, error: BaseException | None) -> None:
        with self._lock:
            self.ended_s, self.error = time.perf_counter(), error
            calls, self._calls = self._calls or [], None
        try:
            for call in calls:
                call()
        finally:
            self._ended.set()

    def then(self, call: Callable[[], None]) -> None:
        """Has `call`, which must not raise, run when the transfer has ended and before it counts as done: on the thread
        that ends it, or here if it has ended already."""
        with self._lock:
            if self._calls is not None:
                self._calls.append(call)
                return
        call()

    def wait_briefly(self, seconds: float) -> None:
        """Until it has ended, at most so long."""
        self._ended.wait(seconds)

    def wait(self) -> None:
        """Until it has ended; raises what the transfer raised."""
        self._ended.wait()
        if self.error is not None:
            raise self.error
