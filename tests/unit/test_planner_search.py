"""The partition search finds what the calibrated toy model of KV-Runahead says, resumes, and bears noise."""

from __future__ import annotations

import random

import pytest

from headrace.planner.partition import Bounds, cut, even, fractions_of, interpolate
from headrace.planner.partition_search import PartitionSearch
from tests.support.planner_oracles import TABLE_3_SINGLE, B, Toy, toy_fractions

pytestmark = pytest.mark.unit


def test_toy_reproduces_the_single_gpu() -> None:
    for tokens, seconds in TABLE_3_SINGLE.items():
        assert Toy().chain((0, tokens)) == pytest.approx(seconds, abs=0.0125)


def test_two_ranks_at_16k() -> None:
    """The paper's searched split of 16k is 9,728; the toy's optimum is 9,792, within 0.8%."""
    search = PartitionSearch(16384, 2, Toy().chain)
    assert search.run() == (0, 9792, 16384)
    assert Toy().chain((0, 9728, 16384)) / search.best_s < 1.008
    assert search.count < 40


@pytest.mark.parametrize("seed", [(0, 64, 16384), (0, 16320, 16384), (0, 9792, 16384), (0, 9000, 16384)])
def test_two_ranks_from_any_seed(seed: Bounds) -> None:
    assert PartitionSearch(16384, 2, Toy().chain, seed=seed).run() == (0, 9792, 16384)


@pytest.mark.parametrize(("tokens", "first", "seconds"), [(2048, 384, 0.20), (8192, 2560, 1.35), (12288, 4672, 2.45)])
def test_two_ranks_on_a_slow_link(tokens: int, first: int, seconds: float) -> None:
    """Table 3 at 1 GB/s: .21, 1.31 and 2.28 s; the optimum moves to the left as the link gets slower."""
    search = PartitionSearch(tokens, 2, Toy(1e9).chain)
    assert search.run() == (0, first, tokens)
    assert search.best_s == pytest.approx(seconds, abs=0.006)


@pytest.mark.parametrize(("tokens", "first"), [(8192, 4800), (12288, 7296)])
def test_two_ranks_on_a_faster_link(tokens: int, first: int) -> None:
    assert PartitionSearch(tokens, 2, Toy(10e9).chain).run() == (0, first, tokens)


@pytest.mark.parametrize(
    ("tokens", "gather_s", "chain_s", "fractions"),
    [
        (8192, 0.490, 0.367, (0.340, 0.258, 0.215, 0.187)),
        (12288, 0.985, 0.710, (0.354, 0.256, 0.209, 0.180)),
        (16384, 1.646, 1.160, (0.363, 0.255, 0.205, 0.176)),
    ],
)
def test_four_ranks(tokens: int, gather_s: float, chain_s: float, fractions: tuple[float, ...]) -> None:
    """Table 1: gather over chain 1.30, 1.39 and 1.42 on four GPUs."""
    search = PartitionSearch(tokens, 4, Toy().chain, stride=8)
    found = fractions_of(search.run())
    assert Toy().gather(tokens, 4) == pytest.approx(gather_s, abs=6e-4)
    assert search.best_s == pytest.approx(chain_s, rel=0.004)
    assert found == pytest.approx(fractions, abs=0.004)


def test_eight_ranks_from_the_seed_of_a_wrong_model() -> None:
    """1.53 at 16k on eight ranks; tokens move between two shards at a time, since 5^7 points are too many."""
    seed = cut(toy_fractions(16384, 8, b=1.2 * B), 16384)
    search = PartitionSearch(16384, 8, Toy().chain, stride=8, seed=seed)
    search.run()
    assert Toy().gather(16384, 8) / Toy().chain(cut(toy_fractions(16384, 8), 16384)) == pytest.approx(1.53, abs=0.005)
    assert Toy().gather(16384, 8) / search.best_s == pytest.approx(1.53, rel=0.012)
    assert search.best_s < 0.99 * Toy().chain(seed)
    assert search.count < 1000


def test_predicted_fractions_come_close_to_searched_ones() -> None:
    """KVR-P at 12k from entries at 8k and 16k: within 1.5% of KVR-S (the paper: 1.3%)."""
    for ranks in (2, 4):
        entries = {t: fractions_of(PartitionSearch(t, ranks, Toy().chain, stride=16).run()) for t in (8192, 16384)}
        searched = PartitionSearch(12288, ranks, Toy().chain, stride=16)
        searched.run()
        predicted = cut(interpolate(entries, 12288), 12288)
        assert Toy().chain(predicted) / searched.best_s < 1.015
        assert Toy().chain(even(12288, ranks)) / searched.best_s > 1.15  # the test can tell a bad one


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_resumes_where_it_was_interrupted(ranks: int) -> None:
    calls: list[Bounds] = []

    def measure(bounds: Bounds) -> float:
        calls.append(bounds)
        return Toy().chain(bounds)

    whole = PartitionSearch(8192, ranks, measure).run()
    needed = calls.copy()
    calls.clear()
    measured: dict[Bounds, float] = {}
    for progress in PartitionSearch(8192, ranks, measure, measured=measured):
        if progress.measured == 7:
            break
    assert len(measured) == 7
    assert PartitionSearch(8192, ranks, measure, measured=measured).run() == whole
    assert calls == needed and len(set(calls)) == len(calls)


def test_points_of_other_prompts_are_not_taken() -> None:
    measured = {(0, 100, 4096): 1e-9, (0, 64, 128): 1e-9, (0, 64, 128, 8192): 1e-9}
    search = PartitionSearch(8192, 2, Toy().chain, measured=dict(measured))
    with pytest.raises(ValueError, match="nothing measured"):
        _ = search.best
    assert search.run() == PartitionSearch(8192, 2, Toy().chain).run()


@pytest.mark.parametrize("ranks", [2, 4])
def test_noise_costs_no_more_than_its_size(ranks: int) -> None:
    noise = random.Random(5)
    found = PartitionSearch(16384, ranks, lambda b: Toy().chain(b) * (1 + noise.uniform(0, 0.02))).run()
    exact = PartitionSearch(16384, ranks, Toy().chain)
    exact.run()
    assert Toy().chain(found) / exact.best_s < 1.04


def test_progress_and_limits() -> None:
    seen = list(PartitionSearch(4096, 3, Toy().chain))
    assert [p.measured for p in seen] == list(range(1, len(seen) + 1))
    assert [p.best_s for p in seen] == sorted((p.best_s for p in seen), reverse=True)
    assert all(p.bounds[1] % 64 == 0 and p.bounds[2] % 64 == 0 and len(set(p.bounds)) == 4 for p in seen)
    assert PartitionSearch(4096, 1, Toy().chain).run() == (0, 4096)
    assert PartitionSearch(128, 2, Toy().chain).run() == (0, 64, 128)
    with pytest.raises(ValueError, match="at least 256 tokens"):
        PartitionSearch(255, 4, Toy().chain)
    with pytest.raises(ValueError, match="seed must be"):
        PartitionSearch(4096, 2, Toy().chain, seed=(0, 4096))
