"""What `make test` leaves out of a matrix: never a pair of values."""

from __future__ import annotations

from itertools import combinations, product
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling import FEW, Case, draw, met


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 9))
def test_every_pair_is_met(sizes: list[int], seed: int) -> None:
    cases = [dict(zip("abcde", map(str, each), strict=False)) for each in product(*map(range, sizes))]
    kept = [cases[number] for number in draw(cases, Random(seed))]
    if len(sizes) > 2:
        pairs = {pair for case in cases for pair in combinations(sorted(case.items()), 2)}
        assert pairs == {pair for case in kept for pair in combinations(sorted(case.items()), 2)}
    assert {each for case in cases for each in case.items()} == {each for case in kept for each in case.items()}


def test_much_is_left_out() -> None:
    cases: list[Case] = [dict(zip("abcd", map(str, each), strict=True)) for each in product(range(4), repeat=4)]
    assert len(draw(cases, Random(1))) < 40 < len(cases) == 256


def test_few_cases_are_kept_whole_and_the_draw_is_repeatable() -> None:
    cases: list[Case] = [dict(zip("abc", map(str, each), strict=True)) for each in product(range(2), repeat=3)]
    assert len(cases) < FEW and draw(cases, Random(3)) == set(range(8))
    many = [{**case, "d": str(number)} for case in cases for number in range(5)]
    assert draw(many, Random(3)) == draw(many, Random(3))


def test_one_parameter_keeps_every_value() -> None:
    cases: list[Case] = [{"name": str(number)} for number in range(50)]
    assert draw(cases, Random(1)) == set(range(50))
    assert list(met(cases[0])) == [(("name", "0"),)]
