"""Cuts of a prompt and what they cost: the worked examples and equations 4 to 7 of KV-Runahead, zigzag areas."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.planner.partition import (
    align,
    bounds_of,
    causal_pairs,
    cut,
    even,
    fractions_of,
    interpolate,
    sizes_of,
    to_sizes,
    zigzag,
    zigzag_ranks,
)
from tests.support.planner_oracles import chain_entries, chain_products, gather_entries, gather_products

pytestmark = pytest.mark.unit


def test_nine_tokens_on_three_ranks() -> None:
    """Figures 4 and 5: 27 against 21 products at most, 36 against 22 K and V entries."""
    gathered, chained = even(9, 3), bounds_of((4, 3, 2))
    assert gather_products(gathered) == (27, 27, 27) and 2 * gather_entries(gathered) == 36
    assert chain_products(chained) == (16, 21, 18) and 2 * chain_entries(chained) == 22
    every = [(0, *inner, 9) for inner in combinations(range(1, 9), 2)]
    least = min(max(chain_products(bounds)) for bounds in every)
    assert [sizes_of(bounds) for bounds in every if max(chain_products(bounds)) == least] == [(4, 3, 2)]
    assert [b for b in every if max(chain_products(b)) <= 21 and 2 * chain_entries(b) <= 22] == [chained]


@given(st.integers(1, 64), st.integers(1, 5000))
def test_equations_4_to_7(ranks: int, block: int) -> None:
    tokens = ranks * block
    assert gather_entries(even(tokens, ranks)) == (ranks - 1) * tokens
    assert 2 * chain_entries(even(tokens, ranks)) == (ranks - 1) * tokens


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 1000))
def test_entries_of_any_partition(sizes: list[int], start: int) -> None:
    bounds = bounds_of(sizes, start)
    assert gather_entries(bounds) == (len(sizes) - 1) * sum(sizes)
    assert chain_entries(bounds) == sum(sum(sizes[:i]) for i in range(1, len(sizes)))
    assert sizes_of(bounds) == tuple(sizes)


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 300))
def test_zigzag_areas_are_equal(ranks: int, size: int, start: int) -> None:
    bounds = zigzag(2 * ranks * size, ranks, start=start)
    area = [0] * ranks
    for rank, rows in zip(zigzag_ranks(ranks), pairwise(bounds), strict=True):
        area[rank] += causal_pairs(rows, (start, bounds[-1]))
    diagonal = size * (size + 1)  # the rows' own halves: (c^2 + c) / 2 twice; the paper counts c^2
    assert area == [(2 * ranks - 1) * size * size + diagonal] * ranks


@given(*[st.integers(0, 30)] * 4)
def test_causal_pairs_counts(r0: int, rows: int, k0: int, keys: int) -> None:
    counted = sum(key <= row for row in range(r0, r0 + rows) for key in range(k0, k0 + keys))
    assert causal_pairs((r0, r0 + rows), (k0, k0 + keys)) == counted


def test_even_and_largest_remainder() -> None:
    assert even(11, 4) == (0, 3, 6, 9, 11)  # table 4 of KV-Runahead: TSP 3, 3, 3, 2
    assert to_sizes((0.45, 0.3, 0.15, 0.1), 11) == (5, 3, 2, 1)
    assert to_sizes((0.999, 0.0005, 0.0005), 3) == (1, 1, 1)
    assert to_sizes((1, 1, 1), 2) == (1, 1, 0)
    assert to_sizes((1, 0), 0) == (0, 0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9).filter(lambda x: sum(x) > 1e-6), st.integers(0, 10**6))
def test_sizes_sum_exactly_and_stay_near(fractions: list[float], tokens: int) -> None:
    sizes = to_sizes(fractions, tokens)
    assert sum(sizes) == tokens and min(sizes) >= (1 if tokens >= len(sizes) else 0)
    wanted = [tokens * x / sum(fractions) for x in fractions]
    assert all(abs(size - x) < len(sizes) + 1 for size, x in zip(sizes, wanted, strict=True))


@pytest.mark.parametrize("fractions", [(), (0.0, 0.0), (1.0, -0.1), (float("nan"), 1.0), (float("inf"), 1.0)])
def test_bad_fractions(fractions: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="fractions must be"):
        to_sizes(fractions, 10)
    with pytest.raises(ValueError, match="no tokens"):
        fractions_of((5, 5))


def test_interpolation_is_linear_and_clamped() -> None:
    """Fractions as KV-Runahead publishes them, for 8k and 12k; asked at 10k."""
    entries = {8192: (0.340, 0.258, 0.215, 0.187), 12288: (0.354, 0.256, 0.209, 0.181)}
    assert interpolate(entries, 10240) == pytest.approx((0.347, 0.257, 0.212, 0.184), abs=1e-9)
    assert interpolate(entries, 9216) == pytest.approx((0.3435, 0.2575, 0.2135, 0.1855), abs=1e-9)
    assert interpolate(entries, 100) == pytest.approx(entries[8192])
    assert interpolate(entries, 8192) == pytest.approx(entries[8192])
    assert interpolate(entries, 12288) == pytest.approx(entries[12288])
    assert interpolate(entries, 10**6) == pytest.approx(entries[12288])
    with pytest.raises(ValueError, match="headrace tune"):
        interpolate({}, 5)
    with pytest.raises(ValueError, match="different numbers of ranks"):
        interpolate({1: (1.0,), 3: (0.5, 0.5)}, 2)


def test_align() -> None:
    assert align((0, 95, 96, 200), 64) == (0, 64, 128, 200)
    assert align((100, 101, 130, 140), 64) == (100, 128, 128, 140)
    assert align((0, 1, 2, 100), 64) == (0, 0, 0, 100)
    assert cut((0.6, 0.4), 16384, 64, 2048) == (64, 10240, 16448)
    with pytest.raises(ValueError, match="unit"):
        align((0, 1), 0)


@given(st.lists(st.integers(0, 9999), min_size=2, max_size=9), st.sampled_from([1, 64, 2048]))
def test_align_keeps_order_and_ends(points: list[int], unit: int) -> None:
    bounds = sorted(points)
    aligned = align(bounds, unit)
    assert list(aligned) == sorted(aligned) and (aligned[0], aligned[-1]) == (bounds[0], bounds[-1])
    for before, after in zip(bounds[1:-1], aligned[1:-1], strict=True):
        assert after % unit == 0 or after in (bounds[0], bounds[-1])
        assert abs(after - before) <= unit // 2
