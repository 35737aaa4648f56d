"""The choice of a strategy: the paper's table 4 as an oracle of the rules, and the cost rule's own promises."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.planner.choice import choose, one_engine_s, predict, shards_for
from headrace.planner.heuristic import (
    Heuristic,
    RingRates,
    algorithm1,
    algorithm5,
    fit_heuristic,
    guarded,
)
from headrace.planner.machine import ComputeRates, Machine
from headrace.planner.partition import zigzag_ranks
from headrace.planner.shards import Prefill
from headrace.planner.tuned_table import TableEntry, TableStamp, TunedTable
from headrace.strategies import STRATEGIES
from tests.support.planner_oracles import GQA, MACHINE, PRINTED, S2, TABLE_4, break_even, crossover

pytestmark = pytest.mark.unit

TOTAL = 128_000
PEAK = RingRates(ranks=4, heads=128, kv_heads=8, flops_s=800e12, bandwidth_bytes_s=50e9)
ATTAINED = msgspec.structs.replace(PEAK, flops_s=515e12, bandwidth_bytes_s=26e9)
SLOW = msgspec.structs.replace(MACHINE, link_bytes_s=0.5e9)


def shared(gain: float) -> Machine:
    """Ranks that share a host, where one engine attains so many times what one of them does."""
    rates = ComputeRates(
        cores=4, linear_flops_s=gain * MACHINE.linear_flops_s, memory_bytes_s=gain * MACHINE.memory_bytes_s,
        attention_flops_s=tuple((rows, gain * rate) for rows, rate in MACHINE.attention_flops_s),
    )  # fmt: skip
    return msgspec.structs.replace(MACHINE, one_engine=rates)


def tuned(ranks: int = 2, **more: object) -> TunedTable:
    stamp = TableStamp(
        machine=MACHINE.fingerprint, model="s2", shape=S2, ranks=ranks, link="lo", version="0.1.0", date="2025-01-01"
    )
    return TunedTable(stamp=stamp, machine=MACHINE, **more)


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 2000), (4, 4000), (8, 8000), (16, 16000)])
def test_equation_2(ranks: int, tokens: int) -> None:
    assert msgspec.structs.replace(PEAK, ranks=ranks).hides_kv == pytest.approx(tokens)


def test_equations_1_2_5() -> None:
    assert PEAK.ratio == 0.125
    assert msgspec.structs.replace(PEAK, bandwidth_bytes_s=12.5e9).hides_kv == pytest.approx(16000)
    tcp = msgspec.structs.replace(PEAK, flops_s=500e12, bandwidth_bytes_s=3e9)
    assert tcp.hides_kv == pytest.approx(41667, abs=1)
    assert PEAK.ratio_with_all_to_all(3200) == pytest.approx(3200 / TOTAL)
    at = 3782
    assert ATTAINED.ratio_with_all_to_all(at) == pytest.approx(at / TOTAL, rel=1e-3)


@pytest.mark.parametrize(
    ("rule", "ring", "pass_q"),
    [
        (algorithm1, PEAK, (1280, 3200)),
        (algorithm1, ATTAINED, (1280, 3200, 4160)),
        (algorithm5, PEAK, (1280,)),
        (algorithm5, ATTAINED, (1280, 3200)),
    ],
    ids=["algorithm 1 at the peak", "algorithm 1 as attained", "algorithm 5 at the peak", "algorithm 5 as attained"],
)
def test_rules_on_table_4(rule: Callable[[RingRates, int, int], str], ring: RingRates, pass_q: tuple[int, ...]) -> None:
    """Never worse than 2%, but for Algorithm 5 with peak rates, whose boundary is exactly T = 3,200."""
    for T, kv_ms, q_ms in TABLE_4:
        chosen = rule(ring, T, TOTAL - T)
        assert chosen == ("ring-q" if T in pass_q else "ring-kv")
        if (rule, ring, T) != (algorithm5, PEAK, 3200):
            assert (q_ms if chosen == "ring-q" else kv_ms) <= 1.02 * min(kv_ms, q_ms)


def test_printed_coefficients_fail_unguarded() -> None:
    """Pass-Q on all 14 rows; under the guard they do as Algorithm 1 does."""
    values = [PRINTED.h(T, TOTAL - T) for T, _, _ in TABLE_4]
    assert values[0] == pytest.approx(-0.738, abs=1e-3) and values[-1] == pytest.approx(-0.342, abs=1e-3)
    assert max(values) < 0
    for T, _, _ in TABLE_4:
        assert guarded(ATTAINED, PRINTED, T, TOTAL - T) == algorithm1(ATTAINED, T, TOTAL - T)
    full = math.ceil(math.exp(12.112 / 1.059))
    assert PRINTED.h(full, 0) < 0 and guarded(ATTAINED, PRINTED, full, 0) == "ring-kv"


def test_fit_to_table_4() -> None:
    """Refitted, h decides every row but the ties (within 1.5%) rightly."""
    fitted = fit_heuristic([(T, TOTAL - T, kv, q) for T, kv, q in TABLE_4])
    for T, kv, q in TABLE_4:
        if abs(kv / q - 1) > 0.015 and T < TOTAL:
            assert (fitted.h(T, TOTAL - T) > 0) == (kv < q), T


@settings(max_examples=30, deadline=None)
@given(st.floats(0.3, 2), st.floats(0.3, 2), st.floats(-2, 2))
@example(alpha=1.140625, beta=1.5, shift=-2.0)  # two samples of 40 say pass-KV, by 4% and 7%
def test_fit_finds_what_made_the_samples(alpha: float, beta: float, shift: float) -> None:
    made = Heuristic(alpha, beta, shift - alpha * math.log(1000))
    grid = [(T, P) for T in (64, 128, 256, 512, 1024, 2048, 4096, 8192) for P in (256, 1024, 4096, 16384, 65536)]
    fitted = fit_heuristic([(T, P, 1.0, math.exp(made.h(T, P) / 5)) for T, P in grid])
    wrong = [made.h(T, P) for T, P in grid if (fitted.h(T, P) > 0) != (made.h(T, P) > 0)]
    assert all(abs(h) < 0.35 for h in wrong)


def test_fit_refuses_too_little() -> None:
    with pytest.raises(ValueError, match="three or more"):
        fit_heuristic([(64, 0, 1.0, 2.0)] * 9)
    with pytest.raises(ValueError, match="positive times"):
        fit_heuristic([(64, 64, 1.0, 0.0)] * 9)


def test_cost_takes_the_least() -> None:
    choice = choose(Prefill(MACHINE, S2, 2, 16384))
    assert choice.strategy == min(choice.predicted_s, key=lambda name: choice.predicted_s[name]) == "chain"
    assert choice.bounds[0] == 0 and choice.bounds[-1] == 16384 and choice.bounds[1] % 64 == 0
    assert choice.ranks == (0, 1)
    seconds = {name: f"{value:.2f}" for name, value in choice.predicted_s.items()}
    assert choice.reason == (
        f"chain: {seconds['chain']} s predicted, ring-kv {seconds['ring-kv']}, gather {seconds['gather']}, "
        f"single (one rank, 2 cores) {seconds['single']}"
    )


def test_single_is_one_engine_with_all_cores_where_ranks_share_them() -> None:
    """Twice the rates of a rank: several ranks gain nothing any more, and the reason says what `single` is."""
    twice = shared(2.0)
    choice = choose(Prefill(twice, S2, 2, 2048))
    one = one_engine_s(twice, S2, 2048)
    assert choice.strategy == "single" and choice.predicted_s["single"] == one
    assert one is not None and one < 0.6 * predict("single", MACHINE, S2, 1, (0, 2048)).ttft_s
    assert choice.predicted_s["chain"] == choose(Prefill(MACHINE, S2, 2, 2048)).predicted_s["chain"]
    others = {name: f"{value:.2f}" for name, value in choice.predicted_s.items()}
    assert choice.reason == (
        f"single (one engine with all 4 cores): {others['single']} s predicted, ring-kv {others['ring-kv']}, "
        f"chain {others['chain']}, gather {others['gather']}"
    )
    slower = choose(Prefill(shared(0.9), S2, 2, 16384))
    assert slower.strategy == "chain" and ", single (one engine with all 4 cores) 1" in slower.reason
    ruled = choose(Prefill(twice, S2, 2, 2048, 2048), rule="alg1")
    assert ruled.reason.startswith("single (one engine with all 4 cores; too small for ring-")
    assert one_engine_s(MACHINE, S2, 2048) is None


def test_one_engine_is_named_beside_a_strategy_that_was_forced() -> None:
    """It has all cached tokens, wherever they lie on the ranks."""
    choice = choose(Prefill(shared(2.0), S2, 2, 2048, 4096, (0, 1)), allowed=("chain",))
    one = one_engine_s(shared(2.0), S2, 2048, 4096)
    assert set(choice.predicted_s) == {"chain"} and one is not None
    assert choice.reason == (
        f"chain: {choice.predicted_s['chain']:.2f} s predicted, one engine with all 4 cores {one:.2f}"
    )


def test_what_exchanges_take_beyond_their_bytes_is_added_to_each_layer() -> None:
    late = msgspec.structs.replace(MACHINE, exchange_s=(("chain", 0.01),))
    for name in ("single", "chain", "ring-kv"):
        cut = shards_for(name, Prefill(late, S2, 2, 4096))
        more = predict(name, late, S2, 2, cut.bounds).ttft_s - predict(name, MACHINE, S2, 2, cut.bounds).ttft_s
        assert more == pytest.approx(0.01 * S2.layers if name == "chain" else 0)


def test_small_prompts_go_to_one_rank() -> None:
    least = break_even(SLOW, GQA, 4)
    assert least is not None and choose(Prefill(SLOW, GQA, 4, least)).strategy != "single"
    small = choose(Prefill(SLOW, GQA, 4, least - 64, 0))
    assert (small.strategy, small.bounds, small.ranks) == ("single", (0, least - 64), (0,))
    assert choose(Prefill(SLOW, GQA, 1, 16384)).strategy == "single" and break_even(SLOW, GQA, 1) is None
    for rule in ("alg1", "alg5", "heuristic"):
        forced = choose(Prefill(SLOW, GQA, 4, least - 64, 4096), heuristic=PRINTED, rule=rule)  # type: ignore[arg-type]
        assert forced.strategy in ("single", "ring-kv", "ring-q")


def test_single_runs_where_its_cache_lies() -> None:
    choice = choose(Prefill(MACHINE, S2, 3, 1, 64, (0, 0, 1)), allowed=("single",))
    assert (choice.strategy, choice.bounds, choice.ranks) == ("single", (64, 65), (2,))


def test_pass_q_wins_at_small_new_shares() -> None:
    most = crossover(SLOW, GQA, 2, 32768)
    assert most is not None and 64 <= most < 32768
    assert choose(Prefill(SLOW, GQA, 2, 64, 32704)).strategy == "ring-q"
    assert choose(Prefill(SLOW, GQA, 2, 16384, 16384)).strategy != "ring-q"
    rings = ("ring-kv", "ring-q")
    assert (
        choose(Prefill(SLOW, GQA, 2, 2 * most // 64 * 64, 32768 - 2 * most // 64 * 64), allowed=rings).strategy
        == "ring-kv"
    )


@pytest.mark.parametrize("rule", ["cost", "alg1", "alg5", "heuristic"])
def test_full_prefill_is_never_pass_q(rule: str) -> None:
    for T in (64, 512, 4096, 131072):
        choice = choose(Prefill(SLOW, GQA, 2, T), heuristic=Heuristic(0, 0, -1), rule=rule)  # type: ignore[arg-type]
        assert choice.strategy != "ring-q" and "ring-q" not in choice.predicted_s
    assert choose(Prefill(SLOW, GQA, 2, 512), allowed=("ring-q",)).strategy == "ring-kv"


def test_rules_by_name() -> None:
    """T / (T + P) small and T below equation 2: pass-Q by Algorithm 1; the heuristic may say otherwise."""
    slow = msgspec.structs.replace(SLOW, link_bytes_s=0.05e9)
    rings = ("ring-kv", "ring-q")
    ring = RingRates.of(slow, GQA, 2)
    assert ring.ratio == 0.5 and ring.hides_kv > 2048
    args = (slow, GQA, 2, 2048, 30720)
    assert choose(Prefill(*args), rule="alg1", allowed=rings).strategy == "ring-q"
    assert choose(Prefill(*args), rule="alg1", allowed=rings).reason.startswith("ring-q (by alg1): ")
    assert choose(Prefill(*args), heuristic=Heuristic(0, 0, 1), rule="heuristic", allowed=rings).strategy == "ring-kv"
    assert choose(Prefill(*args), heuristic=Heuristic(0, 0, -1), rule="heuristic", allowed=rings).strategy == "ring-q"
    table = tuned(heuristic=Heuristic(0, 0, 1))
    assert choose(Prefill(*args, table=table), rule="heuristic", allowed=rings).strategy == "ring-kv"
    assert "none of which" in choose(Prefill(*args), rule="alg1", allowed=("chain",)).reason
    with pytest.raises(ValueError, match="headrace tune --heuristic"):
        choose(Prefill(*args), rule="heuristic", allowed=rings)


def test_table_gives_bounds_and_corrections() -> None:
    table = tuned(entries={16384: TableEntry((0.75, 0.25), 3.0)}, corrections={"chain": 2.0})
    alone = choose(Prefill(MACHINE, S2, 2, 16384, table=table), allowed=("chain",))
    assert alone.bounds == (0, 12288, 16384)
    uncorrected = predict("chain", MACHINE, S2, 2, alone.bounds).ttft_s
    assert alone.predicted_s["chain"] == pytest.approx(2 * uncorrected)
    assert choose(Prefill(MACHINE, S2, 2, 16384, table=table)).strategy == "ring-kv"
    assert choose(Prefill(MACHINE, S2, 2, 4096, 16384, table=table), allowed=("chain",)).bounds[1] != 16384 + 3072
    with pytest.raises(ValueError, match="for 2 ranks, not 4"):
        choose(Prefill(MACHINE, S2, 4, 16384, table=table))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9000), st.integers(0, 80), st.sampled_from([64, 2048]))
def test_layouts_are_parts(ranks: int, T: int, chunks: int, unit: int) -> None:
    """bounds run from P to P + T in order, inner ones on units, one rank for each shard."""
    P = 64 * chunks
    for strategy in STRATEGIES:
        cut = shards_for(strategy, Prefill(MACHINE, S2, ranks, T, P, unit=unit))
        assert list(cut.bounds) == sorted(cut.bounds) and (cut.bounds[0], cut.bounds[-1]) == (P, P + T)
        assert len(cut.ranks) == len(cut.bounds) - 1 and set(cut.ranks) <= set(range(ranks))
        assert all(bound % unit == 0 or bound in (P, P + T) for bound in cut.bounds)
        assert predict(strategy, MACHINE, S2, ranks, cut.bounds, P).ttft_s > 0
    assert shards_for("ring-q", Prefill(MACHINE, S2, ranks, T, P)).ranks == zigzag_ranks(ranks)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="unknown rule 'magic'"):
        choose(Prefill(MACHINE, S2, 2, 64), rule="magic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="allowed must name"):
        choose(Prefill(MACHINE, S2, 2, 64), allowed=("ring",))
    with pytest.raises(ValueError, match="allowed must name"):
        choose(Prefill(MACHINE, S2, 2, 64), allowed=())
    with pytest.raises(ValueError, match="nothing to choose"):
        choose(Prefill(MACHINE, S2, 2, 0))
    with pytest.raises(ValueError, match="unknown strategy"):
        shards_for("ring", Prefill(MACHINE, S2, 2, 64))
    with pytest.raises(ValueError, match="unknown strategy"):
        predict("ring", MACHINE, S2, 2, (0, 64))
