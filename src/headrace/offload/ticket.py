"""A ticket: the handle of a transfer under way, to wait for it and to see how long it took."""

from __future__ import annotations

import threading
import time
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

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    @property
    def busy_s(self) -> float:
        """How long the copy stream was at it; 0 before its end."""
        return self.ended_s - self.began_s if self.done else 0.0

    def end(self, error: BaseException | None) -> None:
        self.ended_s, self.error = time.perf_counter(), error
        self._ended.set()

    def wait_briefly(self, seconds: float) -> None:
        """Until it has ended, at most so long."""
        self._ended.wait(seconds)

    def wait(self) -> None:
        """Until it has ended; raises what the transfer raised."""
        self._ended.wait()
        if self.error is not None:
            raise self.error
