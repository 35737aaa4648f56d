"""How many tokens to draft: as many as pay, by what was accepted of late and what rows cost.

Let a step of n sequences without drafts take 1, and each drafted row `row` more. A sequence whose drafts are right with
probability p gains p^j tokens by its j-th drafted row. Rows are added, the most probable ones first, for as long as
each adds more tokens to a second than the step has without it, and credit lasts: what drafts take beyond what they
bring is bounded, however wrong they are.

Of a model with recurrent layers the rows that were right before a wrong one are computed again (kv.states): of a draft
of k tokens that is sum over a < k of a p^a (1 - p) rows in the mean, and the j-th row adds (j - 1) p^(j-1) (1 - p).
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Sequence

FORGETS, HEALS = 0.95, 0.995
"""What is left of what was seen, after a draft that was tried, and after a step without one: a sequence that did not
repeat itself is tried again some hundred tokens later."""
USUAL_ROW, LEAST_ROW = 0.05, 0.02
"""Cost of a drafted row as a part of a step without drafts: until it is known, and at the least."""
NEWER_ROW = 0.1
"""Weight of what was seen last."""
ROWS_SEEN, FEW_SEEN = 9, 3
"""Measurements of a row: whose median counts, and with fewer than which it is measured sooner."""
OLD = 64
"""Steps without drafts after which the oldest measurement is forgotten: one that was too high would else stay."""
FRESH = 2
"""Steps with drafts compared with the one without before them: machines become twice as slow within a second."""
STALE, SOON = 128, 8
"""Steps with drafts after which one without is due, by which rows are measured; as long as few have been."""
TRUST = 8.0
"""Tokens, of those that others had compared of late, that a new sequence begins with."""
LOAN = 0.01
"""Part of all decoding that drafts may take without return."""
FIRST_CREDIT, MOST_CREDIT = 0.5, 16.0
"""Credit at first, and the most that is saved up for worse times."""


class Acceptance:
    """The share of drafted tokens that were right, of those that were compared. others: what all of late had."""

    def __init__(self, others: Acceptance | None = None) -> None:
        self._right = self._compared = 0.0
        if others is not None and others._compared:
            part = min(1.0, TRUST / others._compared)
            self._right, self._compared = part * others._right, part * others._compared

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
    """What a row beyond one for each sequence adds to a step, as a part of the step of as many sequences without such
    just before: machines are faster and slower at times, and steps on longer contexts take longer."""

    def __init__(self) -> None:
        self._rows: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=ROWS_SEEN))
        """What was measured, by the number of sequences: those of as many bits are alike."""
        self._sequences, self._plain = 0, 0.0
        """Of the last step without drafts: how many, and seconds."""
        self._since, self._plains = STALE, 0
        """Steps with drafts behind it, and without up to it."""

    def note(self, sequences: int, more: int, seconds: float) -> None:
        """A step with so many rows more than sequences."""
        rows = self._rows[sequences.bit_length()]
        if not more:
            self._sequences, self._plain = sequences, seconds
            self._since, self._plains = 0, self._plains + 1
            if rows and self._plains % OLD == 0:
                rows.popleft()
            return
        self._since, self._plains = self._since + 1, 0
        if self._since <= FRESH and sequences == self._sequences:
            rows.append(min(1.0, (seconds / self._plain - 1) / more))

    def row_of(self, sequences: int) -> float:
        """Of a step of so many. What was never measured is tried at the least, since credit bounds what that takes."""
        rows = self._rows[sequences.bit_length()]
        return max(LEAST_ROW, statistics.median(rows)) if rows else LEAST_ROW

    @property
    def stale(self) -> bool:
        """Whether a step without drafts is due."""
        seen = len(self._rows[self._sequences.bit_length()])
        return self._since >= (STALE if seen >= FEW_SEEN else SOON)


class Credit:
    """What drafts may take before they bring anything, in steps without drafts: FIRST_CREDIT, and LOAN of each step."""

    def __init__(self) -> None:
        self.steps = FIRST_CREDIT

    def lend(self) -> None:
        """A step that decodes."""
        if self.steps < FIRST_CREDIT:
            self.steps += LOAN

    def note(self, brought: float, took: float) -> None:
        """A draft was verified."""
        self.steps = min(MOST_CREDIT, self.steps + brought - took)


def allot(
    decoding: int,
    shares: Sequence[float],
    drafts: Sequence[int],
    row: float,
    again: bool = False,
    credit: float = math.inf,
) -> list[int]:
    """Drafted rows for each of some sequences among `decoding`, whose drafts have so many tokens and are right with
    these probabilities. row: of StepCost. again: the rows before a wrong one are computed again. credit: the
    most that all rows may cost."""
    taken = [0] * len(drafts)
    tokens, seconds = float(decoding), 1.0
    best = [(-share, number) for number, share in enumerate(shares) if drafts[number]]
    heapq.heapify(best)
    while best:
        gain, number = best[0]
        before, share = taken[number], shares[number]
        cost = row * (1 + again * before * share**before * (1 - share))
        if -gain * seconds <= tokens * cost or seconds + cost > 1 + credit:
            break
        tokens, seconds = tokens - gain, seconds + cost
        taken[number] += 1
        if taken[number] < drafts[number]:
            heapq.heapreplace(best, (gain * share, number))
        else:
            heapq.heappop(best)
    return taken
