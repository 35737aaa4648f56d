"""What a restore's report says: chunks that count, times of a layer, and what the rates are told."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.offload.restore.report import LayerProjection, LayerTransfer, RestoreCounters, RestoreReport
from headrace.offload.restore.solver import Split
from headrace.offload.ticket import Ticket
from headrace.offload.tiers.base import BlobKind
from headrace.types import CHUNK

pytestmark = pytest.mark.unit


def ended(size: int, seconds: float) -> Ticket:
    ticket = Ticket(size, "kv")
    ticket.end(None)
    ticket.began_s, ticket.ended_s = 0.0, seconds
    return ticket


def report() -> RestoreReport:
    """Two chunks to be projected, three to be loaded, over three layers; one of them was slow."""
    found = RestoreReport(["x", "x", "k", "k", "k"], "disk")
    found.transfers.append(LayerTransfer(ended(64, 1.0), "k", -1))
    for layer, slow in enumerate((1.0, 9.0, 1.0)):
        kinds: tuple[BlobKind, ...] = ("x", "k")
        found.transfers += [
            LayerTransfer(ended(100 * (1 + at), slow * (1 + at)), kind, layer) for at, kind in enumerate(kinds)
        ]
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


def test_times_are_those_of_the_median_layer() -> None:
    found = report()
    assert found.done and found.layer_transfers == [(200, 2.0), (100, 1.0)]
    assert found.link_s == 1.0 + 3.0 * (1 + 9 + 1)
    found.transfers.append(LayerTransfer(Ticket(1, "kv"), "k", 3))
    assert not found.done


class Told:
    """Rates that note what they are told."""

    def __init__(self) -> None:
        self.loads: list[tuple[Any, ...]] = []
        self.projections: list[tuple[Any, ...]] = []

    def observe_load(self, *figures: Any) -> None:
        self.loads.append(figures)

    def observe_project(self, *figures: Any) -> None:
        self.projections.append(figures)


def test_what_copying_takes_of_the_cores_is_not_laid_on_projecting() -> None:
    found, rates = report(), Told()
    found.cpu_s = found.link_s / 4
    found.projections += [
        LayerProjection(128, 4.0, True),
        LayerProjection(128, 4.0, True),
        LayerProjection(128, 2.9, False),
    ]
    found.tell(rates)  # type: ignore[arg-type]
    assert rates.loads == [("disk", 200, 1, 2.0, 0.5), ("disk", 100, 1, 1.0, 0.25)]
    assert rates.projections == [(128, 3.0)]


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
