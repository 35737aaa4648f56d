"""How long an engine process has said nothing, and that it hangs when it was too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PING_S = 1.0
"""Seconds between pings; less where the timeout is short."""

LOADING_S = 120.0
"""Least silence of an engine that is loading after which it counts as hung: what it imports and maps may hold up all of
its threads, and a timeout chosen for a serving engine would kill one that has just begun."""


class Watchdog:
    """limit_s: after which an engine counts as hung; while it loads it may be silent for LOADING_S at least.

    Counted in our own ticks, so that time in which this process stood still does not count.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.loading = True
        self._seconds = 0.0

    @property
    def most_s(self) -> float:
        return max(self.limit_s, LOADING_S) if self.loading else self.limit_s

    def heard(self) -> None:
        """The engine has said something."""
        self._seconds = 0.0

    async def until_hung(self, ping: Callable[[], object]) -> str:
        """Asks for a sign of life again and again, until there was none for too long: what is to be said of it."""
        tick_s = min(PING_S, self.limit_s / 4)
        while self._seconds < self.most_s:
            ping()
            await asyncio.sleep(tick_s)
            self._seconds += tick_s
        return f"the engine process hung: no sign of life for {self.most_s:g} s"
