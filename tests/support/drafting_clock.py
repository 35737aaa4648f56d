"""Speculation beside a clock that a test moves: sequences whose drafts are right by chance, on a machine whose steps
take what the test says."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from headrace.engine.sequence import SequenceState
from headrace.engine.speculation.speculator import Speculator


@dataclass
class Clock:
    """right: probability of a drafted token. first, row: what the first row and each more add to a step without."""

    sequences: int
    right: float
    first: float
    row: float
    answer: int = 128
    again: bool = False
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.speculator = Speculator("ngram", 12, 1 << 20, self.again)
        self._behind: dict[SequenceState, int] = {}
        """Rows that are computed again."""
        self.speculator.matcher_of = lambda sequence: self  # type: ignore[method-assign]

    def propose(self, tokens: list[int], most: int) -> list[int]:
        """A draft at every step."""
        return [0] * most

    def faster(self, rounds: int = 1) -> float:
        """How many times as fast as without drafts so many rounds of answers are, each until the first has ended."""
        tokens = took = 0.0
        for _ in range(rounds):
            running = [self._sequence() for _ in range(self.sequences)]
            while all(each.n_output < self.answer for each in running):
                took += self._step(running)
            tokens += sum(each.n_output - 1 for each in running)
            for each in running:
                self.speculator.end(each)
        return tokens / self.sequences / took

    def _step(self, running: list[SequenceState]) -> float:
        """Its time, of a step without drafts."""
        self.speculator.propose(running)
        more = sum(len(each.draft) + self._behind.pop(each, 0) for each in running)
        seconds = self.rng.uniform(0.95, 1.05) * (1 + bool(more) * self.first + max(0, more - 1) * self.row)
        self.speculator.cost.note(len(running), more, seconds)
        for each in running:
            wrong = (at for at in range(len(each.draft)) if self.rng.random() >= self.right)
            right = next(wrong, len(each.draft))
            if each.draft:
                self.speculator.note(each, len(each.draft), right)
            if self.again and right < len(each.draft):
                self._behind[each] = right
            cast(Any, each).n_output += right + 1
        return seconds

    def _sequence(self) -> SequenceState:
        params = SimpleNamespace(max_tokens=self.answer)
        made = _Sequence(request=SimpleNamespace(params=params, cache_salt=None), tokens=[0] * 16)
        return cast(SequenceState, made)


@dataclass(eq=False)
class _Sequence:
    """What a speculator reads of a sequence that decodes."""

    request: Any
    tokens: list[int]
    n_output: int = 1
    remaining: int = 1
    forced: bool = False
    held: bool = False
    draft: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
