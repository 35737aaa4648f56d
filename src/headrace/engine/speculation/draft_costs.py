"""How many tokens a draft model drafts, and whether it pays to keep it in step with a sequence.

Let a step of n sequences without drafts take 1. A drafted row adds `row` to it, and each place of a draft adds a pass
of the draft model over all sequences whose drafts go as far. A sequence whose drafts are right with probability p gains
p^j tokens by its j-th place. Places are added for as long as tokens to a second grow.

Two things may cost more than they bring, and have an account: a pass for a draft that is wrong, and the tokens of a
prompt that the draft model has to compute first. What is spent without return is at most LOAN of all decoding, beside
what the first trial takes: of the sequences that decode when the engine first could draft.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from headrace.engine.speculation.lengths import (
    FORGETS,
    HEALS,
    LEAST_ROW,
    LOAN,
    NEWER_ROW,
    USUAL_ROW,
    StepCost,
)

TRIAL = 32
"""Drafted tokens after which the account decides whether to draft."""
USUAL_ANSWER = 256
"""Tokens of an answer, until some have ended."""
COLD = 4
"""Times of each number of rows that are slow, as memory is cold."""
CHEAPER = 8
"""As many rows as a pass over few rows costs, in a pass over many: a guess until it is measured."""


class Measured:
    """Seconds by a number of rows or sequences: a moving mean of each, the nearest one's for numbers not seen."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._times: dict[int, int] = {}

    def note(self, number: int, seconds: float, guess: float = math.inf) -> None:
        """guess: the most that is believed of the first time. The first few times, in which memory may be cold, the
        least is taken."""
        times, before = self._times.get(number, 0), self._seconds.get(number, guess)
        self._times[number] = times + 1
        if times < COLD:
            self._seconds[number] = min(seconds, before)
        else:
            self._seconds[number] = before + NEWER_ROW * (seconds - before)

    def of(self, number: int) -> float | None:
        """None as long as nothing is known."""
        if not self._seconds:
            return None
        nearest = min(self._seconds, key=lambda known: abs(known - number))
        return self._seconds[nearest]

    def forget(self, share: float) -> None:
        """Makes all cheaper, so that what once took long is measured again."""
        for number in self._seconds:
            self._seconds[number] *= share


class DraftCost(StepCost):
    """usual: a pass of the draft model as a part of a step without drafts, until both have been measured."""

    def __init__(self, usual: float) -> None:
        super().__init__()
        self.usual = usual
        self.steps, self.passes, self.token = Measured(), Measured(), Measured()
        self.account = Account()
        self.row = USUAL_ROW

    def note(self, sequences: int, drafted: int, seconds: float) -> None:
        super().note(sequences, drafted, seconds)
        self.account.seconds += seconds
        plain = self.steps.of(sequences)
        if not drafted:
            self.steps.note(sequences, seconds)
        elif plain is not None:
            more = min(1.0, max(LEAST_ROW, (seconds / plain - 1) / drafted))
            self.row += NEWER_ROW * (more - self.row)

    def note_pass(self, rows: int, seconds: float) -> None:
        """A pass of the draft model over so many rows."""
        usual = self.usual * (self.steps.of(1) or math.inf)
        self.passes.note(rows, seconds, self.passes.of(rows) or usual)

    def rest(self) -> None:
        """A step in which nobody drafts."""
        self.passes.forget(HEALS)
        self.row += (1 - HEALS) * (USUAL_ROW - self.row)

    def of_pass(self, sequences: int) -> Callable[[int], float]:
        """Rows -> a pass as a part of a step of so many sequences without drafts."""
        plain = self.steps.of(sequences)

        def cost(rows: int) -> float:
            measured = self.passes.of(rows)
            return self.usual if plain is None or measured is None else measured / plain

        return cost

    def of_token(self, sequences: int) -> float:
        """Seconds to compute a token of a prompt by the draft model."""
        found = self.token.of(0)
        return self.usual * (self.steps.of(sequences) or 0.0) / CHEAPER if found is None else found


class Account:
    """Seconds: of all steps that decode, saved by drafts but for what they took, and spent on catching up."""

    def __init__(self) -> None:
        self.seconds = self.saved = self.spent = 0.0

    @property
    def may_draft(self) -> bool:
        return self.saved >= -LOAN * self.seconds

    def affords(self, seconds: float) -> bool:
        """Whether so much may be spent on catching up."""
        return self.spent + seconds <= self.saved + LOAN * self.seconds


class AnswerLengths:
    """How long answers go on, from those that have ended."""

    def __init__(self) -> None:
        self._mean = float(USUAL_ANSWER)

    def note(self, tokens: int) -> None:
        self._mean += (1 - FORGETS) * (tokens - self._mean)

    def left(self, so_far: int, most: int) -> float:
        """Tokens that an answer of so many is expected to get, of at most so many more."""
        return min(most, max(self._mean - so_far, self._mean / CHEAPER))


def repeated(place: int, share: float) -> float:
    """Rows that a model with recurrent layers has to compute again, in the mean, if a draft of `place` tokens gets one
    more: as `lengths` says."""
    return place * share**place * (1 - share)


def places(
    decoding: int,
    shares: Sequence[float],
    most: Sequence[int],
    row: float,
    cost: Callable[[int], float],
    again: bool = False,
) -> tuple[list[int], float]:
    """Tokens to draft for each of some sequences among `decoding`, whose drafts are right with these probabilities and
    may have so many tokens; and how many times faster steps are with them. row: as StepCost has it; cost: of a pass
    over so many rows, as a part of a step without drafts. again: as `allot` has it."""
    taken, best = [0] * len(shares), 1.0
    tokens, seconds, gains = float(decoding), 1.0, list(shares)
    going = sorted(range(len(shares)), key=lambda number: -shares[number])
    while going:
        going = [number for number in going if taken[number] < most[number]]
        rows = {number: row * (1 + again * repeated(taken[number], shares[number])) for number in going}
        going = [number for number in going if gains[number] * seconds > tokens * rows[number]]
        tokens += sum(gains[number] for number in going)
        seconds += sum(rows[number] for number in going) + (cost(len(going)) if going else 0.0)
        if tokens / seconds / decoding <= best:
            break
        best = tokens / seconds / decoding
        for number in going:
            taken[number] += 1
            gains[number] *= shares[number]
    return taken, best
