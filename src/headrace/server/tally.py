"""Counts of what strangers may cause as often as they like, told in one line an interval."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

MOST_KEYS = 50
"""Kinds that are counted apart; further ones of the same interval count as `rest`."""


class Tally:
    """note(key) counts. tell(counts, seconds) is called at once for the first, and then at most every `every_s` with
    what came since, `seconds` being the time in which it did."""

    def __init__(
        self, every_s: float, tell: Callable[[Counter[Any], float], None], rest: Callable[[Any], Hashable] = lambda k: k
    ) -> None:
        self.every_s = every_s
        self._tell, self._rest = tell, rest
        self._counts: Counter[Any] = Counter()
        self._told_s = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def note(self, key: Hashable) -> None:
        known = key in self._counts or len(self._counts) < MOST_KEYS
        self._counts[key if known else self._rest(key)] += 1
        if self._timer is None:
            wait = max(0.0, self._told_s + self.every_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait, self._due)

    def _due(self) -> None:
        now = time.monotonic()
        counts, seconds = self._counts, min(self.every_s, now - self._told_s)
        self._counts, self._timer, self._told_s = Counter(), None, now
        self._tell(counts, seconds)
