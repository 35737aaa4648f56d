"""How many tokens to draft: as many as pay, by what was accepted of late and what rows cost.

A step with n sequences and d drafted rows takes base + slope (n + d) seconds. A sequence whose drafts are right with
probability p gains p^j tokens by its j-th drafted row. Rows are added, the most probable ones first, for as long as
each adds more tokens to a second than the step has without it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

FORGETS, HEALS = 0.95, 0.995
"""What is left of what was seen, after a draft that was tried, and after a step without one: a sequence that did not
repeat itself is tried again some hundred tokens later."""
COST_FORGETS = 0.98
USUAL_SLOPE = 0.05
"""Of a step with one row; as long as no steps with other numbers of rows have been seen."""


class Acceptance:
    """The share of drafted tokens that were right, of those that were compared."""

    def __init__(self) -> None:
        self._right = self._compared = 0.0

    def note(self, drafted: int, accepted: int) -> None:
        self._right = self._right * FORGETS + accepted
        self._compared = self._compared * FORGETS + min(drafted, accepted + 1)

    def rest(self) -> None:
        """A step without a draft."""
        self._right *= HEALS
        self._compared *= HEALS

    @property
    def share(self) -> float:
        """Between 0 and 1; a half as long as nothing is known."""
        return (self._right + 0.5) / (self._compared + 1)


class StepCost:
    """Seconds of a decode step by its rows: a line through the steps seen, of which the later ones count for more."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, rows: int, seconds: float) -> None:
        keep = COST_FORGETS
        self._n, self._x, self._y = self._n * keep + 1, self._x * keep + rows, self._y * keep + seconds
        self._xx, self._xy = self._xx * keep + rows * rows, self._xy * keep + rows * seconds

    def line(self) -> tuple[float, float]:
        """(base, slope) in seconds; (1, USUAL_SLOPE) before the first step."""
        if not self._n:
            return 1.0, USUAL_SLOPE
        x, y = self._x / self._n, self._y / self._n
        spread, together = self._xx - self._n * x * x, self._xy - self._n * x * y
        usual = y * USUAL_SLOPE / (1 + USUAL_SLOPE * x)
        slope = (together + usual) / (spread + 1)
        slope = min(max(slope, usual / 50), y / x)
        return y - slope * x, slope


def allot(decoding: int, shares: Sequence[float], drafts: Sequence[int], line: tuple[float, float]) -> list[int]:
    """Drafted rows for each of some sequences among `decoding`, whose drafts have so many tokens and are right with
    these probabilities."""
    base, slope = line
    taken = [0] * len(drafts)
    tokens, seconds = float(decoding), base + slope * decoding
    best = [(-share, number) for number, share in enumerate(shares) if drafts[number]]
    heapq.heapify(best)
    while best:
        gain, number = best[0]
        if -gain * seconds <= tokens * slope:
            break
        tokens, seconds = tokens - gain, seconds + slope
        taken[number] += 1
        if taken[number] < drafts[number]:
            heapq.heapreplace(best, (gain * shares[number], number))
        else:
            heapq.heappop(best)
    return taken
