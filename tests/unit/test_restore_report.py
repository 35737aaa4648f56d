"""What a restore's report says: chunks that count, times of a layer, and what the rates are told."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.offload.ranked.words import BringEnded, ChunksBrought, LayerProjection
from headrace.offload.restore.report import RestoreCounters, RestoreReport
from headrace.offload.restore.solver import Split
from headrace.types import CHUNK

pytestmark = pytest.mark.unit


def report(good: int = 5, reason: str = "", cpu_s: float = 0.0) -> RestoreReport:
    """Two chunks to be projected, three to be loaded, by one rank."""
    found = RestoreReport(["x", "x", "k", "k", "k"], "disk", {0: list(range(5))})
    found.add(0, ChunksBrought(0, good, reason, 34.0, cpu_s, [(200, 2.0), (100, 1.0)]))
    return found


def test_chunks_count_up_to_the_first_that_was_lost() -> None:
    found = report()
    assert (found.tokens, found.projected_tokens, found.failed) == (5 * CHUNK, 2 * CHUNK, False)
    found.lose(3, "chunk 3 is gone")
    found.lose(4, "chunk 4 is gone")
    assert (found.tokens, found.projected_tokens, found.reason) == (3 * CHUNK, 2 * CHUNK, "chunk 3 is gone")
    found.lose(1, "chunk 1 is damaged")
    assert (found.tokens, found.projected_tokens) == (CHUNK, CHUNK)
    assert found.lost and found.failed and found.reason == "chunk 1 is damaged"


def test_parts_of_several_ranks() -> None:
    """The second rank has lost its second chunk, the fourth of the run."""
    found = RestoreReport(["k"] * 5, "host", {0: [0, 2, 4], 1: [1, 3]})
    found.add(1, ChunksBrought(0, 1, "chunk 3 is gone", 3.0, 1.0, []))
    assert not found.done and found.good == 3
    found.add(0, ChunksBrought(0, 3, "", 2.0, 0.5, [(64, 0.5)]))
    assert found.done and (found.good, found.reason) == (3, "rank 1: chunk 3 is gone")
    assert (found.link_s, found.cpu_s, found.layer_transfers) == (3.0, 1.0, [(64, 0.5)])
    found.add_ended([BringEnded(0, 0.2, []), BringEnded(0, 0.7, [])])
    assert found.waited_s == 0.7


class Told:
    """Rates that note what they are told. by_strategy: set for several ranks."""

    def __init__(self, by_strategy: object = None) -> None:
        self.by_strategy = by_strategy
        self.loads: list[tuple[Any, ...]] = []
        self.projections: list[tuple[Any, ...]] = []

    def observe_load(self, *figures: Any) -> None:
        self.loads.append(figures)

    def observe_together(self, *figures: Any) -> None:
        self.loads.append(figures)

    def observe_project(self, *figures: Any) -> None:
        self.projections.append(figures)


def test_what_copying_takes_of_the_cores_is_not_laid_on_projecting() -> None:
    found, rates = report(cpu_s=8.5), Told()
    beside, alone = LayerProjection(128, 4.0, True), LayerProjection(128, 2.9, False)
    found.add_ended([BringEnded(0, 0.0, [beside, beside, alone])])
    found.tell(rates)  # type: ignore[arg-type]
    assert rates.loads == [("disk", 200, 1, 2.0, 0.5), ("disk", 100, 1, 1.0, 0.25)]
    assert rates.projections == [(128, 3.0)]


def test_what_several_ranks_load_is_told_as_one() -> None:
    found, rates = report(), Told(by_strategy=object())
    found.tell(rates)  # type: ignore[arg-type]
    assert rates.loads == [("disk", [(200, 2.0), (100, 1.0)])]


@pytest.mark.parametrize("how", ["lost", "cancelled"])
def test_a_failed_restore_tells_nothing(how: str) -> None:
    found, rates = report(), Told()
    if how == "lost":
        found.lose(4, "is gone")
    else:
        found.cancelled = True
    found.tell(rates)  # type: ignore[arg-type]
    assert not rates.loads and not rates.projections


def test_counters() -> None:
    counters, found = RestoreCounters(), report()
    found.waited_s = 2.5
    found.lose(4, "is gone")
    counters.add(found, 7 * CHUNK, ["host", "host", "disk", "host", "disk"])
    assert (counters.loaded_tokens, counters.projected_tokens, counters.recomputed_tokens) == (
        2 * CHUNK, 2 * CHUNK, 7 * CHUNK,
    )  # fmt: skip
    assert counters.loaded_from == {"host": CHUNK, "disk": CHUNK}
    assert counters.link_s == found.link_s and counters.waited_s == 2.5 and counters.restore_s > 0


def test_plans_are_counted_by_what_they_use() -> None:
    counters = RestoreCounters()
    for tokens, x, load in ((0, 0, 3), (1, 0, 2), (2, 0, 1), (1, 1, 1), (3, 0, 0)):
        counters.note(Split(tokens, x, load, 1.0, ""))
    assert counters.plans == {"load": 1, "recompute+load": 2, "recompute+project+load": 1, "recompute": 1}
