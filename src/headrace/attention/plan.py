"""The plan of a step: which rows meet which chunks, in which order. Plain data, no tensors.

S: sequences of the step, R: rows (query tokens) of all sequences together.
Sharing needs no walk of the tree: two sequences share a chunk where their tables name the same slot, and in
depth-first order (sequences sorted by their slots) those that do stand side by side. Shared chunks come first, each
with all rows of the sequences it covers (ChunkAttention, section 3.3, "chunk first"), at every level of the tree, for
decode and prefill rows alike; then each sequence's own chunks ("sequence first"). A row meets its chunks from left to
right either way, since whatever is shared lies before whatever is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.config.attention import first_seen
from headrace.types import CHUNK

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class Span(NamedTuple):
    """The rows of one sequence in a step: tokens start .. start+rows-1, whose chunks lie in `slots`, int32."""

    slots: Int32
    start: int
    rows: int


@dataclass(frozen=True, slots=True)
class Plan:
    """items [n, 4]: (slot, position of the chunk's first key, first row, row after the last); the first `shared` ones
    cover several sequences. positions [R]: absolute positions. row_slots, row_offsets [R]: where each row's own key
    and value are stored. Rows that lie before a chunk or see none of it through a window are left to the mask."""

    items: Int32
    shared: int
    positions: Int64
    row_slots: Int32
    row_offsets: Int32

    @property
    def rows(self) -> int:
        return len(self.positions)

    def __str__(self) -> str:
        lines = [f"{self.rows} rows, {len(self.items)} items, the first {self.shared} shared"]
        for slot, key, begin, end in self.items.tolist():
            lines.append(f"  slot {slot:5d}  keys {key:6d}..{key + CHUNK - 1:<6d}  rows {begin}..{end - 1}")
        return "\n".join(lines)

    def items_within(self, window: int | None) -> Int32:
        """The items that some row can see through a window (config.attention.Window)."""
        if window is None or not len(self.items):
            return self.items
        # Rows of an item in several sequences are no range of positions: the least one decides.
        edges = self.items[:, 2:4].astype(np.int64).ravel()
        least = np.minimum.reduceat(np.append(self.positions, np.iinfo(np.int64).max), edges)[::2]
        visible = self.items[:, 1] + CHUNK > first_seen(np.maximum(least, self.items[:, 1]), window)
        return self.items[visible]


def batch_order(tables: list[Int32]) -> list[int]:
    """Depth-first order of the tree: indices of `tables` (slots per sequence), sorted so that equal prefixes meet."""
    paths = [slots.astype(">i4").tobytes() for slots in tables]
    return sorted(range(len(paths)), key=paths.__getitem__)


class Chunks(Protocol):
    """The chunks of a sequence (kv.chunk_table.ChunkTable); `changes` counts how often they have changed."""

    @property
    def slots(self) -> Int32: ...

    @property
    def changes(self) -> int: ...


class TableRows(NamedTuple):
    """Tokens start .. start+rows-1 of the sequence that owns the table."""

    table: Chunks
    start: int
    rows: int


class Grown(NamedTuple):
    """A plan that was made of another: its rows go on by one token, and some of them, int64 [n], into a new chunk of
    their own. A row's items are those before and that one."""

    before: Plan
    rows: Int64


class PlannedStep(NamedTuple):
    """A step, as the plan `first` of the step that began a run of steps, and how many `steps` later this one is.

    In a run every sequence goes on by one token in the chunk in which it was: most steps of decoding are such. 0: the
    step begins a run. order: the planned parts in the order of their rows. grown: how `first` was made of the run's
    before it; None: it was built anew.
    """

    first: Plan
    order: list[int]
    steps: int
    grown: Grown | None = None

    @property
    def plan(self) -> Plan:
        """The step's own plan. Its items are the object `first.items`."""
        if not self.steps:
            return self.first
        first, steps = self.first, self.steps
        moved = (first.row_offsets + steps).astype(np.int32, copy=False)
        return replace(first, positions=first.positions + steps, row_offsets=moved)


class Planner:
    """Plans one step after another, and decides which steps follow the one before (PlannedStep)."""

    def __init__(self) -> None:
        self._known: list[tuple[Chunks, int, int]] = []
        self._step = PlannedStep(build([]), [], 0)

    def plan(self, parts: Sequence[TableRows]) -> PlannedStep:
        """The plan of a step over these parts, in batch order (see batch_order)."""
        before, entering = self._step, self._entering(parts)
        if entering == []:
            self._step = before._replace(steps=before.steps + 1)
            return self._step
        grown = None if entering is None else self._grown(parts, entering)
        if grown is not None:
            self._step = grown
            self._know(parts)
            return grown
        slots = [part.table.slots for part in parts]
        order = batch_order(slots)
        first = build([Span(slots[i], parts[i].start, parts[i].rows) for i in order])
        # A chunk beyond the row's own would have an item that begins with a later row at each step.
        decodes = all(p.rows == 1 and p.start // CHUNK == len(p.table.slots) - 1 for p in parts)
        self._know(parts if decodes else [])
        self._step = PlannedStep(first, order, 0)
        return self._step

    def _know(self, parts: Sequence[TableRows]) -> None:
        self._known = [(part.table, part.table.changes, part.start) for part in parts]

    def _entering(self, parts: Sequence[TableRows]) -> list[int] | None:
        """Numbers of the parts whose row begins a chunk, all going on as they were. None: these are not the sequences
        of the step before, in its order, each with its next token and no other change."""
        if not parts or len(parts) != len(self._known):
            return None
        ahead = self._step.steps + 1
        entering = []
        for number, ((table, start, rows), (known, changes, first)) in enumerate(zip(parts, self._known, strict=True)):
            # A table belongs to one sequence, and changes where a chunk begins.
            if table is not known or start != first + ahead or rows != 1:
                return None
            if start % CHUNK:
                if table.changes != changes:
                    return None
            elif table.changes != changes + 1 or len(table.slots) != start // CHUNK + 1:
                return None
            else:
                entering.append(number)
        return entering

    def _grown(self, parts: Sequence[TableRows], entering: list[int]) -> PlannedStep | None:
        """The step in which these parts begin a chunk. None where a chunk is shared that each should have alone."""
        before = self._step
        first = before.first
        rows = np.sort(np.argsort(before.order)[entering])
        slots = np.array([parts[before.order[row]].table.slots[-1] for row in rows.tolist()], dtype=np.int32)
        ended = first.row_slots[rows]
        if _any_of(ended, first.items[: first.shared]) or _any_of(slots, first.items) or len(set(slots)) < len(slots):
            return None
        positions = first.positions + (before.steps + 1)
        row_slots = first.row_slots.copy()
        row_slots[rows] = slots
        new = np.stack((slots, positions[rows], rows, rows + 1), axis=1).astype(np.int32)
        # Behind the shared items each row has its own, in the order of the rows.
        ends = first.shared + np.searchsorted(first.items[first.shared :, 2], rows, side="right")
        pieces, begin = [], 0
        for number, end in enumerate(ends.tolist()):
            pieces += [first.items[begin:end], new[number : number + 1]]
            begin = end
        items = np.concatenate((*pieces, first.items[begin:]))
        plan = Plan(items, first.shared, positions, row_slots, (positions % CHUNK).astype(np.int32))
        return PlannedStep(plan, before.order, 0, Grown(first, rows))


def _any_of(slots: Int32, items: Int32) -> bool:
    """Whether one of the slots is an item's."""
    named = np.zeros(max(items[:, 0].max(initial=0), slots.max(initial=0)) + 1, dtype=bool)
    named[slots] = True
    return bool(named.take(items[:, 0]).any())


def build(spans: list[Span]) -> Plan:
    """The plan of a step over `spans`, which must be in batch order. Every span covers at least one row."""
    if len(spans) == 1:
        return _alone(spans[0])
    counts = np.array([span.rows for span in spans], dtype=np.int64)
    starts = np.array([span.start for span in spans], dtype=np.int64)
    ends = np.cumsum(counts)
    begins = ends - counts
    positions = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - begins, counts)
    grid = _grid(spans)
    sequence = np.repeat(np.arange(len(spans)), counts)
    items, shared = _items(grid, begins, ends, starts)
    return Plan(
        items=items,
        shared=shared,
        positions=positions,
        row_slots=grid[sequence, positions // CHUNK],
        row_offsets=(positions % CHUNK).astype(np.int32),
    )


def _alone(span: Span) -> Plan:
    """The plan of one sequence: a third of the time, of which a draft has one at each step."""
    slots, start, rows = span
    keys = np.arange(0, len(slots) * CHUNK, CHUNK, dtype=np.int32)
    items = np.empty((len(slots), 4), dtype=np.int32)
    items[:, 0], items[:, 1], items[:, 2], items[:, 3] = slots, keys, np.maximum(keys - start, 0), rows
    if slots.min(initial=0) < 0:
        items = items[slots >= 0]  # the others are with other ranks
    positions = np.arange(start, start + rows)
    return Plan(items, 0, positions, slots[positions // CHUNK], (positions % CHUNK).astype(np.int32))


def _grid(spans: list[Span]) -> Int32:
    """Slots as [S, longest], -1 beyond a sequence's end."""
    grid = np.full((len(spans), max((len(span.slots) for span in spans), default=0)), -1, dtype=np.int32)
    for row, span in zip(grid, spans, strict=True):
        row[: len(span.slots)] = span.slots
    return grid


def _items(grid: Int32, begins: Int64, ends: Int64, starts: Int64) -> tuple[Int32, int]:
    """Runs of equal slots down each column of the grid, as items: shared runs by column, then the others by row."""
    sequences, width = grid.shape
    keys = np.arange(0, width * CHUNK, CHUNK)
    every = np.empty((sequences, width, 4), dtype=np.int32)  # of each slot, as if it were its sequence's own
    every[..., 0], every[..., 1], every[..., 3] = grid, keys, ends[:, None]
    # An own chunk is met from its first key on; a shared one may begin with its writer's rows, which the mask knows.
    every[..., 2] = begins[:, None] + np.maximum(keys - starts[:, None], 0)
    flat = every.reshape(-1, 4)
    real, alike = grid >= 0, grid[1:] == grid[:-1]
    alike &= real[1:]
    if not alike.any():
        return flat.take(np.flatnonzero(real), axis=0), 0
    before, after = np.zeros_like(real), np.zeros_like(real)
    before[1:] = after[:-1] = alike
    low, high = _by_column(after & ~before), _by_column(before & ~after)
    shared = flat.take(low, axis=0)
    shared[:, 2], shared[:, 3] = begins.take(low // width), ends.take(high // width)
    own = flat.take(np.flatnonzero(real & ~before & ~after), axis=0)
    return np.concatenate((shared, own)), len(shared)


def _by_column(chosen: NDArray[np.bool_]) -> Int64:
    """Flat indices of what is chosen of a grid, column by column."""
    rows, width = chosen.shape
    column, row = np.divmod(np.flatnonzero(chosen.T), rows)
    at: Int64 = row * width + column
    return at
