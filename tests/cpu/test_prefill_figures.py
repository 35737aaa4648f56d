"""What the measuring commands of prefills make of their figures, with no ranks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.bench.choice import (
    ONE_ENGINE,
    ONE_RANK,
    _beside,
    _by_itself,
    pass_q_until,
    predictions,
    summary,
    tie,
)
from headrace.bench.prefill import PrefillBench
from headrace.bench.prefill_grid import link_bandwidths
from headrace.bench.prefill_links import RankLink, apply
from headrace.bench.prefill_report import ratios
from headrace.bench.prefill_search import FINALS, confirmed, in_turns
from headrace.bench.prefill_testbed import PrefillRun, _owners, median
from headrace.parallel.messages import decode, encode
from headrace.parallel.rate_limit import RateLimitedTransport
from headrace.parallel.transport import LoopbackHub
from headrace.planner.machine import ComputeRates, Machine, ModelShape
from headrace.planner.partition_search import PartitionSearch
from headrace.planner.schedule import Shards

pytestmark = pytest.mark.cpu

MACHINE = Machine(
    name="made up", cores=1, isa="none", date="2026-01-01", linear_flops_s=1e9, attention_flops_s=((1, 1e9),),
    memory_bytes_s=1e9, link_bytes_s=2e9, latency_s=0.001,
)  # fmt: skip


def run(seconds: float) -> PrefillRun:
    return PrefillRun(seconds, (seconds / 2, 0.0), (int(seconds), 0))


def test_runs_alternate_after_one_call_each_that_is_not_counted() -> None:
    order: list[str] = []

    def call(name: str) -> Any:
        def called() -> PrefillRun:
            order.append(name)
            return run(len(order))

        return called

    found = in_turns({"a": call("a"), "b": call("b")}, 3)
    assert "".join(order) == "abababab"
    assert [each.seconds for each in found["a"]] == [3, 5, 7]
    assert median(found["a"]) == PrefillRun(5, (2.5, 0.0), (7, 0))


class Noisy:
    """In place of a testbed: the first prefill of each cut is fast by luck for one of them."""

    size = 2

    def __init__(self) -> None:
        self.calls: dict[int, int] = {}

    def run(self, strategy: str, cut: Shards, P: int, placement: str) -> PrefillRun:
        assert (strategy, P, placement, cut.ranks, cut.bounds[0]) == ("chain", 64, "round", (0, 1), 64)
        bound = cut.bounds[1] - P
        self.calls[bound] = self.calls.get(bound, 0) + 1
        return run(1000 + abs(bound - 640))


def test_a_lucky_point_does_not_win_a_search() -> None:
    testbed: Any = Noisy()
    search = PartitionSearch(1024, 2, lambda _: 0.0, measured={(0, 64 * i, 1024): 2000.0 + i for i in range(1, 16)})
    search.measured.update({(0, 128, 1024): 1.0, (0, 640, 1024): 1000.0, (0, 576, 1024): 990.0})
    assert confirmed(testbed, search, 64, "round") == ((0, 640, 1024), 1000)
    assert testbed.calls == dict.fromkeys((128, 576, 640, 64), 1 + FINALS)


@pytest.mark.parametrize(
    ("strategy", "ranks", "cached", "chunks", "expected"),
    [
        ("chain", (0, 1), [], 40, ((0, 1), [1] * 40)),
        ("chain", (0, 1), [0] * 32, 40, ((0, 1), [0] * 32 + [1] * 8)),
        ("chain", (0, 1), [0] * 33, 40, ((1, 0), [0] * 40)),
        ("chain", (0, 1, 2), [0] * 3, 4, ((2, 1, 0), [0] * 4)),
        ("single", (0,), [1] * 3, 5, ((1,), [1] * 5)),
        ("ring-kv", (0, 1, 1, 0), [], 65, ((0, 1, 1, 0), [0] * 32 + [1] * 32 + [0])),
        ("ring-q", (0, 1, 1, 0), [1] * 3, 34, ((0, 1, 1, 0), [1] * 32 + [1] * 2)),
        ("gather", (0, 1), [1] * 35, 66, ((0, 1), [1] * 64 + [0] * 2)),
    ],
)
def test_a_block_has_one_owner(
    strategy: str, ranks: tuple[int, ...], cached: list[int], chunks: int, expected: tuple[Any, Any]
) -> None:
    assert _owners(strategy, ranks, cached, chunks, 2) == expected


def test_a_link_goes_to_a_rank_and_into_the_profile() -> None:
    plain = LoopbackHub(2).transport(0)
    assert apply(decode(encode(RankLink().step(2e9))), plain) is plain
    wanted = RankLink(0.25, latency_s=0.003, jitter=0.5, seed=7)
    made = apply(decode(encode(wanted.step(2e9))), plain)
    assert isinstance(made, RateLimitedTransport)
    assert (made.bandwidth, made.latency, made.jitter, made.seed) == (0.25e9, 0.003, 0.5, 7)
    assert made.own_s_per_byte == 1 / 2e9
    assert wanted.profile(MACHINE).link_bytes_s == 0.25e9 and wanted.profile(MACHINE).latency_s == 0.004
    assert RankLink(5.0).profile(MACHINE).link_bytes_s == 2e9
    only_late = apply(RankLink(latency_s=0.5).step(2e9), plain)
    assert isinstance(only_late, RateLimitedTransport) and only_late.bandwidth == float("inf")


def test_a_link_faster_than_the_ranks_own_is_not_deducted_from() -> None:
    assert RankLink(1.0).imitable(2e9) and not RankLink(1.5, jitter=0.5).imitable(2e9)
    made = apply(RankLink(10.0).step(2e9), LoopbackHub(2).transport(0))
    assert isinstance(made, RateLimitedTransport) and made.own_s_per_byte == 0


def test_options_make_links() -> None:
    bandwidth = link_bandwidths("bandwidth", "none, 0.5")
    bench = PrefillBench(bandwidth=bandwidth, latency_ms=2.0, jitter=0.25)
    assert bench.links == (RankLink(None, 0.002, 0.25), RankLink(0.5, 0.002, 0.25))


def cell(T: int, P: int, wins: bool, over: float = 1.0, tied: bool = True) -> dict[str, Any]:
    return {
        "ranks": 2, "bandwidth_gbps": 0.1, "tokens": T, "cached": P,
        "pass_q_wins": wins, "over_best": over, "tie": tied,
    }  # fmt: skip


def test_predictions_stand_beside_what_was_measured() -> None:
    """The fastest first; a strategy without a prediction is left out. A rank by itself has no turns to take."""
    shape = ModelShape(layers=2, hidden=64, heads=2, kv_heads=2, head_dim=32, mlp=128, vocab=256)
    rates = ComputeRates(cores=2, linear_flops_s=4e9, attention_flops_s=((1, 4e9),), memory_bytes_s=4e9)
    crowded = msgspec.structs.replace(MACHINE, one_engine=rates)
    machines = {ONE_ENGINE: crowded.alone, ONE_RANK: _by_itself(crowded, 1.5)}
    beside = _beside(machines, shape, 256, 0, {ONE_ENGINE: [0.1, 0.3, 0.2], ONE_RANK: [0.5]})
    engine, rank = beside[ONE_ENGINE], beside[ONE_RANK]
    assert (engine["cores"], engine["measured_s"], rank["cores"], rank["measured_s"]) == (2, 0.2, 1, 0.5)
    assert rank["predicted_s"] == pytest.approx(engine["predicted_s"] * 4 / 1.5)
    case = {"ranks": 2, "tokens": 256, "cached": 0, "measured_s": {"chain": 0.25, "ring-q": 0.1}, "beside": beside}
    told = predictions([case | {"predicted_s": {"chain": 0.5}}]).splitlines()[2:]
    assert [line.split(" | ")[3] for line in told] == [ONE_ENGINE, "chain", ONE_RANK]
    assert told[1] == "| 2 | 256 | 0 | chain | 0.250 | 0.500 | 2.00 |"


def test_ties_and_where_pass_q_stops_winning() -> None:
    assert tie([1.0, 1.2, 1.4], [1.0, 1.2, 1.4]) and not tie([2.0, 2.1, 2.2], [1.0, 1.1, 1.2])
    cells = [cell(256, 768, False), cell(64, 768, True), cell(128, 768, True, 1.5), cell(512, 768, True, 1.04, False)]
    assert pass_q_until(cells) == 128
    assert pass_q_until([cell(64, 768, False), cell(128, 768, True)]) is None
    assert summary(cells).splitlines()[-1] == "| 2 | 0.1 | 768 | 4.0% | 128 new tokens | 0.1429 |"


def test_the_table_shows_ratios_to_single() -> None:
    def case(strategy: str, ranks: int, seconds: float, tokens: int = 64) -> dict[str, Any]:
        return {
            "strategy": strategy,
            "ranks": ranks,
            "tokens": tokens,
            "cached": 0,
            "bandwidth_gbps": None,
            "ttft_s": seconds,
        }

    lines = ratios([case("single", 1, 2.0), case("chain", 2, 1.0), case("chain", 3, 0.5), case("chain", 2, 3.0, 128)])
    assert lines.splitlines() == [
        "| GB/s | tokens | cached | single | chain x2 | chain x3 |",
        "|---|---|---|---|---|---|",
        "| none | 64 | 0 | 2 s | 1 s (2.00x) | 0.5 s (4.00x) |",
        "| none | 128 | 0 | - | 3 s | - |",
    ]
