"""How a plan becomes work for a GPU: tasks of some rows, each of which walks some chunks. Plain data, no tensors.

A lane is one (row, query head). Keys are cut into spans of fixed length at fixed positions. A row's chunks are merged
from left to right within a span, and its spans from left to right: that order is the GPU's canonical one (docs/gpu.md),
whichever of two ways is taken.

    flash   a task walks all chunks of its rows and merges span by span: for many rows
    split   a task walks one span, and leaves its state to be merged: for few rows, so that many tasks are under way.
            Rows of one task part where the tree does: those with the later chunks go on from the state of their parent,
            in the next round (ChunkAttention, arXiv 2402.15220, section 3.3, at every level of the tree)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
SPAN = 512
"""Keys of a span. Part of the canonical order: another length gives other bits."""

LANES = 64
"""Of a task: rows of a tensor core's product."""


@dataclass(frozen=True, slots=True)
class TileRound:
    """tasks int32 [n, 4]: (first row, row after the last, first item, number of items). None needs another."""

    tasks: Int32


@dataclass(frozen=True, slots=True)
class TileSchedule:
    """items int32 [m, 4]: those of a plan in the order of the tasks that walk them, some of them several times.

    rounds: one after another; each but the first goes on from the states that those before it left. split: see above.
    """

    items: Int32
    rounds: list[TileRound]
    split: bool


@dataclass(slots=True)
class _Task:
    """Rows begin..end-1 in one span, which meet `items` (their numbers) in `depth`-th place."""

    begin: int
    end: int
    depth: int
    items: list[int] = field(default_factory=list)


def rows_together(group: int) -> int:
    """Rows of a task, where each is `group` lanes."""
    return max(1, LANES // group)


def flash(items: Int32, rows: int, group: int) -> TileSchedule:
    """Tasks that walk all chunks of their rows. items as in Plan, of `rows` rows in all."""
    by_key = items[np.argsort(items[:, 1], kind="stable")]
    begins = np.arange(0, rows, rows_together(group), dtype=np.int32)
    ends = np.minimum(begins + rows_together(group), rows).astype(np.int32)
    met = (by_key[None, :, 2] < ends[:, None]) & (by_key[None, :, 3] > begins[:, None])
    _, which = np.nonzero(met)
    counts = met.sum(axis=1, dtype=np.int32)
    firsts = np.cumsum(counts, dtype=np.int32) - counts
    tasks = np.stack((begins, ends, firsts, counts), axis=1).astype(np.int32)
    # The longest first: what is left at the end is short.
    order = np.argsort(-counts, kind="stable")
    return TileSchedule(
        np.ascontiguousarray(by_key[which]), [TileRound(np.ascontiguousarray(tasks[order]))], split=False
    )


def split(items: Int32, rows: int, group: int) -> TileSchedule:
    """Tasks of one span each. items as in Plan, of `rows` rows in all."""
    tasks = _spans(items, rows)
    walked: list[int] = []
    rounds: list[list[tuple[int, int, int, int]]] = [[] for _ in range(max((t.depth + 1 for t in tasks), default=0))]
    for task in sorted(tasks, key=lambda task: -len(task.items)):
        for begin in range(task.begin, task.end, rows_together(group)):
            end = min(begin + rows_together(group), task.end)
            mine = [i for i in task.items if items[i, 2] < end and items[i, 3] > begin]
            rounds[task.depth].append((begin, end, len(walked), len(mine)))
            walked += mine
    made = [TileRound(np.array(each, dtype=np.int32)) for each in rounds]
    return TileSchedule(np.ascontiguousarray(items[walked]), made, split=True)


def _spans(items: Int32, rows: int) -> list[_Task]:
    """One task for each set of rows that meets the same chunks of a span, a row's later ones deeper than its first."""
    tasks: list[_Task] = []
    last = np.full(rows, -1)
    span = -1
    order = np.argsort(items[:, 1], kind="stable")
    keys = items[order, 1]
    for key in np.unique(keys):
        if key // SPAN != span:
            span = key // SPAN
            last[:] = -1
        begin, end = np.searchsorted(keys, (key, key + 1))
        _column(items, order[begin:end].tolist(), last, tasks)
    return tasks


def _column(items: Int32, column: list[int], last: np.ndarray, tasks: list[_Task]) -> None:
    """The items of one position: each goes on with the task of its rows if no other does, or begins one."""
    parents = []
    for i in column:
        rows = last[items[i, 2] : items[i, 3]]
        parents.append(int(rows[0]) if (rows == rows[0]).all() else -2)
    for i, parent in zip(column, parents, strict=True):
        if parent >= 0 and parents.count(parent) == 1 and -2 not in parents:
            tasks[parent].items.append(i)
            continue
        begin, end = int(items[i, 2]), int(items[i, 3])
        before = last[begin:end]
        depth = max((tasks[j].depth + 1 for j in np.unique(before).tolist() if j >= 0), default=0)
        last[begin:end] = len(tasks)
        tasks.append(_Task(begin, end, depth, [i]))
