"""How many tokens are drafted: what drafts take and bring, by a clock that the test moves."""

from __future__ import annotations

import random
import statistics

import pytest

from headrace.engine.speculation.lengths import (
    FEW_SEEN,
    LEAST_ROW,
    MOST_CREDIT,
    OLD,
    ROWS_SEEN,
    SOON,
    STALE,
    Acceptance,
    Credit,
    StepCost,
    allot,
)
from tests.support.drafting_clock import Clock

SHAPES = pytest.mark.parametrize(
    ("sequences", "first", "row"), [(1, 0.13, 0.05), (1, 0.3, 0.06), (4, 0.03, 0.025), (4, 0.1, 0.03), (16, 0.06, 0.05)]
)
"""What the first drafted row and each more add to a step."""


@SHAPES
@pytest.mark.parametrize("again", [False, True])
def test_drafts_that_are_always_wrong_cost_two_percent_at_most(
    sequences: int, first: float, row: float, again: bool
) -> None:
    """Of one answer of a new engine, which knows nothing, and one percent of many answers."""

    def mean(right: float, rounds: int) -> float:
        clocks = (Clock(sequences, right, first, row, again=again, rng=random.Random(seed)) for seed in range(6))
        return statistics.mean(clock.faster(rounds) for clock in clocks)

    assert 0.98 <= mean(0.0, 1) < 1 and 0.99 <= mean(0.0, 4) < 1
    assert mean(0.1, 4) > 0.98


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("sequences", "row", "gain"), [(1, 0.05, 6.0), (4, 0.03, 4.0), (16, 0.02, 2.2)])
def test_drafts_that_are_right_win_from_the_first_answer_on(
    sequences: int, row: float, gain: float, again: bool
) -> None:
    assert Clock(sequences, 1.0, 0.05, row, again=again).faster() > gain


def test_good_drafts_win_soon_after_bad_ones() -> None:
    clock = Clock(1, 0.0, 0.13, 0.05)
    assert clock.faster(8) < 1
    clock.right = 1.0
    assert clock.faster() > 2
    clock.faster(8)
    clock.right = 0.0
    assert clock.faster() > 0.9 and clock.faster(8) > 0.985


def test_no_draft_costs_more_than_the_credit() -> None:
    assert allot(4, [0.9] * 4, [8] * 4, 0.05, credit=0.52) == [3, 3, 2, 2]
    assert allot(4, [0.9] * 4, [8] * 4, 0.05, credit=-0.1) == [0] * 4
    credit = Credit()
    credit.note(0.0, 1.0)
    short = -credit.steps
    assert short == pytest.approx(0.5)
    for _ in range(200):
        credit.lend()
    assert 0 < credit.steps < 0.52
    credit.note(100.0, 1.0)
    assert credit.steps == MOST_CREDIT


def test_a_new_sequence_begins_with_what_all_had_accepted() -> None:
    overall = Acceptance()
    assert Acceptance(overall).share == 0.5
    for _ in range(30):
        overall.note(4, 0)
    fresh = Acceptance(overall)
    assert overall.share < fresh.share < 0.1
    for _ in range(10):
        fresh.note(4, 4)
    assert fresh.share > 0.8 and overall.share < 0.1


def test_a_row_is_compared_with_the_step_just_before() -> None:
    """On a machine that becomes ten times as slow meanwhile."""
    cost = StepCost()
    assert cost.row_of(4) == LEAST_ROW
    for step in range(400):
        slow, drafted = 1 + step / 40, step % 3
        cost.note(4, drafted, 0.03 * slow * (1 + 0.08 * drafted))
    assert 0.07 < cost.row_of(4) < 0.12
    before = cost.row_of(4)
    for number in range(100):
        cost.note(4, 2, 10.0 if number > 2 else 0.03 * 11 * 1.16)
    cost.note(5, 2, 10.0)
    assert cost.row_of(4) == pytest.approx(before, abs=0.02)
    assert cost.row_of(16) == LEAST_ROW


def test_a_step_without_drafts_is_due_now_and_then() -> None:
    cost = StepCost()
    assert cost.stale
    for _ in range(FEW_SEEN):
        cost.note(1, 0, 0.02)
        for _ in range(SOON):
            assert not cost.stale
            cost.note(1, 2, 0.022)
    assert not cost.stale
    cost.note(1, 0, 0.02)
    for _ in range(STALE):
        assert not cost.stale
        cost.note(1, 2, 0.022)
    assert cost.stale


def test_rows_that_seemed_too_dear_are_tried_again() -> None:
    cost = StepCost()
    cost.note(1, 0, 0.01)
    cost.note(1, 1, 0.05)
    assert cost.row_of(1) == 1.0
    for _ in range(OLD * ROWS_SEEN):
        cost.note(1, 0, 0.01)
    assert cost.row_of(1) == LEAST_ROW
