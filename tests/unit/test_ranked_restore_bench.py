"""headrace bench restore --ranks: what is swept, and what its figures are of."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.bench.ranked_restore import (
    HOPELESS,
    LEAST,
    NEVER,
    SHIFTS,
    RankedAnswer,
    Way,
    around,
    measured,
    moved,
    shifted,
    ways,
)
from headrace.bench.restore import RANKED_COLUMNS, RestoreBench
from headrace.strategies import OFFERED
from headrace.types import CHUNK

pytestmark = pytest.mark.unit


class Testbed:
    """Loading on all ranks takes half; the engine chooses to, with a chain. What is predicted is what it takes."""

    __test__ = False

    def __init__(self, chunks: int) -> None:
        self.stored = chunks * CHUNK
        self.asked: list[Way | None] = []
        self.cold_s: float | None = None
        self.cut = 0.0

    def predicted(self, way: Way) -> float:
        loaded = self.stored // CHUNK - way.recomputed
        seconds = loaded / (2 if way.loaders == "all" else 1) + 3 * way.recomputed + (way.strategy != "chain")
        return NEVER if way.strategy == "gather" else 1 + seconds + abs(way.shift - self.cut)

    def ask(self, way: Way | None) -> RankedAnswer:
        self.asked.append(way)
        chosen = way or Way("all", 0, "chain")
        return RankedAnswer(self.predicted(chosen), chosen.strategy or "auto", "load", chosen, 5.0)


def test_what_is_measured() -> None:
    testbed: Any = Testbed(8)
    case = measured(testbed, 3)
    assert (case["chosen_s"], case["best_s"], case["to_best"]) == (5, 5, 1)
    assert (case["best_loaders"], case["best_recomputed"], case["best_strategy"]) == ("all", 0, "chain")
    assert (case["one_s"], case["all_s"], case["gain"]) == (10, 26, 2)
    assert testbed.asked.count(None) == 3, "the first of an answer that takes 5 s counts"
    tried = [way for way in testbed.asked if way]
    assert case["swept"] == LEAST[0] + len(SHIFTS) and case["repeats"] == 3
    assert max(tried.count(way) for way in tried if testbed.predicted(way) > 1.5 * 5) == 1, "a hopeless way is repeated"
    assert (case["chosen_loaders"], case["chosen_recomputed"], case["predicted_s"]) == ("all", 0, 5.0)
    shown = {"model": "S1", "link_gbps": 1.0} | case
    assert all(column.found(shown) is not None for column in RANKED_COLUMNS)


def test_a_cold_prefill_that_takes_long_is_not_repeated() -> None:
    testbed: Any = Testbed(8)
    testbed.cold_s = 40.0
    assert measured(testbed, 3)["all_s"] == 40.0
    assert not any(way and way.strategy is None for way in testbed.asked)


def test_a_chain_that_is_cut_elsewhere() -> None:
    """Both ways, in whole chunks; tried beside the fastest chain, if that is not far from the best."""
    assert moved((64, 640, 1344), 0.1) == (64, 768, 1344) and moved((0, 64, 1280), -0.5) == (0, 0, 1280)
    chain, ring = Way("all", 0, "chain"), Way("one", 0, "ring-kv")
    assert shifted({chain: 1.0, ring: 0.9}) == [chain._replace(shift=shift) for shift in SHIFTS]
    assert shifted({chain: 1.0, ring: 0.99 / HOPELESS}) == [] == shifted({ring: 1.0})
    testbed: Any = Testbed(8)
    testbed.cut = SHIFTS[0]
    case = measured(testbed, 3)
    assert (case["best_shift"], case["best_strategy"]) == (SHIFTS[0], "chain") and case["to_best"] > 1


def test_the_sweep() -> None:
    assert {way.strategy for way in ways(8)} == set(OFFERED)
    assert {way.strategy for way in ways(0)} == set(OFFERED) - {"ring-q"}
    assert {(way.loaders, way.recomputed) for way in ways(8)} == {
        *((loaders, count) for loaders in ("one", "all") for count in (0, 2, 4, 6)), ("one", 8),
    }  # fmt: skip
    near = Way("all", 20, "chain")
    assert around(near, 32) == [near._replace(recomputed=12), near._replace(recomputed=28)]
    assert around(near, 24) == [near._replace(recomputed=12)]
    assert around(near._replace(recomputed=0), 32) == [near._replace(recomputed=8)]
    assert around(near._replace(recomputed=32), 32) == []


@pytest.mark.parametrize("stored", ["101", "-1", "a", ""])
def test_percents(stored: str) -> None:
    from headrace.bench.restore import percents

    with pytest.raises(ValueError, match="stored must be percents from 0 to 100"):
        percents("stored", stored)


def test_several_ranks_need_links_in_numbers() -> None:
    with pytest.raises(ValueError, match="'balance' is of one rank"):
        RestoreBench(ranks=2)
    bench = RestoreBench(ranks=2, links=(1.0,), models=("S1",))
    assert bench.columns() == RANKED_COLUMNS and bench.case_count() == 5
