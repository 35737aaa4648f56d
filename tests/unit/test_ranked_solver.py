"""A restore over several ranks: the solver against trying every placement, split and strategy, event by event."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.offload.restore.ranked_plan import PlannedPrefill, best_way, planned, told
from headrace.offload.restore.run_costs import StoredRun
from headrace.offload.restore.solver import LEAST_GAIN, Split, predict, restore_split
from headrace.planner.choice import Estimate, choose, estimates, shards_for
from headrace.planner.choice import predict as cost_of
from headrace.planner.machine import ComputeRates, Machine, ModelShape, PieceRate, TierLink
from headrace.planner.profile import Profile
from headrace.planner.shards import Prefill
from headrace.planner.strategy_rates import POINTS, Kind, StrategyRates
from headrace.planner.timeline import Loads
from headrace.strategies import OFFERED
from headrace.types import CHUNK
from tests.support.profiles import profile_of

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
    "fast cores": msgspec.structs.replace(
        MACHINE, linear_flops_s=400e9, attention_flops_s=((16, 100e9), (1024, 400e9))
    ),
}
"""On the last one computing again pays."""
MOST = 2048
NEAR = 0.06
"""How far the closed form may be from the walk of a model of few layers, none of which is like the others."""
BEST = 0.03
"""How much longer than the best walk of all a plan may take."""
TIERS = {"host": PieceRate(0.1e-9, 1e-5), "disk": PieceRate(1e-9, 2e-4)}


def profile_on(
    machine: str, ranks: int, bytes_s: float, shape: ModelShape = SHAPE, uneven: float = 1.0, project_s: float = 4e-6
) -> Profile:
    """Its tiers lie behind links of so many bytes a second; the disk's is `uneven` times as slow."""
    links = tuple(
        TierLink(kind=kind, rate=rate.behind(bytes_s / (uneven if kind == "disk" else 1.0), 0.0))
        for kind, rate in TIERS.items()
    )
    on = msgspec.structs.replace(MACHINES[machine], tiers=links, project=PieceRate(project_s))
    return Profile(on, shape, ranks)


def walked(run: StoredRun, profile: Profile, tokens: int, x: int, closing: str) -> float:
    """The planner's timeline, on which every rank loads and projects its chunks beside what it computes."""
    assert profile.by_strategy is not None
    first, end = run.first * CHUNK, (run.first + run.chunks) * CHUNK
    if tokens == run.chunks:
        return float(profile.prefill(first, run.chunks * CHUNK + run.suffix))
    began = float(profile.prefill(first, tokens * CHUNK))
    places, loads = list(zip(run.ranks, run.tier_of, strict=True)), {}
    given = sum(
        run.kv_bytes / run.layers * profile.together_s_per_byte(tier) for _, tier in places[tokens + x :]
    ) * (len(set(run.ranks)) > 1)  # fmt: skip
    for rank in set(run.ranks):
        x_s, kv_s = (
            sum(float(profile.transfer(tier, mine * size / run.layers, mine))
                for tier in TIERS if (mine := part.count((rank, tier))))
            for part, size in ((places[tokens : tokens + x], run.x_bytes or 0.0), (places[tokens + x :], run.kv_bytes))
        )  # fmt: skip
        projected = sum(owner == rank for owner, _ in places[tokens : tokens + x])
        every = [max(kv_s, given)] * run.layers
        loads[rank] = Loads([x_s - began] + [x_s] * (run.layers - 1), every, float(profile.project(projected * CHUNK)))
    lies = [*run.lies, *[0.0] * (profile.ranks - len(run.lies))]
    prefill = Prefill(profile.machine, profile.shape, profile.ranks, run.suffix, end, lies, search=False)
    bounds = shards_for(closing, prefill).bounds
    machine, shape = profile.machine, profile.shape
    return began + cost_of(closing, machine, shape, profile.ranks, bounds, end, lies, loads).ttft_s


