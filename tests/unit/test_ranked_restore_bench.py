"""headrace bench restore --ranks: what is swept, and what its figures are of."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.bench.ranked_restore import RankedAnswer, Way, measured, ways
from headrace.bench.restore import RANKED_COLUMNS, RestoreBench
from headrace.strategies import OFFERED
from headrace.types import CHUNK

pytestmark = pytest.mark.unit


class Testbed:
    """Loading on all ranks takes half; the engine chooses to, with a chain."""

    __test__ = False

    def __init__(self, chunks: int) -> None:
        self.stored = chunks * CHUNK
        self.asked: list[Way | None] = []

    def ask(self, way: Way | None) -> RankedAnswer:
        self.asked.append(way)
        chosen = way or Way("all", 0, "chain")
        loaded = self.stored // CHUNK - chosen.recomputed
        seconds = loaded / (2 if chosen.loaders == "all" else 1) + 3 * chosen.recomputed + (chosen.strategy != "chain")
        return RankedAnswer(1 + seconds, chosen.strategy or "auto", "load" if loaded else None)


def test_what_is_measured() -> None:
    testbed: Any = Testbed(8)
    case = measured(testbed, 3)
    assert (case["chosen_s"], case["best_s"], case["to_best"]) == (5, 5, 1)
    assert (case["best_loaders"], case["best_recomputed"], case["best_strategy"]) == ("all", 0, "chain")
    assert (case["one_s"], case["all_s"], case["gain"]) == (10, 26, 2)
    assert testbed.asked.count(None) == 3
    shown = {"model": "S1", "link_gbps": 1.0} | case
    assert all(column.found(shown) is not None for column in RANKED_COLUMNS)


def test_the_sweep() -> None:
    strategies = {name for name in OFFERED if name != "gather"}
    assert {way.strategy for way in ways(8)} == {way.strategy for way in ways(0)} == strategies
    assert {(way.loaders, way.recomputed) for way in ways(8)} == {
        *((loaders, count) for loaders in ("one", "all") for count in (0, 2, 4, 6)), ("one", 8),
    }  # fmt: skip
    assert len(ways(0)) == len(strategies)


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
