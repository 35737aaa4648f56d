"""Ring pass-Q over blocks of which several ranks own chunks: a row's running state goes from owner to owner.

T: rows of a rank in the group, Hq: query heads, D: head size, B: split blocks that a rank's rows see, n: rows of a
visit. A stretch: neighbouring chunks of a block with one owner.

A block's chunks are merged from left to right (docs/attention.md), so one rank must continue the state that another has
begun: pieces merged apart would round otherwise. In round r the rows meet the r-th stretch of each split block. Between
rounds their states are at the rows' home, which sends each to the owner of its next stretch. All ranks go through the
rounds in one order, so that none waits for a rank that waits for it.

The cache splits a block only where its owner is full. Without such blocks there are no rounds, and no cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.attention import plan as planning
from headrace.attention.execute import items_of
from headrace.attention.plan import Int32
from headrace.kernels.records import Pool
from headrace.kernels.state import Partial, RunningState, flattened, part_of, put, taken, unflattened
from headrace.parallel.group_context import GroupContext
from headrace.parallel.group_layout import RowRange, slots_of
from headrace.parallel.merging import Kept
from headrace.parallel.messages import StepGroup
from headrace.parallel.transport import Tag, Transfer
from headrace.types import BLOCK_CHUNKS

SplitOf = Mapping[int, frozenset[int]]
"""By part of a group: its blocks that lie on several ranks. Most parts have none and are left out."""

TO_HOST, TO_HOME = 0, 1
"""Which way states travel."""


def split_blocks(group: StepGroup, per_rank: int, block_chunks: int = BLOCK_CHUNKS) -> SplitOf:
    found = {}
    for index, part in enumerate(group.parts):
        owners = np.array(part.slots, dtype=np.int32) // per_rank
        begins = np.arange(0, len(owners), block_chunks)
        several = np.minimum.reduceat(owners, begins) != np.maximum.reduceat(owners, begins)
        if several.any():
            found[index] = frozenset(np.flatnonzero(several).tolist())
    return found


def stretches(owners: Int32, block_chunks: int = BLOCK_CHUNKS) -> Int32:
    """The owner of each chunk -> the number of its stretch in its block, from 0."""
    count = np.cumsum(np.diff(owners, prepend=owners[0]) != 0, dtype=np.int32)
    return count - np.repeat(count[::block_chunks], block_chunks)[: len(owners)]


class StretchVisit(NamedTuple):
    """Rows of a home that meet stretches on `host`, once for each block.

    rows int64 [n]: which of the home's; places int64 [n]: where their states are among the home's, [B * T].
    positions int64 [n]; blocks int32 [n]; items int32 [k, 4], over the host's pool; kept: see Mask.
    """

    home: int
    host: int
    rows: Tensor
    places: Tensor
    positions: Tensor
    blocks: Tensor
    items: Tensor
    kept: Kept


class HomeBlocks:
    """The split blocks that the rows of a home, in `runs`, see: `blocks`, ascending."""

    def __init__(self, context: GroupContext, home: int, runs: list[RowRange], split: SplitOf) -> None:
        self.home, self.size, self.per_rank = home, context.transport.size, context.slots_per_rank
        length = context.kernels.block_chunks
        self.blocks = sorted({block for run in runs for block in split.get(run.part, ())})
        self.runs = runs * len(self.blocks)
        self.tables = [
            _only(slots_of(context.group, run), block if block in split.get(run.part, ()) else -1, length)
            for block in self.blocks
            for run in runs
        ]
        self.numbers = [stretches(table // self.per_rank, length) for table in self.tables]

    def rounds(self, window: int | None) -> list[list[StretchVisit]]:
        count = 1 + max((int(each.max()) for each in self.numbers), default=-1)
        found = [[self._visit(number, host, window) for host in range(self.size)] for number in range(count)]
        return [[visit for visit in each if visit is not None] for each in found]

    def _visit(self, number: int, host: int, window: int | None) -> StretchVisit | None:
        """None if no row sees a chunk of such a stretch."""
        spans = []
        for run, table, numbers in zip(self.runs, self.tables, self.numbers, strict=True):
            here = (numbers == number) & (table // self.per_rank == host)
            local = np.where(here, table % self.per_rank, -1).astype(np.int32)
            spans.append(planning.Span(local, run.start, run.rows))
        plan = planning.build(spans)
        items = torch.from_numpy(plan.items_within(window))
        if not len(items):
            return None
        meets = np.zeros(plan.rows, dtype=bool)
        for begin, end in items[:, 2:].tolist():
            meets[begin:end] = True
        places = np.flatnonzero(meets)
        block, rows = np.divmod(places, plan.rows // len(self.blocks))
        blocks = torch.tensor(self.blocks, dtype=torch.int32)[torch.from_numpy(block)]
        which = torch.from_numpy(places)
        return StretchVisit(
            self.home, host, torch.from_numpy(rows), which, torch.from_numpy(plan.positions)[which], blocks,
            items_of(items, which), {},
        )  # fmt: skip


def _only(slots: Int32, block: int, block_chunks: int) -> Int32:
    """-1 in place of the slots of other blocks."""
    return np.where(np.arange(len(slots)) // block_chunks == block, slots, -1).astype(np.int32)


class SplitBlocks:
    """What a rank does for split blocks in layers with the same window: it hosts all homes' rows and holds its own."""

    def __init__(self, context: GroupContext, window: int | None, first_piece: int) -> None:
        """first_piece: from there on the pieces of tags are its own."""
        self.context, self.rank, self.window, self.first_piece = context, context.rank, window, first_piece
        self.blocks: list[int] = []
        self.rounds: list[list[StretchVisit]] = []

    def add(self, home: int, runs: list[RowRange], split: SplitOf) -> set[int]:
        """Takes in the rows of a home; returns the ranks that its queries must reach. Homes are added in one order."""
        if not split:
            return set()
        rows = HomeBlocks(self.context, home, runs, split)
        if home == self.rank:
            self.blocks = rows.blocks
        rounds = rows.rounds(self.window)
        self.rounds += [[] for _ in rounds[len(self.rounds) :]]
        for known, new in zip(self.rounds, rounds, strict=False):
            known += new
        return {visit.host for each in rounds for visit in each}

    def attend(
        self, layer: int, queries: Mapping[int, Tensor], stored: Pool
    ) -> tuple[list[tuple[int, Partial]], list[Transfer]]:
        """queries: [T, Hq, D] of this rank and of each home that has visits here. Returns each split block that this
        rank's rows see, with the states of all of them (EMPTY where theirs is not split), and sends under way."""
        if not self.rounds:
            return [], []
        mine = queries[self.rank]
        rows, sends = len(mine), []
        held = self._empty(len(self.blocks) * rows, mine).block
        for number, visits in enumerate(self.rounds):
            away = [visit for visit in visits if visit.home == self.rank != visit.host]
            if number:
                sends += [self._send(layer, number, TO_HOST, visit.host, taken(held, visit.places)) for visit in away]
            for visit in visits:
                if visit.host == self.rank:
                    sends += self._host(layer, number, visit, queries[visit.home][visit.rows], stored, held)
            for visit in away:
                put(held, visit.places, self._receive(layer, number, TO_HOME, visit.host, mine[visit.rows]))
        return [(block, part_of(held, i * rows, (i + 1) * rows)) for i, block in enumerate(self.blocks)], sends

    def _host(
        self, layer: int, number: int, visit: StretchVisit, q: Tensor, stored: Pool, held: Partial
    ) -> list[Transfer]:
        """Merges the stretches of a visit into its rows' states, which it sends home."""
        state = None
        if number and visit.home == self.rank:
            state = taken(held, visit.places)
        elif number:
            state = self._receive(layer, number, TO_HOST, visit.home, q)
        begun = None if state is None else replace(self._empty(len(q), q), block=state, block_of=visit.blocks)
        kernels = self.context.kernels
        done = kernels.partial(layer, q, stored, visit.items, visit.positions, begun, visit.kept).block
        if visit.home == self.rank:
            put(held, visit.places, done)
            return []
        return [self._send(layer, number, TO_HOME, visit.home, done)]

    def _empty(self, rows: int, like: Tensor) -> RunningState:
        """As many rows of heads like these [.., Hq, D]."""
        _, heads, dim = like.shape
        return self.context.kernels.backend.empty_running(rows, heads, dim, like.dtype)

    def _send(self, layer: int, number: int, way: int, to: int, states: Partial) -> Transfer:
        return self.context.transport.isend(flattened(states), to, self._tag(layer, number, way))

    def _receive(self, layer: int, number: int, way: int, source: int, q: Tensor) -> Partial:
        """The states of rows q [n, Hq, D]."""
        rows, heads, dim = q.shape
        flat = q.new_empty(rows * heads * (dim + 2), dtype=torch.float32)
        self.context.transport.irecv(flat, source, self._tag(layer, number, way)).wait()
        return unflattened(flat, rows, heads, dim)

    def _tag(self, layer: int, number: int, way: int) -> Tag:
        return self.context.tag(layer, self.first_piece + 2 * number + way)
