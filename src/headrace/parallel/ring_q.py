"""Ring pass-Q (context parallelism, arXiv 2411.01783, section 3.4 and algorithms 3 and 4), for prefill and for decode.

Queries go round the ring; every rank attends for them to the keys that it owns, and the states come home by all-to-all.
T: rows of a rank in the group, Hq: query heads, D: head size.

What comes home is one unnormalised state for each row and block of 2,048 keys (on a GPU 512), not one for each rank:
the home merges blocks from left to right, which gives the bits of one rank. Where a block has several owners its state
goes from one to the next (parallel.split_blocks).
New keys go first of all to the owner of their chunk. A rank that has no rows sends none, and one that owns none of
the chunks is not visited: small batches need no dummy queries.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headrace.attention import plan as planning
from headrace.attention.plan import Int32
from headrace.kernels.indexer import IndexQueries
from headrace.kernels.records import Pool
from headrace.kernels.state import Partial, RunningState, StateRows, flattened, part_of, unflattened
from headrace.parallel import group_layout
from headrace.parallel.group_context import GroupContext
from headrace.parallel.key_places import KINDS, KeyPlacing
from headrace.parallel.merging import Kept
from headrace.parallel.split_blocks import SplitBlocks, SplitOf, split_blocks
from headrace.parallel.transport import Tag, Transfer
from headrace.planner.schedule import ring_hops, ring_next, ring_origin
from headrace.types import CHUNK

QUERIES, STATES = range(2)
"""What a message holds, beside key_places.KEYS; its tag's piece also names a rank."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows begin .. end-1 of a home meet keys of one block on one rank."""

    block: int
    begin: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Visit:
    """The rows of one home on one rank: its rows repeated for each segment, and the items over that rank's pool.

    positions int64 [sum of segments' rows]; items int32 [n, 4]; kept: see Mask.
    """

    segments: list[Segment]
    positions: Tensor
    items: Tensor
    kept: Kept = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(self.positions)

    def repeat(self, q: Tensor) -> Tensor:
        """q [T, Hq, D] -> [rows, Hq, D]."""
        if len(self.segments) == 1 and self.rows == len(q):
            return q
        return torch.cat([q[each.begin : each.end] for each in self.segments])


def visit(
    context: GroupContext, runs: list[group_layout.RowRange], host: int, window: int | None, split: SplitOf
) -> Visit:
    """What the rows of a home, in `runs`, have to do on `host` in blocks that are not split; no segments if it owns
    nothing that they see of these."""
    spans, per_rank, length = [], context.slots_per_rank, context.kernels.block_chunks
    for run in runs:
        slots = group_layout.slots_of(context.group, run)
        here = np.where(slots // per_rank == host, slots % per_rank, -1).astype(np.int32)
        for block in split.get(run.part, ()):
            here[block * length : (block + 1) * length] = -1
        spans.append(planning.Span(here, run.start, run.rows))
    plan = planning.build(spans)
    return _by_block(plan.items_within(window), plan.positions, length)


def _by_block(items: Int32, positions: planning.Int64, block_chunks: int) -> Visit:
    segments: list[Segment] = []
    parts: list[Int32] = []
    offset = 0
    blocks = items[:, 1] // (CHUNK * block_chunks)
    for block in np.unique(blocks).tolist():
        chosen = items[blocks == block].copy()
        begin, end = int(chosen[:, 2].min()), int(chosen[:, 3].max())
        segments.append(Segment(block, begin, end))
        chosen[:, 2:] += offset - begin
        parts.append(chosen)
        offset += end - begin
    repeated = [positions[each.begin : each.end] for each in segments]
    return Visit(
        segments,
        torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *repeated])),
        torch.from_numpy(np.concatenate([np.empty((0, 4), dtype=np.int32), *parts])),
    )


