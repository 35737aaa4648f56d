"""A restore over several ranks: the solver against trying every placement, split and strategy, event by event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.offload.restore.ranked_plan import PlannedPrefill, best_way, planned, told
from headrace.offload.restore.run_costs import StoredRun
from headrace.offload.restore.solver import LEAST_GAIN, Split, predict, restore_split
from headrace.planner.choice import choose, estimates
from headrace.planner.estimators import LinearRate, PrefillRate
from headrace.planner.machine import ComputeRates, Machine, ModelShape
from headrace.planner.profile import Rates
from headrace.planner.shards import Prefill
from headrace.planner.strategy_rates import POINTS, Kind, StrategyRates
from headrace.strategies import OFFERED
from headrace.types import CHUNK

pytestmark = pytest.mark.unit

SHAPE = ModelShape(layers=4, hidden=512, heads=8, kv_heads=2, head_dim=64, mlp=1024, vocab=1000)
MACHINE = Machine(
    name="one", cores=1, isa="any", date="", linear_flops_s=20e9, attention_flops_s=((16, 5e9), (1024, 20e9)),
    memory_bytes_s=5e9, link_bytes_s=2e9, latency_s=1e-4, link_cpu_s_per_byte=0.2e-9,
)  # fmt: skip
ALONE = ComputeRates(cores=2, linear_flops_s=39e9, attention_flops_s=((16, 9e9), (1024, 38e9)), memory_bytes_s=6e9)
MACHINES = {
    "apart": MACHINE,
    "slow links": msgspec.structs.replace(MACHINE, link_bytes_s=0.05e9),
    "one host": msgspec.structs.replace(MACHINE, one_engine=ALONE),
}
MOST = 2048


@lru_cache(maxsize=256)
def predicted(machine: str, ranks: int, new: int, cached: int, lies: tuple[float, ...]) -> Mapping[str, float]:
    return estimates(Prefill(MACHINES[machine], SHAPE, ranks, new, cached, lies))


def strategies(machine: str, ranks: int) -> StrategyRates:
    return StrategyRates(lambda new, cached, lies: predicted(machine, ranks, new, cached, tuple(lies)), ranks)


def rates_of(machine: str, ranks: int, bytes_s: float) -> Rates:
    tiers = {"host": LinearRate(0.1e-9, 1e-5), "disk": LinearRate(1e-9, 2e-4)}
    found = Rates(SHAPE.layers, LinearRate(1e-6), PrefillRate(0.0, 1e-5, 0.0), tiers).behind(bytes_s)
    found.by_strategy = strategies(machine, ranks)
    return found


def simulate(run: StoredRun, rates: Rates, tokens: int, closing: str) -> float:
    """Every rank's stream layer by layer, all beside the engine, which takes the layers in turn."""
    assert rates.by_strategy is not None
    first, new = run.first * CHUNK, run.chunks * CHUNK + run.suffix
    if tokens == run.chunks:
        return min(float(each) for each in rates.by_strategy.by_strategy(first, new).values())
    by_strategy = rates.by_strategy.closings(run.suffix, first + run.chunks * CHUNK, run.lies(rates.by_strategy.ranks))
    (step,) = [each for each in by_strategy if each.strategy == closing]
    clock = 0.0
    if tokens:
        clock = min(float(each) for each in rates.by_strategy.by_strategy(first, tokens * CHUNK).values())
    streams = dict.fromkeys(run.ranks[tokens:], 0.0)
    loads = {
        place: [(r, t) for r, t in zip(run.ranks, run.tier_of, strict=True)][tokens:].count(place)
        for place in set(zip(run.ranks, run.tier_of, strict=True))
    }
    whole = 0.0
    for _ in range(run.layers):
        for (rank, tier), count in loads.items():
            if count:
                size = count * run.kv_bytes / run.layers
                streams[rank] += float(rates.transfer(tier, size, count))
                whole += size * rates.together_s_per_byte(tier)
        clock = max(clock, *streams.values(), whole if len({rank for rank, _ in loads}) > 1 else 0.0)
        clock += step.seconds / run.layers
    return clock + step.beside_s


