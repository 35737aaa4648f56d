"""How often a failed engine may be started again."""

from __future__ import annotations

MOST = 3
WINDOW_S = 60.0


class RestartLimit:
    """At most MOST restarts within WINDOW_S of uptime, unless a request succeeds in between.

    Uptime is time in which an engine was ready: a model that takes minutes to load and fails at once must not go on
    for ever.
    """

    def __init__(self) -> None:
        self._at: list[float] = []

    def allows(self, uptime_s: float) -> bool:
        """Whether another restart is due after `uptime_s` of uptime in all; counts it if so."""
        self._at = [at for at in self._at if uptime_s - at < WINDOW_S]
        if len(self._at) >= MOST:
            return False
        self._at.append(uptime_s)
        return True

    @property
    def used(self) -> int:
        """Restarts that count now."""
        return len(self._at)

    def note_success(self) -> None:
        self._at.clear()
