"""Loading in the log: how far it is every few seconds, and each phase that took long when it is over."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from headrace.logs import fields
from headrace.progress import LoadPhase, PhaseTime, PhaseTimes, duration

log = logging.getLogger("headrace.server")

LONG_S = 2.0
"""A phase that takes longer is told."""
EVERY_S = 5.0
"""Between lines about a phase under way."""


class LoadLog:
    """An OnPhase. `run` tells of the phase under way until it is cancelled."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.times = PhaseTimes(self._ended, clock)

    def __call__(self, phase: LoadPhase) -> None:
        self.times(phase)

    @property
    def text(self) -> str:
        """What is being done: 'weights 1.2 of 3.1 GiB'; '' at the very beginning."""
        return self.times.now.text if self.times.now is not None else ""

    @property
    def weights(self) -> int:
        """Bytes of weights, once they have been read."""
        return next((each.size for each in self.times.all if each.name == "weights"), 0)

    async def run(self, every_s: float = EVERY_S) -> None:
        while True:
            await asyncio.sleep(every_s)
            self.tell()

    def tell(self) -> None:
        """A line about the phase under way."""
        now, seconds = self.times.now, self.times.seconds
        if now is not None:
            told = fields(phase=now.name, done=now.done, total=now.total, seconds=round(seconds, 3))
            log.info("loading   %s, for %s", now.text, duration(seconds), extra=told)

    @staticmethod
    def _ended(phase: PhaseTime) -> None:
        if phase.seconds > LONG_S:
            told = fields(phase=phase.name, seconds=round(phase.seconds, 3), bytes=phase.size)
            log.info("loading   %s", phase.text, extra=told)
