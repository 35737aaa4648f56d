"""How a plan becomes work for a GPU: tasks of some rows, each of which walks some chunks. Plain data, no tensors.

R: rows. A lane is one (row, query head). Keys are cut into spans of fixed length at fixed positions. A row's chunks are
merged from left to right within a span, and its spans from left to right: that order is the GPU's canonical one
(docs/gpu-kernels.md), whichever of two ways is taken. A run is the rows of one sequence; each run goes its own way.

    split   a task walks one span, and leaves its state to be merged: for few rows, so that many tasks are under way.
            Rows of one task part where the tree does: those with the later chunks go on from the state of their parent,
            in the next round (ChunkAttention, arXiv 2402.15220, section 3.3, at every level of the tree)
    flash   a task walks all chunks of its rows, which are of one run, and merges span by span: for many rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.config.attention import first_seen
from headrace.types import CHUNK

Bools = NDArray[np.bool_]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
SPAN = 512
"""Keys of a span. Part of the canonical order: another length gives other bits."""

LANES = 64
"""Of a task, at most, of rows that walk single spans: rows of a tensor core's product."""
SHORT = 16
"""Rows of a run that is always split: decoding, drafts, the end of a prompt."""
SPAN_BITS = 9
SPAN_CHUNKS = SPAN // CHUNK
NO_TASKS: Int32 = np.empty((0, 4), np.int32)


