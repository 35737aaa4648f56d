"""Tasks for attention in pieces: a call walks some chunks of its rows, span by span, and goes on from a state. Plain
data, no tensors.

R: rows. All rows are split (tile_schedule), whatever their number: what a task leaves is the state of one span, and
states are what pieces are made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from headrace.kernels.triton import tile_schedule
from headrace.kernels.triton.tile_schedule import NO_TASKS, SPAN, Bounds, Int32, Int64, TileSchedule


class Piece(NamedTuple):
    """A schedule, and the spans first[r] .. last[r] of which row r has states; last before first: none. int32 [R]."""

    schedule: TileSchedule
    first: Int32
    last: Int32


def pieces(items: Int32, positions: Int64, bounds: Bounds) -> Iterator[Piece]:
    """The tasks of a call, span after span, in as many pieces as there must be for the states of each to fit. A row's
    items may begin anywhere."""
    first, last = _reach(items, positions)
    spans = items[:, 1] // SPAN
    together = max(1, bounds.states // max(1, len(positions)))
    turns = np.zeros_like(spans) if _states(first, last).sum() <= bounds.states else spans // together
    for turn in np.unique(turns).tolist():
        yield _piece(np.ascontiguousarray(items[turns == turn]), positions, bounds)


def _piece(items: Int32, positions: Int64, bounds: Bounds) -> Piece:
    first, last = _reach(items, positions)
    count = _states(first, last)
    bases = np.cumsum(count) - count - first
    walked, rounds = tile_schedule.split(items, positions, bounds)
    rounds = [tasks for tasks in rounds if len(tasks)]
    schedule = TileSchedule(walked, rounds, NO_TASKS, bases.astype(np.int32), count, int(count.sum()))
    return Piece(schedule, first.astype(np.int32), last.astype(np.int32))


def _states(first: Int64, last: Int64) -> Int64:
    count: Int64 = np.maximum(0, last - first + 1)
    return count


def _reach(items: Int32, positions: Int64) -> tuple[Int64, Int64]:
    """The first and the last span in which each row is offered chunks; of those behind it a row has no state."""
    rows = len(positions)
    first, last = np.full(rows, np.iinfo(np.int32).max, dtype=np.int64), np.full(rows, -1, dtype=np.int64)
    offered = np.unique(np.stack((items[:, 1] // SPAN, items[:, 2], items[:, 3]), axis=1), axis=0).astype(np.int64)
    lengths = offered[:, 2] - offered[:, 1]
    row = np.repeat(offered[:, 2] - np.cumsum(lengths), lengths) + np.arange(lengths.sum())
    span = np.repeat(offered[:, 0], lengths)
    np.minimum.at(first, row, span)
    np.maximum.at(last, row, span)
    first[last < 0] = 0
    return first, np.minimum(last, positions // SPAN)
