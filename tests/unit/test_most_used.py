"""Which experts stay in memory: never more than fit, and those that are used."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.offload.weights.most_used import MARGIN, MostUsed

pytestmark = pytest.mark.unit

Turns = list[list[int]]


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(
    st.integers(0, 14), st.integers(1, 5), st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n), max_size=8),
    st.just(n),
)))  # fmt: skip
def test_as_many_as_fit_whatever_is_used(case: tuple[int, int, Turns, int]) -> None:
    fit, most, turns, count = case
    chosen = MostUsed(count, fit)
    kept = set(chosen.begin())
    assert len(kept) == min(fit, count)
    for met in turns:
        pairs = chosen.turn(np.array(met), most)
        assert len(pairs) <= most
        for old, new in pairs:
            assert old in kept and new not in kept, "what is given up was kept, what comes was not"
            assert chosen.uses[new] > MARGIN * chosen.uses[old]
            kept = kept - {old} | {new}
        assert set(np.flatnonzero(chosen.kept)) == kept and len(kept) == min(fit, count)


@given(st.sets(st.integers(0, 19), min_size=5, max_size=5))
def test_those_in_use_are_kept_in_the_end(used: set[int]) -> None:
    chosen = MostUsed(20, 5)
    chosen.begin()
    met = np.array([10 * (index in used) for index in range(20)])
    for _ in range(3):
        chosen.turn(met, 2)
    assert set(np.flatnonzero(chosen.kept)) == used
    assert chosen.turn(met, 20) == [], "nothing changes places once it is so"


def test_what_was_used_long_ago_makes_room() -> None:
    chosen = MostUsed(2, 1)
    assert chosen.begin() == [0]
    chosen.turn(np.array([100, 0]), 1)
    turns = 0
    while not chosen.turn(np.array([0, 10]), 1):
        turns += 1
    assert 1 <= turns < 10


def test_all_layers_have_some_at_first() -> None:
    """Experts are numbered layer by layer: 4 layers of 8, of which 4 fit."""
    assert [index // 8 for index in MostUsed(32, 4).begin()] == [0, 1, 2, 3]
