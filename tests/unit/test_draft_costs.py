"""How many tokens a draft model drafts, and when it pays to have it catch up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.speculation.draft_costs import (
    COLD,
    LOAN,
    USUAL_ANSWER,
    Account,
    AnswerLengths,
    DraftCost,
    Measured,
    places,
)

pytestmark = pytest.mark.unit

SHARES = st.floats(0.0, 1.0)


def speed(decoding: int, shares: list[float], taken: list[int], row: float, draft: float, again: bool = False) -> float:
    """Tokens to a second with these drafts, beside those without. again: rows before a wrong one are computed again."""
    tokens = decoding + sum(share**place for share, count in zip(shares, taken, strict=True)
                            for place in range(1, count + 1))  # fmt: skip
    rows = sum(taken) + again * sum(right * share**right * (1 - share)
                                    for share, count in zip(shares, taken, strict=True)
                                    for right in range(count))  # fmt: skip
    seconds = 1.0 + row * rows + draft * max(taken, default=0)
    return tokens / seconds / decoding


@given(
    st.lists(st.tuples(SHARES, st.integers(0, 8)), min_size=1, max_size=6),
    st.floats(0, 0.3),
    st.floats(0.01, 1),
    st.booleans(),
)
def test_drafts_are_no_longer_than_they_may_be_and_never_slower(
    each: list[tuple[float, int]], row: float, draft: float, again: bool
) -> None:
    shares, most = [share for share, _ in each], [count for _, count in each]
    taken, faster = places(len(each), shares, most, row, lambda rows: draft, again)
    assert all(count <= limit for count, limit in zip(taken, most, strict=True))
    assert faster >= 1 and faster == pytest.approx(speed(len(each), shares, taken, row, draft, again))


@given(SHARES, st.integers(0, 8), st.floats(0.0, 0.3), st.floats(0.01, 1.0))
def test_of_one_sequence_it_is_the_best_length(share: float, most: int, row: float, draft: float) -> None:
    taken, faster = places(1, [share], [most], row, lambda rows: draft)
    best = max(speed(1, [share], [count], row, draft) for count in range(most + 1))
    assert faster == pytest.approx(best)
    assert len(taken) == 1


def test_a_pass_that_costs_more_than_it_brings_is_not_made() -> None:
    assert places(1, [0.9], [8], 0.05, lambda rows: 0.9)[0] == [0]
    assert places(1, [0.9], [8], 0.05, lambda rows: 0.1)[0] > [2]
    # One alone does not pay for the pass, several do; a hopeless one does not ride along.
    assert places(4, [0.6, 0.0, 0.0, 0.0], [8] * 4, 0.02, lambda rows: 0.2)[0] == [0] * 4
    taken, _ = places(4, [0.6, 0.6, 0.6, 0.0], [8] * 4, 0.02, lambda rows: 0.2)
    assert min(taken[:3]) > 0 and taken[3] == 0


def test_an_account_lends_a_part_of_what_decoding_takes() -> None:
    account = Account()
    account.seconds = 100.0
    assert account.may_draft and account.affords(100 * LOAN) and not account.affords(100 * LOAN + 0.1)
    account.saved = 5.0
    assert account.affords(5.0)
    account.spent = 6.0
    assert not account.affords(0.1)
    account.saved = -1.5
    assert not account.may_draft


def test_what_is_measured_is_that_of_the_nearest_number() -> None:
    seconds = Measured()
    assert seconds.of(3) is None
    seconds.note(1, 1.0)
    seconds.note(8, 2.0)
    assert [seconds.of(number) for number in (1, 2, 6, 20)] == [1.0, 1.0, 2.0, 2.0]
    for _ in range(COLD):
        seconds.note(1, 3.0)
    assert 1.0 < (seconds.of(1) or 0) < 3.0
    seconds.forget(0.5)
    assert seconds.of(8) == 1.0


def test_the_first_times_count_as_the_fastest_of_them() -> None:
    seconds = Measured()
    for each in (9.0, 3.0, 5.0):
        seconds.note(1, each)
    assert seconds.of(1) == 3.0
    seconds.note(2, 9.0, guess=4.0)
    assert seconds.of(2) == 4.0


def test_a_pass_costs_what_was_guessed_until_both_are_measured() -> None:
    cost = DraftCost(0.25)
    assert cost.of_pass(4)(2) == 0.25
    cost.passes.note(2, 0.1)
    assert cost.of_pass(4)(2) == 0.25 and cost.of_token(4) == 0.0
    cost.note(4, 0, 0.5)
    assert cost.of_pass(4)(2) == pytest.approx(0.2) and cost.of_token(4) > 0
    cold = DraftCost(0.25)
    cold.note(1, 0, 0.1)
    cold.note_pass(1, 9.0)
    assert cold.of_pass(1)(1) == pytest.approx(0.25)
    cost.token.note(0, 0.001)
    assert cost.of_token(4) == 0.001


def test_answers_go_on_as_long_as_others_did() -> None:
    lengths = AnswerLengths()
    assert lengths.left(0, 10_000) == USUAL_ANSWER and lengths.left(0, 5) == 5
    for _ in range(200):
        lengths.note(20)
    assert 15 < lengths.left(0, 10_000) < 25
    assert 0 < lengths.left(19, 10_000) < 5
