"""Leaving a tier alone after a failure, for longer each time, until one trial call succeeds.

States, in the usual terms of a circuit breaker:

    closed --failed--> open --cooldown over, one call let through--> half-open --succeeded--> closed
                         ^------------------failed: twice the cooldown------'
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from headrace.logs import shown

log = logging.getLogger(__name__)

MOST_REASON = 400
"""Characters in the log; callers have already shortened foreign text in a reason."""

LONGEST_S = 60.0
"""Bound of the doubling: a tier that comes back is noticed within a minute."""


class Breaker:
    """One per thing that may fail by itself. Safe to use from several threads.

    A caller asks allows() before each call and says afterwards succeeded() or failed(reason). Calls that began before
    the breaker opened may end while it is open: what they say then changes nothing.
    """

    def __init__(
        self,
        cooldown_s: float,
        what: str = "the tier",
        *,
        longest_s: float = LONGEST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """cooldown_s: of the first opening; longest_s: bound of all (at least cooldown_s). what: named in the log."""
        if not 0 < cooldown_s < float("inf"):
            raise ValueError(f"a breaker needs a cooldown above 0 s and finite, got {cooldown_s}")
        self.what, self._clock = what, clock
        self._first_s, self._longest_s = cooldown_s, max(cooldown_s, longest_s)
        self._lock = threading.Lock()
        self._cooldown_s = cooldown_s
        self._opened: float | None = None  # when it opened; None: closed
        self._until = 0.0
        self._trial = False
        self._reason = ""

    def allows(self) -> bool:
        """Whether a call may be made now. After the cooldown one caller is told so; should it never report, another
        one is after as long again."""
        with self._lock:
            if self._opened is None:
                return True
            now = self._clock()
            if now < self._until:
                return False
            self._until, self._trial = now + self._cooldown_s, True
            return True

    def succeeded(self) -> None:
        with self._lock:
            if self._opened is None or not self._trial:
                return
            lasted = self._clock() - self._opened
            self._opened, self._trial, self._reason, self._cooldown_s = None, False, "", self._first_s
        log.info("%s is used again after %.1f s", self.what, lasted)

    def failed(self, reason: str) -> None:
        with self._lock:
            now = self._clock()
            opens = self._opened is None
            if not opens and not self._trial:
                return
            if opens:
                self._opened = now
            else:
                self._cooldown_s = min(2 * self._cooldown_s, self._longest_s)
            self._trial, self._reason, self._until = False, reason, now + self._cooldown_s
        if opens:
            log.warning(
                "%s is left alone for %.1f s, longer if it fails again: %s",
                self.what,
                self._first_s,
                shown(reason, MOST_REASON),
            )

    @property
    def degraded(self) -> bool:
        """Whether it is open or on trial; says nothing about whether a call would be let through."""
        with self._lock:
            return self._opened is not None

    @property
    def reason(self) -> str:
        """Of the last failure while open; "" while closed."""
        with self._lock:
            return self._reason
