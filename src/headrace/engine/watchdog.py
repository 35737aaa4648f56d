"""Whether an engine hangs: its process has said nothing for too long, or its step has taken too long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headrace.config import EngineConfig

PING_S = 1.0
"""Seconds between pings; less where the timeout is short."""

LOADING_S = 120.0
"""Least silence of an engine that is loading after which it counts as hung: what it imports and maps may hold up all of
its threads, and a timeout chosen for a serving engine would kill one that has just begun."""

GPU_STEP_S = 600.0
"""A step on a GPU takes milliseconds; one that streams weights from a disk, or compiles kernels, takes minutes."""


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


class StepWatch:
    """A context around each step of an engine; `look`, from another thread, calls `end` with the reason once the step
    under way has taken more than limit_s. None: it may take as long as it does."""

    def __init__(self, limit_s: float | None, end: Callable[[str], object]) -> None:
        self.limit_s, self._end = limit_s, end
        self._began: float | None = None

    @classmethod
    def of(cls, config: EngineConfig, end: Callable[[str], object]) -> StepWatch:
        return cls(config.server.step_timeout_s or (GPU_STEP_S if config.model.on_gpu else None), end)

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._began = None

    def look(self) -> None:
        began = self._began
        if began is not None and self.limit_s is not None and time.monotonic() - began > self.limit_s:
            self._end(f"the engine hung: a step has taken more than {self.limit_s:g} s (step_timeout_s)")
