"""Staging: two buffers in fast memory through which the chunks of a step pass, and how a step is cut to fit them.

T: rows of a batch, n: chunks of a piece, C: chunks that a buffer holds.
A piece is what one buffer takes at a time: chunks to project from X, chunks to load, and chunks that this step begins:

    | projected | loaded | fresh |        staging slots 0 .. n-1
    0           p        q       n
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace import memory
from headrace.attention.plan import Int32, Plan
from headrace.config import AttentionSpec
from headrace.kernels.records import Allocate, Pool
from headrace.offload.copy_streams import copy_alone
from headrace.offload.streaming.store import OutsideStore
from headrace.types import CHUNK


@dataclass(frozen=True, slots=True, eq=False)
class StagingPiece:
    """Chunks that attention takes from one staging buffer. slots [n]: where they lie in the store, in staging order.

    items [m, 4]: as in Plan.items, slots being staging slots. rows int64: rows of the batch whose new keys and values
    belong to these chunks, with their staging slots and offsets. first_rows [projected]: a row that attends each
    projected chunk. keys [projected]: position of each projected chunk's first key.
    """

    slots: Int32
    projected: int
    loaded: int
    items: Int32
    rows: NDArray[np.int64]
    row_slots: Int32
    row_offsets: Int32
    keys: NDArray[np.int64]
    first_rows: NDArray[np.int64]

    @property
    def to_project(self) -> Int32:
        return self.slots[: self.projected]

    @property
    def written(self) -> list[int]:
        """Staging slots of the chunks that its rows are written to."""
        return sorted(set(self.row_slots.tolist()))

    @property
    def to_load(self) -> Int32:
        return self.slots[self.projected : self.projected + self.loaded]


@dataclass(frozen=True, slots=True)
class ChunkCounts:
    """Chunks of an operation: stored ones, and those of them that may be projected."""

    stored: int
    whole: int


class StagingPlan:
    """How one batch meets its chunks in one kind of layer (window, rows): cut once, projected more or less each time.

    items: those of the plan to be attended. Raises ValueError where one chunk does not fit.
    """

    def __init__(self, plan: Plan, items: Int32, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"staging for {capacity} chunks holds none; raise offload_staging_mb")
        self.plan = plan
        self.parts = _cut(items[np.argsort(items[:, 1], kind="stable")], capacity)
        written = np.unique(plan.row_slots)
        self.written = written
        self.fresh = np.unique(plan.row_slots[plan.row_offsets == 0])
        slots = np.unique(items[:, 0])
        self.counts = ChunkCounts(int(np.isin(slots, self.fresh, invert=True).sum()),
                             int(np.isin(slots, written, invert=True).sum()))  # fmt: skip

    def pieces(self, projected: int) -> list[StagingPiece]:
        """The pieces, with the first `projected` chunks (by position; whole ones only) projected from X."""
        left, found = projected, []
        for items in self.parts:
            piece = self._piece(items, left)
            left -= piece.projected
            found.append(piece)
        return found

    def _piece(self, items: Int32, most: int) -> StagingPiece:
        # In order of position: parts are sorted by it.
        slots, first = np.unique(items[:, 0], return_index=True)
        order = np.argsort(first, kind="stable")
        slots, first = slots[order], first[order]
        fresh, whole = np.isin(slots, self.fresh), np.isin(slots, self.written, invert=True)
        project = whole & (np.cumsum(whole) <= most)
        kind = np.where(project, 0, np.where(fresh, 2, 1))
        order = np.argsort(kind, kind="stable")
        slots, first, projected = slots[order], first[order], int(project.sum())
        renumber = _lookup(slots)
        mine = items.copy()
        mine[:, 0] = renumber(items[:, 0])
        rows = np.flatnonzero(np.isin(self.plan.row_slots, slots))
        return StagingPiece(
            slots, projected, int((kind == 1).sum()), mine, rows, renumber(self.plan.row_slots[rows]),
            self.plan.row_offsets[rows], items[first[:projected], 1].astype(np.int64),
            items[first[:projected], 2].astype(np.int64),
        )  # fmt: skip


def _cut(items: Int32, capacity: int) -> list[Int32]:
    """Items in order, in parts of at most `capacity` chunks."""
    parts, begin, seen = [], 0, set[int]()
    for index, slot in enumerate(items[:, 0].tolist()):
        if slot not in seen and len(seen) == capacity:
            parts.append(items[begin:index])
            begin, seen = index, set()
        seen.add(slot)
    parts.append(items[begin:])
    return parts


def _lookup(slots: Int32) -> Callable[[Int32], Int32]:
    """Store slot -> its place in `slots`, all of which are there."""
    order = np.argsort(slots)
    ranked = slots[order]
    return lambda wanted: order[np.searchsorted(ranked, wanted)].astype(np.int32)


class Staging:
    """Two buffers of `capacity` chunks of one layer, with X where that is kept, in fast memory (allocate)."""

    def __init__(
        self,
        spec: AttentionSpec,
        capacity: int,
        dtype: torch.dtype,
        rows: torch.dtype,
        hidden: int,
        allocate: Allocate = memory.zeros,
    ) -> None:
        self.capacity = capacity
        sizes = spec.kv_heads, spec.head_dim, dtype
        self.kv = [Pool.make(capacity, *sizes, allocate, spec.once) for _ in range(2)]
        self.x = [allocate((capacity, CHUNK, hidden), rows) for _ in range(2 if hidden else 0)]

    def load_kv(self, buffer: int, store: OutsideStore, layer: int, piece: StagingPiece) -> None:
        """Copies K and V of the piece's loaded chunks; the rest of the buffer is left alone."""
        for into, pool in zip(self.kv[buffer].tensors, store.pools[layer].tensors, strict=True):
            gather(into, pool, piece.to_load, piece.projected)

    def store_kv(self, buffer: int, store: OutsideStore, layer: int, piece: StagingPiece) -> None:
        """Copies K and V of the chunks that the piece's rows are written to back into the store, each whole."""
        for pool, staged in zip(store.pools[layer].tensors, self.kv[buffer].tensors, strict=True):
            for mine in piece.written:
                copy_alone(pool[int(piece.slots[mine])], staged[mine])

    def load_x(self, buffer: int, store: OutsideStore, layer: int, piece: StagingPiece) -> None:
        """Copies X of the piece's projected chunks."""
        gather(self.x[buffer], store.x[layer], piece.to_project)


def gather(into: Tensor, pool: Tensor, slots: Int32, first: int = 0) -> None:
    """into[first + i] = pool[slots[i]]; neighbours in the pool go in one copy."""
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    for run in np.split(slots, breaks):
        if len(run):
            low, count = int(run[0]), len(run)
            copy_alone(into[first : first + count], pool[low : low + count])
            first += count


def gather_rows(into: Tensor, rows: Tensor, places: NDArray[np.int64]) -> None:
    """into[places[i]] = rows[i]; neighbours go in one copy."""
    breaks, at = np.flatnonzero(np.diff(places) != 1) + 1, 0
    for run in np.split(places, breaks):
        low, count = int(run[0]), len(run)
        copy_alone(into[low : low + count], rows[at : at + count])
        at += count