@st.composite
def ways(draw: st.DrawFn, ranks: int) -> list[StoredRun]:
    """All on one rank, and two chunks by two chunks round the ranks."""
    chunks, first = draw(st.integers(1, 8)), draw(st.integers(0, 3))
    tiers = draw(st.just("host") | st.tuples(*[st.sampled_from(["host", "disk"])] * chunks))
    one = StoredRun(
        first=first, chunks=chunks, suffix=draw(st.sampled_from([1, 40, 300])), kv_bytes=2 * CHUNK * SHAPE.kv_bytes,
        x_bytes=None, layers=SHAPE.layers, tiers=tiers, ranks=(draw(st.integers(0, ranks - 1)),) * chunks,
        held=(first,) + (0,) * (ranks - 1),
    )  # fmt: skip
    return [one, replace(one, ranks=tuple(chunk // 2 % ranks for chunk in range(chunks)))]


case = st.integers(1, 3).flatmap(lambda ranks: st.tuples(st.just(ranks), ways(ranks)))


@settings(max_examples=60, deadline=None)
@given(case, st.sampled_from(sorted(MACHINES)), st.sampled_from([1e7, 1e8, 1e9]), st.booleans())
def test_the_plan_is_the_best_of_all(
    given: tuple[int, list[StoredRun]], machine: str, bytes_s: float, shared: bool
) -> None:
    ranks, runs = given
    rates = rates_of(machine, ranks, bytes_s)
    if shared:
        rates.observe_together("host", [(1e6, 0.5)] * 2)
        assert rates.together_s_per_byte("host") == 0.25e-6
    chosen = [(restore_split(run, rates, MOST, least_gain=0.0, caution=0.0, tie=0.0), run) for run in runs]
    split, run = chosen[best_way(chosen)]
    every = {
        (at, tokens, each.strategy): simulate(way, rates, tokens, each.strategy)
        for at, way in enumerate(runs)
        for tokens in range(way.chunks + 1)
        for each in rates.closings(way, way.suffix)
    }
    closing = split.closing or rates.closings(run, run.suffix)[0].strategy
    assert split.predicted_s == pytest.approx(simulate(run, rates, split.tokens, closing))
    assert split.predicted_s <= min(every.values()) / (1 - LEAST_GAIN) * (1 + 1e-9)
    for tokens in range(run.chunks):
        found = predict(run, rates, tokens, 0, MOST, closing).seconds
        assert found == pytest.approx(simulate(run, rates, tokens, closing))


@settings(max_examples=30, deadline=None)
@given(case, st.sampled_from(sorted(MACHINES)))
def test_a_faster_link_never_makes_it_slower(given: tuple[int, list[StoredRun]], machine: str) -> None:
    ranks, runs = given
    for run in runs:
        times = [
            restore_split(
                run, rates_of(machine, ranks, bytes_s), MOST, least_gain=0.0, caution=0.0, tie=0.0
            ).predicted_s
            for bytes_s in (1e6, 1e7, 1e8, 1e9, 1e10)
        ]
        assert times == sorted(times, reverse=True)


def test_two_ranks_load_in_half_the_time() -> None:
    """Where loading takes as long as computing on the better end, both and both ranks together gain."""
    run = StoredRun(first=0, chunks=128, suffix=1, kv_bytes=CHUNK * SHAPE.kv_bytes * SHAPE.layers, x_bytes=None,
                    layers=SHAPE.layers, tiers="disk", ranks=(0,) * 128, held=(0, 0))  # fmt: skip
    spread = replace(run, ranks=tuple(chunk // 32 % 2 for chunk in range(128)))
    all_s = restore_split(run, rates_of("apart", 2, 1e2), MOST).predicted_s
    rates = rates_of("apart", 2, 128 * run.kv_bytes / all_s)
    one, several = restore_split(run, rates, MOST), restore_split(spread, rates, MOST)
    assert predict(run, rates, 0, 0, MOST, one.closing).seconds == pytest.approx(all_s, rel=0.1)
    assert one.predicted_s < 0.65 * all_s and several.predicted_s < 0.45 * all_s


def test_curves_are_those_of_the_planner() -> None:
    for machine in MACHINES:
        found = strategies(machine, 2)
        for count, cached in POINTS:
            for name, seconds in predicted(machine, 2, count, cached, (cached / 2, cached / 2)).items():
                if name in found.by_strategy(cached, count):
                    assert float(found.by_strategy(cached, count)[name]) == pytest.approx(seconds, rel=0.35)
        assert float(found.seconds(0, 0)) == 0.0
        several = found.seconds(np.array([0.0, 64.0]), np.array([512.0, 64.0]))
        assert several == pytest.approx([float(found.seconds(0, 512)), float(found.seconds(64, 64))])


@pytest.mark.parametrize(("new", "cached"), [(500, 0), (1, 4096), (3000, 4096)])
@pytest.mark.parametrize("layers", [4, 24])
def test_estimates_are_what_the_planner_predicts(new: int, cached: int, layers: int) -> None:
    """Without a search, of models as deep as one likes."""
    shape = msgspec.structs.replace(SHAPE, layers=layers)
    for machine in MACHINES.values():
        exact = choose(Prefill(machine, shape, 2, new, cached, (1, 3))).predicted_s
        found = estimates(Prefill(machine, shape, 2, new, cached, (1, 3)))
        assert found == pytest.approx(dict(exact), rel=0.06)
    assert set(estimates(Prefill(MACHINE, shape, 2, new, 0), allowed=("ring-q",))) == {"ring-kv"}
    assert set(estimates(Prefill(MACHINE, shape, 1, new, 0))) == {"single"}


def flat(new: int, cached: int, lies: Sequence[float]) -> Mapping[str, float]:
    """Every strategy takes as long; one that needs cached tokens has none at first."""
    return {name: 1e-3 * new for name in OFFERED if cached or name != "ring-q"}


def test_what_is_seen_moves_the_strategy_that_was_seen() -> None:
    found = StrategyRates(flat, 2)
    assert found.best(0, 2048) == "single" and set(found.by_strategy(0, 1)) == set(OFFERED) - {"ring-q"}
    for _ in range(12):
        found.observe("single", 0, 2048, 4.096)
        found.observe("ring-q", 0, 2048, 1.0)  # of no prompt that comes first
    assert float(found.by_strategy(0, 2048)["single"]) == pytest.approx(4.096, rel=0.05)
    assert float(found.by_strategy(0, 2048)["chain"]) == pytest.approx(2.048)
    assert float(found.by_strategy(0, 64)["single"]) == pytest.approx(0.064), "a short step is another matter"
    assert found.best(0, 2048) != "single" and found.best(0, 64) == "single"
    assert "prefill_single_many" in found.as_dict()


@pytest.mark.parametrize(("waited_s", "scales"), [(0.9, False), (0.1, True)])
def test_a_closing_step_that_took_longer(waited_s: float, scales: bool) -> None:
    """Laid on what arrives meanwhile where that is what was waited for, else on the strategy."""
    found = StrategyRates(flat, 2)
    assert found.closings(1000, 64, (64, 0))[0] == ("single", 1.0, 0.0)
    for _ in range(20):
        (single,) = [each for each in found.closings(1000, 64, (64, 0)) if each.strategy == "single"]
        found.observe_closing(Kind("single", True), 1.5, single.seconds + single.beside_s, waited_s, single.seconds)
    (single,) = [each for each in found.closings(1000, 64, (64, 0)) if each.strategy == "single"]
    assert single.seconds + single.beside_s == pytest.approx(1.5, rel=0.02)
    assert (single.beside_s == 0) is scales
    assert (found.closings(1000, 64, (64, 0))[0].strategy == "single") is not scales
    spread = found.closings(1000, 128, (64, 64))
    assert spread[0] == ("single", 1.0, 0.0), "what lies on several ranks takes a time of its own"


def test_ranks_that_hold_up_each_other() -> None:
    """What is slow together says nothing of one alone; once it is fast again it does."""
    rates = rates_of("apart", 2, 1e9)
    alone = float(rates.transfer("disk", 1e8))
    for _ in range(4):
        rates.observe_together("disk", [(1e8, 2 * alone), (1e8, 1.9 * alone)])
    assert rates.together_s_per_byte("disk") == pytest.approx(2 * alone / 2e8)
    assert float(rates.transfer("disk", 1e8)) == pytest.approx(alone)
    assert rates.as_dict()["disk_together_bytes_s"] == pytest.approx(1e8 / alone)
    for _ in range(4):
        rates.observe_together("disk", [(1e8, 0.8 * alone), (1e8, 0.8 * alone)])
    assert rates.together_s_per_byte("disk") == 0.0
    assert float(rates.transfer("disk", 1e8)) == pytest.approx(0.8 * alone, rel=0.05)
    rates.observe_together("disk", [])


RUN = StoredRun(first=2, chunks=128, suffix=30, kv_bytes=1.0, x_bytes=None, layers=4,
                tiers=("host",) * 32 + ("disk",) * 96, ranks=(0,) * 64 + (1,) * 64)  # fmt: skip


def test_what_is_told() -> None:
    plan = PlannedPrefill(34 * CHUNK, "chain", 130 * CHUNK, "ring-q")
    split = told(Split(32, 0, 96, 0.412, "", "ring-q", 1.09), RUN, plan, 0.75)
    assert split.reason == (
        "load 96 chunks on 2 ranks from disk, recompute 32 by chain, rest by ring-q: 0.41 s; "
        "one rank restoring 0.75, all recomputing 1.09"
    )
    assert told(Split(0, 0, 128, 0.05, "", "single", 1.0), RUN, plan, None).reason == (
        "load 128 chunks on 2 ranks from disk and host, rest by ring-q: 0.05 s; all recomputing 1.00"
    )
    whole = PlannedPrefill(130 * CHUNK, "ring-kv", 130 * CHUNK, "")
    assert told(Split(128, 0, 0, 1.09, "", "", 1.09), RUN, whole, None).reason == "recompute 128 by ring-kv: 1.09 s"


def test_strategies_of_a_plan() -> None:
    rates = rates_of("apart", 2, 1e9)
    found = planned(Split(32, 0, 96, 0.4, "", "ring-q", 1.0), RUN, rates)
    assert found is not None and rates.by_strategy is not None
    assert (found.until, found.at, found.closing) == (34 * CHUNK, 130 * CHUNK, "ring-q")
    assert found.front == rates.by_strategy.best(2 * CHUNK, 32 * CHUNK)
    assert [found.strategy(at * CHUNK) for at in (2, 33, 34, 130, 131)] == [found.front, found.front, "", "ring-q", ""]
    whole = planned(Split(128, 0, 0, 1.0, "", "", 1.0), RUN, rates)
    assert whole is not None and whole.strategy(129 * CHUNK) == whole.front and whole.strategy(130 * CHUNK) == ""
    assert planned(Split(0, 0, 128, 0.1, ""), RUN, Rates(4, LinearRate(1e-6), PrefillRate(0.0, 1e-5, 0.0), {})) is None


def test_a_few_tokens_take_a_time_of_their_own() -> None:
    """More or less than predicted, whether chunks are waited for or not; one odd restore counts little."""
    found = StrategyRates(flat, 2)
    for seconds in (0.5, 0.02, 0.02, 0.02, 0.02, 0.02):
        (single,) = [each for each in found.closings(100, 64, (64, 0)) if each.strategy == "single"]
        kind, now = Kind("single", False), single.seconds + single.beside_s
        found.observe_closing(kind, seconds, now, 0.0, single.seconds)
    (single,) = [each for each in found.closings(100, 64, (64, 0)) if each.strategy == "single"]
    assert single.seconds == pytest.approx(0.1) and single.beside_s == pytest.approx(-0.08, abs=0.01)
    assert found.as_dict()["beside_single_few_s"] == single.beside_s


def test_steps_are_seen_through_the_rates() -> None:
    """Those after cached tokens say nothing: nobody tells where these lay."""
    rates = rates_of("apart", 2, 1e9)
    before = float(rates.prefill(0, 2048))
    for start, slower in ((4096, False), (0, True)):
        for name in OFFERED:
            for _ in range(12):
                rates.observe_prefill(start, 2048, 3 * before, name)
        assert (float(rates.prefill(0, 2048)) > 2 * before) is slower
