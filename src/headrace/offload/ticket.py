"""A ticket: the handle of a transfer under way, to wait for it and to see how long it took."""

from __future__ import annotations

import time

from headrace.arrival import Arrival


class Ticket(Arrival):
    """began_s, ended_s: time.perf_counter. waited_s: how long `wait` took, of all calls. stream: what is moved ("kv",
    "x", "weights", "hidden"). error: what the transfer raised, None if it went well."""

    __slots__ = ("began_s", "ended_s", "size", "stream", "waited_s")

    def __init__(self, size: int, stream: str) -> None:
        super().__init__()
        self.size, self.stream = size, stream
        self.began_s = self.ended_s = self.waited_s = 0.0

    @property
    def busy_s(self) -> float:
        """How long the copy stream was at it; 0 before its end."""
        return self.ended_s - self.began_s if self.done else 0.0

    def end(self, error: BaseException | None = None) -> None:
        self.ended_s = time.perf_counter()
        super().end(error)

    def wait(self) -> None:
        """Until what the caller computes from now on sees it; raises what went wrong."""
        self.synchronize()

    def synchronize(self) -> None:
        """Until it has come, in the host's time; raises what went wrong."""
        self._until(self)
        super().wait()

    def _until(self, moment: Arrival) -> None:
        """Until this ticket, or a part of its way, has ended."""
        if not moment.done:
            began = time.perf_counter()
            moment._ended.wait()
            self.waited_s += time.perf_counter() - began
