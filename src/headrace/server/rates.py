"""A rate that may be spent in bursts: a token bucket, which may go into debt."""

from __future__ import annotations

import time
from collections.abc import Callable


class Bucket:
    """`per_minute` flows in each minute, evenly, up to what a minute brings. What turns out to have been spent only
    afterwards may take it below zero: then nothing more is to be had until that has flowed in."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level, self._at_s = per_minute, clock()

    @property
    def level(self) -> float:
        """What may be spent now."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._at_s) * self.per_minute / 60)
        self._at_s = now
        return self._level

    @property
    def full_s(self) -> float:
        """Seconds until a whole minute's worth may be spent at once."""
        return (self.per_minute - self.level) * 60 / self.per_minute

    def wait_s(self, amount: float) -> float:
        """Seconds until so much may be spent; 0.0 now. More than a minute brings may be spent once it is full."""
        missing = min(amount, self.per_minute) - self.level
        return max(0.0, missing * 60 / self.per_minute)

    def spend(self, amount: float) -> None:
        """Takes it, or gives it back where it is negative."""
        self._level = min(self.per_minute, self.level - amount)

    def change(self, per_minute: float) -> None:
        """Another rate from now on."""
        self._level = min(per_minute, self.level)
        self.per_minute = per_minute
