"""How a tier in a directory is: its counters, its pause after a failure to write, and what the log was told."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from headrace.logs import shown
from headrace.stats import TierStats

log = logging.getLogger(__name__)


class Health:
    """Safe to use from several threads. what: begins each message. retry_s: how long a pause lasts."""

    def __init__(self, what: str, budget_bytes: int, retry_s: float) -> None:
        self._what = what
        self._retry = retry_s
        self._lock = threading.Lock()
        self._stats = TierStats(budget_bytes=budget_bytes)
        self._told: set[str] = set()
        self._until = 0.0

    @property
    def paused(self) -> bool:
        return time.monotonic() < self._until

    def resume(self) -> None:
        self._until = 0.0

    def count(self, **more: int) -> None:
        """Adds to counters by name."""
        with self._lock:
            for name, count in more.items():
                setattr(self._stats, name, getattr(self._stats, name) + count)

    def fail(self, kind: str, error: Exception, pause: bool = False) -> None:
        """Could not do what `kind` says."""
        self.count(errors=1)
        if pause:
            self._until = time.monotonic() + self._retry
            with self._lock:
                self._stats.reason = f"{kind}: {error}"
        rest = f"; nothing is written for {self._retry:g} s" if pause else ""
        self.tell(kind, f"cannot {kind}: {error}{rest}")

    def works(self, kind: str) -> None:
        """Could do it; the next failure is told again."""
        with self._lock:
            if kind not in self._told:
                return
            self._told.discard(kind)
        log.info("%s: can %s again", self._what, kind)

    def tell(self, kind: str, message: str) -> None:
        """A warning, once per kind."""
        with self._lock:
            if kind in self._told:
                return
            self._told.add(kind)
        log.warning("%s: %s", self._what, shown(message))

    def stats(self, degraded: bool, used_bytes: int, blobs: int) -> TierStats:
        """A copy; degraded also where there is a pause."""
        degraded |= self.paused
        with self._lock:
            reason = self._stats.reason if degraded else ""
            return replace(self._stats, used_bytes=used_bytes, blobs=blobs, degraded=degraded, reason=reason)
