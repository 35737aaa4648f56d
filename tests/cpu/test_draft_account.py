"""A draft model that does not pay costs next to nothing, one that does is used: on a clock that the test turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.engine.sequence import SequenceState, Slice
from headrace.engine.speculation import model_speculator
from headrace.engine.speculation.draft_model import CATCH_UP
from headrace.engine.speculation.model_speculator import ModelSpeculator
from headrace.types import Request, SamplingParams

STEP_S, ROW_S, PROMPT, ANSWER = 0.1, 0.002, 1000, 200
"""Seconds of a step and of a drafted row in it; tokens of a prompt and of an answer."""
AS_MANY = 16
"""Tokens of a prompt that take as long as a pass."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class OnPaper:
    """A DraftedSequence without chunks."""

    def __init__(self, sequence: SequenceState) -> None:
        self.sequence, self.length = sequence, 0

    @property
    def lacking(self) -> int:
        return max(0, len(self.sequence.tokens) - 1 - self.length)

    def follow(self) -> None:
        self.length = min(self.length, len(self.sequence.tokens) - 1)


class Drafter:
    """A DraftModel that takes time and computes nothing. cost: of a pass, as a part of a step."""

    longest, again, seconds = 1 << 20, False, None

    def __init__(self, clock: Clock, cost: float) -> None:
        self.clock, self.cost = clock, cost

    def catch_up(self, sequences: Iterable[OnPaper]) -> int:
        first = next(iter(sequences))
        tokens = min(CATCH_UP, first.lacking)
        first.length += tokens
        self.clock.now += tokens * self.cost * STEP_S / AS_MANY
        return tokens

    def draft(self, sequences: list[OnPaper], note: Callable[[int, float], None]) -> None:
        for _ in range(max(len(each.sequence.draft) for each in sequences)):
            self.clock.now += self.cost * STEP_S
            note(len(sequences), self.cost * STEP_S)
        for each in sequences:
            each.length = len(each.sequence.tokens)


def answered(clock: Clock, speculator: ModelSpeculator, together: int, right: Callable[[], bool]) -> None:
    """Some sequences answer together."""
    running = []
    for number in range(together):
        request = Request(f"{number}", [1] * PROMPT, SamplingParams(max_tokens=ANSWER), arrival_s=0.0)
        sequence = SequenceState(request, 0, number)
        sequence.tokens.append(1)
        sequence.table = SimpleNamespace(length=PROMPT)  # type: ignore[assignment]
        running.append(sequence)
    while running:
        speculator.propose(running)
        speculator.complete([Slice(each, len(each.tokens) - 1, 1 + len(each.draft)) for each in running])
        drafted = sum(len(each.draft) for each in running)
        seconds = STEP_S + ROW_S * drafted
        clock.now += seconds
        speculator.cost.note(len(running), drafted, seconds)
        for each in running:
            stands = next((i for i in range(len(each.draft)) if not right()), len(each.draft))
            each.tokens += [1] * (stands + 1)
            each.table = SimpleNamespace(length=len(each.tokens) - 1)  # type: ignore[assignment]
            if each.draft:
                speculator.note(each, len(each.draft), stands)
        for each in [each for each in running if each.n_output >= ANSWER]:
            speculator.end(each)
            running.remove(each)


def time_of(
    monkeypatch: pytest.MonkeyPatch, cost: float, share: float, together: int, rounds: int = 20
) -> tuple[float, Any]:
    """Seconds beside those without drafts."""
    clock, random = Clock(), Random(1)
    monkeypatch.setattr(model_speculator, "time", clock)
    monkeypatch.setattr(model_speculator, "DraftedSequence", OnPaper)
    speculator = ModelSpeculator(Drafter(clock, cost), 8, 1 << 20)  # type: ignore[arg-type]
    for _ in range(rounds):
        answered(clock, speculator, together, lambda: random.random() < share)
    return clock.now / (rounds * (ANSWER - 1) * STEP_S), speculator.stats


@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize(("cost", "share"), [(0.2, 0.0), (0.2, 0.15), (1.0, 0.9)])
def test_what_does_not_pay_costs_two_percent_at_most(
    cost: float, share: float, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer comes after a prompt that the draft model would have to compute first."""
    taken, _ = time_of(monkeypatch, cost, share, together)
    assert taken <= 1.02


@pytest.mark.parametrize("together", [1, 4])
def test_what_pays_is_used(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, stats = time_of(monkeypatch, 0.1, 0.9, together)
    assert taken < 0.7 and stats.accepted > 2000


def test_the_first_wrong_drafts_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one answer."""
    clock, compared = Clock(), count(1)
    monkeypatch.setattr(model_speculator, "time", clock)
    monkeypatch.setattr(model_speculator, "DraftedSequence", OnPaper)
    speculator = ModelSpeculator(Drafter(clock, 0.1), 8, 1 << 20)  # type: ignore[arg-type]
    answered(clock, speculator, 1, lambda: next(compared) > 3)
    assert speculator.stats.accepted > ANSWER // 2


def test_what_did_not_pay_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of the first answers are all wrong, those of later ones right."""
    clock, right = Clock(), [False]
    monkeypatch.setattr(model_speculator, "time", clock)
    monkeypatch.setattr(model_speculator, "DraftedSequence", OnPaper)
    speculator = ModelSpeculator(Drafter(clock, 0.1), 8, 1 << 20)  # type: ignore[arg-type]
    for _ in range(20):
        answered(clock, speculator, 1, lambda: right[0])
    wrong, right[0] = speculator.stats.drafted, True
    for _ in range(40):
        answered(clock, speculator, 1, lambda: right[0])
    assert speculator.stats.accepted > 10 * wrong
