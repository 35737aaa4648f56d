"""How many tokens to draft: as many as pay, by what was accepted of late and what rows cost.

Let a step of n sequences without drafts take 1, and each drafted row `row` more. A sequence whose drafts are right with
probability p gains p^j tokens by its j-th drafted row. Rows are added, the most probable ones first, for as long as
each adds more tokens to a second than the step has without it.

Of a model with recurrent layers the rows that were right before a wrong one are computed again (kv.states): of a draft
of k tokens that is sum over a < k of a p^a (1 - p) rows in the mean, and the j-th row adds (j - 1) p^(j-1) (1 - p).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

FORGETS, HEALS = 0.95, 0.995
"""What is left of what was seen, after a draft that was tried, and after a step without one: a sequence that did not
repeat itself is tried again some hundred tokens later."""
USUAL_ROW, LEAST_ROW = 0.05, 0.02
"""Cost of a drafted row as a part of a step without drafts: until it is known, and at the least."""
NEWER_STEP, NEWER_ROW = 0.3, 0.1
"""Weights of what was seen last."""
STALE = 128
"""Steps with drafts after which one without is due, by which rows are measured."""


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
    """What a row beyond one for each sequence adds to a step, as a part of a step of as many sequences without such a
    short while ago: machines are faster and slower at times, and steps on longer contexts take longer."""

    def __init__(self) -> None:
        self.row = USUAL_ROW
        self._plain: dict[int, float] = {}
        """Seconds of steps without drafts, by the number of their sequences."""
        self._since = 0

    def note(self, sequences: int, more: int, seconds: float) -> None:
        """A step with so many rows more than sequences."""
        plain = self._plain.get(sequences)
        if not more:
            self._since = 0
            self._plain[sequences] = seconds if plain is None else plain + NEWER_STEP * (seconds - plain)
            return
        self._since += 1
        if plain is not None:
            row = min(1.0, (seconds / plain - 1) / more)
            self.row = max(LEAST_ROW, self.row + NEWER_ROW * (row - self.row))

    @property
    def stale(self) -> bool:
        """Whether a step without drafts is due."""
        return self._since >= STALE


def allot(decoding: int, shares: Sequence[float], drafts: Sequence[int], row: float, again: bool = False) -> list[int]:
    """Drafted rows for each of some sequences among `decoding`, whose drafts have so many tokens and are right with
    these probabilities. row: as StepCost has it. again: the rows before a wrong one are computed again."""
    taken = [0] * len(drafts)
    tokens, seconds = float(decoding), 1.0
    best = [(-share, number) for number, share in enumerate(shares) if drafts[number]]
    heapq.heapify(best)
    while best:
        gain, number = best[0]
        before, share = taken[number], shares[number]
        cost = row * (1 + again * before * share**before * (1 - share))
        if -gain * seconds <= tokens * cost:
            break
        tokens, seconds = tokens - gain, seconds + cost
        taken[number] += 1
        if taken[number] < drafts[number]:
            heapq.heapreplace(best, (gain * share, number))
        else:
            heapq.heappop(best)
    return taken