class Bounds(NamedTuple):
    """What decides how runs go. group: lanes of a row; states: that may be left in all; busy: tasks that fill the
    machine: with fewer of them, long runs are split as well. flash_lanes, lanes: of a flash and of a split task;
    window_lanes: of a flash task whose rows see a window."""

    group: int
    states: int
    busy: int
    flash_lanes: int = LANES
    lanes: int = LANES
    window_lanes: int = LANES

    @property
    def rows_together(self) -> int:
        """Rows of a split task."""
        return max(1, self.lanes // self.group)

    @property
    def flash_rows(self) -> int:
        """Rows of a flash task."""
        return max(1, self.flash_lanes // self.group)


@dataclass(frozen=True, slots=True)
class TileSchedule:
    """Tasks int32 [n, 4]: (first row, row after the last, first item, number of items), the longest first.

    items int32 [m, 4]: those of a plan in the order of the tasks that walk them; behind the newest chunk of a row that
    stands alone there is room for the rest of its span. rounds: of split tasks, one after another; each
    but the first goes on from the states that those before it left. flash: of all other rows. bases int32 [R]: a row's
    state of span s is number bases[row] + s; -1: the row leaves none. spans [R]: of how many spans it may leave one;
    states: their number. flash_lanes: of a flash task.
    """

    items: Int32
    rounds: list[Int32]
    flash: Int32
    bases: Int32
    spans: Int64
    states: int
    flash_lanes: int = LANES


def cut(items: Int32, positions: Int64, bounds: Bounds, window: int | None = None) -> TileSchedule:
    """The tasks of a plan's items for its rows, which see keys through a window (config.attention)."""
    pieces = _pieces(items)
    edges = run_edges(pieces.high, positions)
    states = positions // SPAN + 1
    lengths = np.diff(edges)
    states[edges[:-1][lengths == 1]] += 1  # a row that is alone may go on into the next span
    split = np.repeat(_split_runs(edges, states, positions, bounds), lengths)
    kept = np.where(split, states, 0)
    bases = np.where(split, np.cumsum(kept) - kept, -1).astype(np.int32)
    begins = np.repeat(edges[:-1], lengths)
    walked, flash = NO_TASKS, NO_TASKS
    rounds: list[Int32] = []
    if split.any():
        here, parts = (items, pieces) if split.all() else _within(items, split)
        walked, rounds = _split(here, parts, positions, begins, bounds)
    if not split.all():
        own, flash = _flash(items, positions, edges, split, bounds, window, len(walked))
        walked = np.concatenate((walked, own))
    return TileSchedule(walked, rounds, flash, bases, kept, int(kept.sum()), bounds.flash_lanes)


def split(items: Int32, positions: Int64, bounds: Bounds) -> tuple[Int32, list[Int32]]:
    """Items in the order of their tasks, and the tasks by round, of rows that are all split."""
    stretches = _pieces(items)
    edges = run_edges(stretches.high, positions)
    return _split(items, stretches, positions, np.repeat(edges[:-1], np.diff(edges)), bounds)


def run_edges(ends: Int32 | Int64, positions: Int64) -> Int64:
    """Where runs begin, and the number of rows. ends: of all items' rows. Two sequences whose rows meet the same chunks
    are one run."""
    rows = len(positions)
    edge = np.zeros(rows + 1, dtype=bool)
    edge[[0, rows]] = True
    edge[1:rows] = positions[1:] != positions[:-1] + 1
    edge[ends] = True  # a sequence's own chunks end with it
    return np.flatnonzero(edge)


def _split_runs(edges: Int64, states: Int64, positions: Int64, bounds: Bounds) -> Bools:
    """Which runs are split."""
    lengths = np.diff(edges)
    if not len(lengths):
        return np.zeros(0, dtype=bool)
    needed = np.add.reduceat(states, edges[:-1])
    short = lengths <= SHORT
    fits = short & (np.cumsum(np.where(short, needed, 0)) <= bounds.states)
    tiles = -(-lengths[~short] // bounds.flash_rows)
    far = ~short & (positions[edges[1:] - 1] >= SPAN)
    if tiles.sum() < bounds.busy and needed[short | far].sum() <= bounds.states:
        return fits | far
    return fits


def _within(items: Int32, split: Bools) -> tuple[Int32, _Pieces]:
    """The items of the rows that are split, one for each stretch of them, and their pieces."""
    turns = np.flatnonzero(np.diff(split, prepend=False, append=False))
    parts = []
    for begin, end in turns.reshape(-1, 2).tolist():
        part = items[(items[:, 2] < end) & (items[:, 3] > begin)]
        part[:, 2:] = part[:, 2:].clip(begin, end)
        parts.append(part)
    found = np.concatenate(parts)
    return found, _pieces(found)


class _Pieces(NamedTuple):
    """Stretches of items, chunk after chunk of one span for the same rows [low, high): number of the first item, items,
    first key. Thousands of items are but hundreds of these."""

    first: Int64
    chunks: Int64
    key: Int64
    low: Int64
    high: Int64


class _Groups(NamedTuple):
    """Items of one span that are offered to the same rows: numbers of [low, high), first and last key, chunks, its last
    piece, depth: groups of the span that these rows go through before. Ordered by span, low, and the wider ones
    first."""

    low: Int64
    high: Int64
    key: Int64
    last: Int64
    chunks: Int64
    ends: Int64
    depth: Int64


def _split(items: Int32, pieces: _Pieces, positions: Int64, begins: Int64, bounds: Bounds) -> tuple[Int32, list[Int32]]:
    """Items in the order of their tasks, and the tasks by round. begins [R]: where the run of each row begins."""
    pieces, groups = _grouped(pieces, begins)
    if not _is_tree(groups):
        items = _row_by_row(items)
        pieces, groups = _grouped(_pieces(items), np.arange(len(positions)))
    walked, firsts = _with_room(items, pieces, groups, positions)
    tiles = -(-(groups.high - groups.low) // bounds.rows_together)
    which = np.repeat(np.arange(len(tiles)), tiles)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    groups = _Groups(*(each.take(which) for each in groups))
    begin = groups.low + nth * bounds.rows_together
    end = np.minimum(begin + bounds.rows_together, groups.high)
    # Of one run's rows none sees further than the last.
    alone = begins.take(end - 1) <= begin
    seen = np.where(alone, (positions.take(end - 1) - groups.key) // CHUNK + 1, groups.chunks)
    tasks = _tasks(begin, end, firsts.take(which), np.minimum(groups.chunks, seen))
    depth, useful = groups.depth, seen > 0
    rounds = [tasks.compress(useful & (depth == turn), axis=0) for turn in range(int(depth.max()) + 1)]
    return walked, [_longest_first(each) for each in rounds]


def _pieces(items: Int32) -> _Pieces:
    """The items in as few pieces as follow one another."""
    rows, key = np.ascontiguousarray(items).view(np.int64)[:, 1], items[:, 1]
    new = np.ones(len(items), dtype=bool)
    new[1:] = (rows[1:] != rows[:-1]) | (key[1:] - key[:-1] != CHUNK) | (key[1:] & (SPAN - 1) == 0)
    first = np.flatnonzero(new)
    _, key, low, high = np.ascontiguousarray(items.take(first, axis=0).T, dtype=np.int64)
    return _Pieces(first, _lengths(first, len(items)), key, low, high)


def _lengths(begins: Int64, end: int) -> Int64:
    """Of stretches that begin there, the last of which ends at `end`."""
    lengths = np.empty_like(begins)
    np.subtract(begins[1:], begins[:-1], out=lengths[:-1])
    lengths[-1:] = end - begins[-1:]
    return lengths


def _row_by_row(items: Int32) -> Int32:
    """Each item once for each of its rows."""
    lengths = items[:, 3] - items[:, 2]
    items = np.repeat(items, lengths, axis=0)
    items[:, 2] += _counted(lengths).astype(np.int32)
    items[:, 3] = items[:, 2] + 1
    return items


def _counted(lengths: Int64) -> Int64:
    """0, 1, ... of each length, one after another."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)


def _grouped(pieces: _Pieces, begins: Int64) -> tuple[_Pieces, _Groups]:
    """The pieces in the order of their groups, and the groups."""
    rows = len(begins) + 1
    low, high, span = begins.take(pieces.low), pieces.high, pieces.key >> SPAN_BITS
    owner = (span * rows + low) * rows + (rows - high)
    order = np.argsort((owner << SPAN_BITS) + (pieces.key & (SPAN - 1)), kind="stable")
    pieces, owner = _Pieces(*(each.take(order) for each in pieces)), owner.take(order)
    new = np.ones(len(order), dtype=bool)
    np.not_equal(owner[1:], owner[:-1], out=new[1:])
    first = np.flatnonzero(new)
    ends = first + _lengths(first, len(order)) - 1
    begin = order.take(first)
    low, high, span = low.take(begin), high.take(begin), span.take(begin)
    last = pieces.key.take(ends) + (pieces.chunks.take(ends) - 1) * CHUNK
    # Ranges of rows lie within one another or apart: those that begin before a row and have not ended hold it.
    before = span * (2 * rows)
    ended = np.searchsorted(np.sort(before + high), before + low, side="right")
    depth = np.arange(len(first)) - ended
    chunks = np.add.reduceat(pieces.chunks, first)
    return pieces, _Groups(low, high, pieces.key.take(first), last, chunks, ends, depth)


def _is_tree(groups: _Groups) -> bool:
    """Whether every group's rows are among those of the group before it in their span, and its keys lie behind."""
    whole = groups.last - groups.key == (groups.chunks - 1) * CHUNK
    if not whole.all():
        return False
    for depth in range(1, int(groups.depth.max()) + 1):
        here, above = np.flatnonzero(groups.depth == depth), np.flatnonzero(groups.depth == depth - 1)
        if not len(above):
            return False
        parent = above[np.searchsorted(above, here) - 1]
        holds = (parent < here) & (groups.high[parent] >= groups.high[here])
        if not (holds & (groups.last[parent] < groups.key[here])).all():
            return False
    return True


def _with_room(items: Int32, pieces: _Pieces, groups: _Groups, positions: Int64) -> tuple[Int32, Int64]:
    """The items group by group, with room behind some, and where each group begins."""
    alone = groups.high - groups.low == 1
    newest = alone & (groups.last == positions.take(groups.low) // CHUNK * CHUNK)
    room = np.where(newest, SPAN_CHUNKS - (groups.key & (SPAN - 1)) // CHUNK, groups.chunks)
    taken = pieces.chunks.copy()
    taken[groups.ends] += room - groups.chunks
    number = _counted(taken) + np.repeat(pieces.first, taken)
    # What lies in the room is never read.
    return items.take(number, axis=0, mode="clip"), np.cumsum(room) - room


def _flash(
    items: Int32, positions: Int64, edges: Int64, split: Bools, bounds: Bounds, window: int | None, offset: int
) -> tuple[Int32, Int32]:
    """Items and tasks of the runs that are not split. offset: number of the first of these items."""
    walked, tasks = [], []
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if split[begin]:
            continue
        mine = items[(items[:, 2] < end) & (items[:, 3] > begin)]
        mine = mine[np.argsort(mine[:, 1], kind="stable")]
        low = np.arange(begin, end, bounds.flash_rows)
        high = np.minimum(low + bounds.flash_rows, end)
        seen = np.searchsorted(mine[:, 1], positions[high - 1], side="right")
        first = np.zeros(len(low), dtype=np.int64)
        if window is not None:
            first = np.searchsorted(mine[:, 1], first_seen(positions[low], window) - CHUNK, side="right")
        tasks.append(_tasks(low, high, offset + first, seen - first))
        walked.append(mine)
        offset += len(mine)
    return np.concatenate(walked), _longest_first(np.concatenate(tasks))


def _tasks(begin: Int64, end: Int64, first: Int64, count: Int64) -> Int32:
    return np.stack((begin, end, first, count), axis=1).astype(np.int32)


def _longest_first(tasks: Int32) -> Int32:
    """What is left at the end is short then."""
    return tasks.take(np.argsort(-tasks[:, 3], kind="stable"), axis=0)