class RingQ(KeyPlacing):
    """Attention of one group on one rank."""

    def __init__(self, context: GroupContext) -> None:
        super().__init__(context)
        group, per_rank = context.group, context.slots_per_rank
        windows = context.kernels.spec.windows
        split = split_blocks(group, per_rank, context.kernels.block_chunks)
        self.visits = {window: _QueryVisits(context, window, split, wanted=False) for window in set(windows)}
        self.last = _QueryVisits(context, windows[-1], split, wanted=True)

    def sparse(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: IndexQueries | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Of rows none of which leaves a key out (parallel.fetched_keys)."""
        width = self.context.kernels.spec.index_width
        return self(layer, torch.nn.functional.pad(q, (width, 0)), k, v, rows)[..., width:]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        context = self.context
        stored = context.storage.pool(layer)
        last = context.cuts and layer + 1 == context.layers
        visits = self.last if last else self.visits[context.kernels.spec.windows[layer]]
        q = q if rows is None else q[rows]
        coming = self.expect_keys(layer, k)
        guests = visits.expect(layer, q)
        mine = q.contiguous()
        outgoing = self.send_keys(layer, k, v) + visits.send_queries(layer, mine)
        homecoming = visits.expect_states(layer, q)
        context.wait_for_own(layer)  # before a chunk that comes is written in
        self.store(stored, k, v, coming)
        own = visits.attend(layer, mine, self.rank, stored)
        for home, (theirs, works) in guests.items():
            for work in works:
                work.wait()
            outgoing += visits.send_states(layer, home, visits.attend(layer, theirs, home, stored))
        queries = {self.rank: mine, **{home: theirs for home, (theirs, _) in guests.items()}}
        continued, sends = visits.split_blocks.attend(layer, queries, stored)
        outgoing += sends
        out = visits.merged(layer, own, homecoming, continued, q)
        for work in (*outgoing, *(work for _, works in guests.values() for work in works)):
            work.drain()
        return out


class _QueryVisits:
    """Who visits whom, for layers with the same window."""

    def __init__(self, context: GroupContext, window: int | None, split: SplitOf, *, wanted: bool) -> None:
        """wanted: of the rows whose hidden states are wanted only.

        hosting[home]: that rank's rows here; abroad[host]: own rows there; last[home]: hops its queries make;
        lengths[home]: its rows.
        """
        self.context, self.rank, self.size = context, context.rank, context.transport.size
        self.hosting: dict[int, Visit] = {}
        self.abroad: dict[int, Visit] = {}
        self.last: dict[int, int] = {}
        self.lengths: dict[int, int] = {}
        self.split_blocks = SplitBlocks(context, window, first_piece=KINDS * self.size)
        for home in range(self.size):
            self._add(home, group_layout.runs(context.group, home, wanted=wanted), window, split)

    def _add(self, home: int, runs: list[group_layout.RowRange], window: int | None, split: SplitOf) -> None:
        self.lengths[home] = sum(run.rows for run in runs)
        if not runs:
            return
        hosts = {host: visit(self.context, runs, host, window, split) for host in range(self.size)}
        reached = self.split_blocks.add(home, runs, split) | {host for host, each in hosts.items() if each.rows}
        self.last[home] = ring_hops(home, reached, self.size)
        self.hosting[home] = hosts[self.rank]
        if home == self.rank:
            self.abroad = hosts

    def expect(self, layer: int, q: Tensor) -> dict[int, tuple[Tensor, list[Transfer]]]:
        """Posts the receives of queries that come by, and sends them on where they have further to go."""
        guests = {}
        before, after = ring_origin(self.rank, 1, self.size), ring_next(self.rank, self.size)
        for home, hops in self.last.items():
            distance = (self.rank - home) % self.size
            if home == self.rank or distance > hops:
                continue
            rows = q.new_empty(self.lengths[home], *q.shape[1:])
            relay = after if distance < hops else None
            works = [self.context.transport.irecv(rows, before, self._tag(layer, QUERIES, home), relay)]
            guests[home] = (rows, works)
        return guests

    def _tag(self, layer: int, kind: int, rank: int) -> Tag:
        return self.context.tag(layer, kind * self.size + rank)

    def send_queries(self, layer: int, q: Tensor) -> list[Transfer]:
        if not self.last.get(self.rank):
            return []
        tag = self._tag(layer, QUERIES, self.rank)
        return [self.context.transport.isend(q, ring_next(self.rank, self.size), tag)]

    def attend(self, layer: int, q: Tensor, home: int, stored: Pool) -> RunningState | None:
        """The states of a home's rows over what is stored here."""
        visit = self.hosting.get(home)
        if visit is None or not visit.rows:
            return None
        queries = visit.repeat(q)
        return self.context.kernels.partial(layer, queries, stored, visit.items, visit.positions, None, visit.kept)

    def send_states(self, layer: int, home: int, state: RunningState | None) -> list[Transfer]:
        if state is None:
            return []
        return [self.context.transport.isend(flattened(state.block), home, self._tag(layer, STATES, self.rank))]

    def expect_states(self, layer: int, q: Tensor) -> dict[int, tuple[Partial, Transfer]]:
        found = {}
        for host, visit in self.abroad.items():
            if host != self.rank and visit.rows:
                flat = q.new_empty(visit.rows * q.shape[1] * (q.shape[2] + 2), dtype=torch.float32)
                work = self.context.transport.irecv(flat, host, self._tag(layer, STATES, host))
                found[host] = (unflattened(flat, visit.rows, *q.shape[1:]), work)
        return found

    def merged(
        self,
        layer: int,
        own: RunningState | None,
        homecoming: dict[int, tuple[Partial, Transfer]],
        continued: list[tuple[int, Partial]],
        q: Tensor,
    ) -> Tensor:
        """All states of this rank's rows, those of split blocks among them, from left to right: [T, Hq, D] in q's
        dtype."""
        if not len(q):
            return q
        states = {} if own is None else {self.rank: own.block}
        for host, (partial, work) in homecoming.items():
            work.wait()
            states[host] = partial
        backend = self.context.kernels.backend
        rows, heads, dim = q.shape
        total = backend.empty_running(rows, heads, dim, q.dtype)
        found = [(Segment(block, 0, len(q)), state) for block, state in continued]
        for host, state in states.items():
            offset = 0
            for segment in self.abroad[host].segments:
                found.append((segment, part_of(state, offset, offset + segment.rows)))
                offset += segment.rows
        ordered = sorted(found, key=lambda each: each[0].block)
        blocks = [StateRows(segment.begin, segment.end, state) for segment, state in ordered]
        backend.merge_into(total.total, blocks, total.unit)
        return self.context.kernels.finish(layer, total, q.dtype)