@st.composite
def ways(draw: st.DrawFn, ranks: int) -> list[StoredRun]:
    """All on one rank, and two chunks by two chunks round the ranks."""
    chunks, first = draw(st.integers(1, 5)), draw(st.integers(0, 3))
    tiers = draw(st.just("host") | st.tuples(*[st.sampled_from(["host", "disk"])] * chunks))
    one = StoredRun(
        first=first, chunks=chunks, suffix=draw(st.sampled_from([1, 40, 300])), kv_bytes=CHUNK * KV,
        layers=SHAPE.layers,
        x_bytes=draw(st.sampled_from([None, CHUNK * KV / 2])), tiers=tiers,
        ranks=(draw(st.integers(0, ranks - 1)),) * chunks, held=(first,) + (0,) * (ranks - 1),
    )  # fmt: skip
    return [one, replace(one, ranks=tuple(chunk // 2 % ranks for chunk in range(chunks)))]


KV = SHAPE.kv_bytes * SHAPE.layers
case = st.integers(2, 4).flatmap(lambda ranks: st.tuples(st.just(ranks), ways(ranks)))


def every_split(run: StoredRun) -> list[tuple[int, int]]:
    most = run.chunks if run.x_bytes is not None else 0
    return [(tokens, x) for tokens in range(run.chunks + 1) for x in range(min(most, run.chunks - tokens) + 1)]


ONE = StoredRun(
    first=0, chunks=4, suffix=1, kv_bytes=CHUNK * KV, x_bytes=CHUNK * KV / 2, layers=SHAPE.layers, tiers="host",
    ranks=(0,) * 4, held=(0, 0),
)  # fmt: skip
GATHERED = 2, [ONE, replace(ONE, ranks=(0, 0, 1, 1))]
"""One rank projects and the other, which has the row, computes meanwhile."""


@settings(max_examples=30, deadline=None, derandomize=True)
@example(given=GATHERED, machine="apart", bytes_s=1e8, uneven=1.0, project_s=4e-6, shared=True)
@given(case, st.sampled_from(sorted(MACHINES)), st.sampled_from([1e7, 1e8, 1e9]), st.sampled_from([1.0, 4.0]),
       st.sampled_from([1e-6, 4e-6, 2e-5]), st.booleans())  # fmt: skip
def test_the_plan_is_the_best_of_all(
    given: tuple[int, list[StoredRun]], machine: str, bytes_s: float, uneven: float, project_s: float, shared: bool
) -> None:
    """Of every placement, split and strategy, each walked on the timeline. One rank: test_restore_solver.py."""
    ranks, runs = given
    profile = profile_on(machine, ranks, bytes_s, uneven=uneven, project_s=project_s)
    if shared:
        profile.observe_together("host", [(1e6, 0.5)] * 2)
    chosen = [(restore_split(run, profile, MOST, least_gain=0.0, caution=0.0, tie=0.0), run) for run in runs]
    split, run = chosen[best_way(chosen)]
    every = [
        walked(way, profile, *at, each)
        for way in runs
        for at in every_split(way)
        for each in estimates_of(profile, way)
    ]
    taken = walked(run, profile, split.tokens, split.x, split.closing or "single")
    assert split.predicted_s == pytest.approx(taken, rel=NEAR)
    assert taken <= min(every) / (1 - LEAST_GAIN) * (1 + BEST)


def estimates_of(profile: Profile, run: StoredRun) -> Collection[str]:
    return [each.strategy for each in profile.closings(run.suffix, (run.first + run.chunks) * CHUNK, run.lies, {0})]


@settings(max_examples=12, deadline=None)
@given(case, st.sampled_from(sorted(MACHINES)))
def test_a_faster_link_never_makes_it_slower(given: tuple[int, list[StoredRun]], machine: str) -> None:
    ranks, runs = given
    for run in runs:
        times = [
            restore_split(
                run, profile_on(machine, ranks, bytes_s), MOST, least_gain=0.0, caution=0.0, tie=0.0
            ).predicted_s
            for bytes_s in (1e6, 1e8, 1e10)
        ]
        assert times == sorted(times, reverse=True)


def test_two_ranks_load_in_half_the_time() -> None:
    """Where loading takes as long as computing on the better end, both and both ranks together gain."""
    run = StoredRun(first=0, chunks=128, suffix=1, kv_bytes=CHUNK * SHAPE.kv_bytes * SHAPE.layers, x_bytes=None,
                    layers=SHAPE.layers, tiers="disk", ranks=(0,) * 128, held=(0, 0))  # fmt: skip
    spread = replace(run, ranks=tuple(chunk // 32 % 2 for chunk in range(128)))
    all_s = restore_split(run, profile_on("apart", 2, 1e2), MOST).predicted_s
    profile = profile_on("apart", 2, 128 * run.kv_bytes / all_s)
    one, several = restore_split(run, profile, MOST), restore_split(spread, profile, MOST)
    assert predict(run, profile, 0, 0, MOST, one.closing).seconds == pytest.approx(all_s, rel=0.1)
    assert one.predicted_s < 0.65 * all_s and several.predicted_s < 0.45 * all_s


def test_each_owner_projects_its_own_chunks() -> None:
    """All at the same time: two ranks take half the seconds of one, on links where projecting is what is waited for."""
    one = StoredRun(first=0, chunks=64, suffix=1, kv_bytes=CHUNK * KV, x_bytes=CHUNK * KV / 8, layers=SHAPE.layers,
                    tiers="host", ranks=(0,) * 64, held=(0, 0))  # fmt: skip
    spread = replace(one, ranks=tuple(chunk % 2 for chunk in range(64)))
    profile = profile_on("apart", 2, 1e10)
    alone, both = (predict(run, profile, 0, 64, MOST, "single").seconds for run in (one, spread))
    a_layer = float(profile.project(np.array(64.0 * CHUNK)))
    assert alone > 0.9 * SHAPE.layers * a_layer
    assert both - alone == pytest.approx(-SHAPE.layers * a_layer / 2, rel=0.15)


def test_curves_are_those_of_the_planner() -> None:
    for machine in MACHINES.values():
        found = Profile(machine, SHAPE, 2).by_strategy
        assert found is not None
        for count, cached in POINTS:
            for name, each in estimates(Prefill(machine, SHAPE, 2, count, cached)).items():
                if name in found.by_strategy(cached, count):
                    assert float(found.by_strategy(cached, count)[name]) == pytest.approx(each.seconds, rel=0.35)
        assert float(found.seconds(0, 0)) == 0.0
        several = found.seconds(np.array([0.0, 64.0]), np.array([512.0, 64.0]))
        assert several == pytest.approx([float(found.seconds(0, 512)), float(found.seconds(64, 64))])


@pytest.mark.parametrize(("new", "cached"), [(500, 0), (1, 4096), (3000, 4096)])
@pytest.mark.parametrize("layers", [4, 24])
def test_estimates_are_what_the_planner_predicts(new: int, cached: int, layers: int) -> None:
    """Without a search, of models as deep as one likes."""
    shape = msgspec.structs.replace(SHAPE, layers=layers)
    for machine in MACHINES.values():
        prefill = Prefill(machine, shape, 2, new, cached, (1, 3))
        found = {name: each.seconds for name, each in estimates(prefill).items()}
        assert found == pytest.approx(dict(choose(prefill).predicted_s), rel=0.06)
    assert set(estimates(Prefill(MACHINE, shape, 2, new), allowed=("ring-q",))) == {"ring-kv"}
    assert set(estimates(Prefill(MACHINE, shape, 1, new))) == {"single"}


@pytest.mark.parametrize("machine", sorted(MACHINES))
@pytest.mark.parametrize("new", [1, 300, 2048])
def test_the_last_layer_that_arrives_is_walked_to_the_end(machine: str, new: int) -> None:
    """Loads that take longer than all else: the end follows the last of them, by as much in a deep model."""
    deep, lies = msgspec.structs.replace(SHAPE, layers=24), (4096.0, 2048.0)
    prefill = Prefill(MACHINES[machine], deep, 2, new, 6144, lies, search=False)
    for name, found in estimates(prefill, loads=(0, 1)).items():
        bounds, late = shards_for(name, prefill).bounds, 3 * found.seconds
        for rank in (0, 1):
            loads = {rank: Loads((0.0,) * 24, (late,) * 24)}
            walk = cost_of(name, prefill.machine, deep, 2, bounds, 6144, lies, loads).ttft_s
            assert walk == pytest.approx(24 * late + found.paces[rank].last_s, rel=1e-6)
            assert found.paces[rank].last_s < found.seconds


def flat(new: int, cached: int, lies: Sequence[float], loads: Collection[int]) -> Mapping[str, Estimate]:
    """Every strategy takes as long; one that needs cached tokens has none at first."""
    return {name: Estimate(1e-3 * new, {}) for name in OFFERED if cached or name != "ring-q"}


def closings(found: StrategyRates, new: int, cached: int, lies: Sequence[float]) -> list[tuple[str, float, float]]:
    return [each[:3] for each in found.closings(new, cached, lies, {0})]


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


def test_what_is_seen_moves_the_choice_too() -> None:
    """The planner's choice and the solver's plan go by one profile."""
    profile = profile_on("apart", 2, 1e9)
    before = profile.choose(2048, 0, (0, 0), OFFERED)
    for _ in range(12):
        profile.observe_prefill(0, 2048, 5 * before.predicted_s[before.strategy], before.strategy)
    after = profile.choose(2048, 0, (0, 0), OFFERED)
    assert after.predicted_s[before.strategy] == pytest.approx(5 * before.predicted_s[before.strategy], rel=0.4)
    assert after.strategy != before.strategy
    assert profile.choose(64, 0, (0, 0), OFFERED).predicted_s["chain"] == pytest.approx(
        profile_on("apart", 2, 1e9).choose(64, 0, (0, 0), OFFERED).predicted_s["chain"]
    ), "a short step is another matter"


@pytest.mark.parametrize(("waited_s", "scales"), [(0.9, False), (0.1, True)])
def test_a_closing_step_that_took_longer(waited_s: float, scales: bool) -> None:
    """Laid on what arrives meanwhile where that is what was waited for, else on the strategy."""
    found = StrategyRates(flat, 2)
    assert closings(found, 1000, 64, (64, 0))[0] == ("single", 1.0, 0.0)
    for _ in range(20):
        (single,) = [each for each in found.closings(1000, 64, (64, 0), {0}) if each.strategy == "single"]
        found.observe_closing(Kind("single", True), 1.5, single.seconds + single.beside_s, waited_s, single.seconds)
    (single,) = [each for each in found.closings(1000, 64, (64, 0), {0}) if each.strategy == "single"]
    assert single.seconds + single.beside_s == pytest.approx(1.5, rel=0.02)
    assert (single.beside_s == 0) is scales
    assert (found.closings(1000, 64, (64, 0), {0})[0].strategy == "single") is not scales
    spread = closings(found, 1000, 128, (64, 64))
    assert spread[0] == ("single", 1.0, 0.0), "what lies on several ranks takes a time of its own"


def test_ranks_that_hold_up_each_other() -> None:
    """What is slow together says nothing of one alone; once it is fast again it does."""
    profile = profile_on("apart", 2, 1e9)
    alone = float(profile.transfer("disk", 1e8))
    for _ in range(4):
        profile.observe_together("disk", [(1e8, 2 * alone), (1e8, 1.9 * alone)])
    assert profile.together_s_per_byte("disk") == pytest.approx(2 * alone / 2e8)
    assert float(profile.transfer("disk", 1e8)) == pytest.approx(alone)
    assert profile.as_dict()["disk_together_bytes_s"] == pytest.approx(1e8 / alone)
    for _ in range(4):
        profile.observe_together("disk", [(1e8, 0.8 * alone), (1e8, 0.8 * alone)])
    assert profile.together_s_per_byte("disk") == 0.0
    assert float(profile.transfer("disk", 1e8)) == pytest.approx(0.8 * alone, rel=0.05)
    profile.observe_together("disk", [])


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
    profile = profile_on("apart", 2, 1e9)
    found = planned(Split(32, 0, 96, 0.4, "", "ring-q", 1.0), RUN, profile)
    assert found is not None and profile.by_strategy is not None
    assert (found.until, found.at, found.closing) == (34 * CHUNK, 130 * CHUNK, "ring-q")
    assert found.front == profile.by_strategy.best(2 * CHUNK, 32 * CHUNK)
    assert [found.strategy(at * CHUNK) for at in (2, 33, 34, 130, 131)] == [found.front, found.front, "", "ring-q", ""]
    whole = planned(Split(128, 0, 0, 1.0, "", "", 1.0), RUN, profile)
    assert whole is not None and whole.strategy(129 * CHUNK) == whole.front and whole.strategy(130 * CHUNK) == ""
    assert planned(Split(0, 0, 128, 0.1, ""), RUN, profile_of(4, (0.0, 1e-5, 0.0), {})) is None


def test_a_few_tokens_take_a_time_of_their_own() -> None:
    """More or less than predicted, whether chunks are waited for or not; one odd restore counts little."""
    found = StrategyRates(flat, 2)
    for seconds in (0.5, 0.02, 0.02, 0.02, 0.02, 0.02):
        (single,) = [each for each in found.closings(100, 64, (64, 0), {0}) if each.strategy == "single"]
        kind, now = Kind("single", False), single.seconds + single.beside_s
        found.observe_closing(kind, seconds, now, 0.0, single.seconds)
    (single,) = [each for each in found.closings(100, 64, (64, 0), {0}) if each.strategy == "single"]
    assert single.seconds == pytest.approx(0.1) and single.beside_s == pytest.approx(-0.08, abs=0.01)
    assert found.as_dict()["beside_single_few_s"] == single.beside_s


def test_steps_are_seen_through_the_rates() -> None:
    """Those after cached tokens say nothing: nobody tells where these lay."""
    profile = profile_on("apart", 2, 1e9)
    before = float(profile.prefill(0, 2048))
    for start, slower in ((4096, False), (0, True)):
        for name in OFFERED:
            for _ in range(12):
                profile.observe_prefill(start, 2048, 3 * before, name)
        assert (float(profile.prefill(0, 2048)) > 2 * before) is slower
