"""Arrivals: what is on its way, and what waits for it. No tensors here, and no room of its own uses another's."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Arrival:
    """Something on its way, from whatever source: a copy stream brings it, a link, or who waits for it computes it.

    error: what went wrong, None if it went well.
    """

    __slots__ = ("_calls", "_ended", "_lock", "error")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] | None = []

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    @property
    def handed(self) -> Arrival:
        """Ends when `follow` may be called: with this one, or before, when a stream of a device was given all of it."""
        return self

    def follow(self) -> None:
        """Has the caller's current stream wait for it, where a device brings it. `handed` must have ended."""

    def end(self, error: BaseException | None = None) -> None:
        """It has come, or never will."""
        with self._lock:
            self.error = error
            calls, self._calls = self._calls or [], None
        for call in calls:
            try:
                call()
            except BaseException as raised:  # whoever waits gets it: this thread goes on with other things
                self.error = self.error or raised
        self._ended.set()

    def then(self, call: Callable[[], None]) -> None:
        """Has `call` run when it has come and before it counts as done: on the thread that ends it, or here if it has
        ended already. `wait` raises what the call raised on another thread."""
        with self._lock:
            if self._calls is not None:
                self._calls.append(call)
                return
        call()

    def wait_briefly(self, seconds: float) -> None:
        """Until it has come, at most so long."""
        self._ended.wait(seconds)

    def wait(self) -> None:
        """Until it has come; raises what went wrong."""
        self._ended.wait()
        if self.error is not None:
            raise self.error
