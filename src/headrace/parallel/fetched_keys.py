"""Decoding of rows that choose their keys (DSA) from chunks of several ranks: the keys come to the rows.

A row attends to C keys at most, as if they were its whole past, packed into chunks in the order of their positions
(attention.sparse). These chunks hold keys of several ranks, so no rank could merge its part of them alone; and C keys
of a layer are a few megabytes, however long the context is. So each rank that owns chunks scores its own keys for the
rows of every home, and sends the C best of them (values and positions); the home chooses among all, asks each owner for
those of its own, and attends to them as one rank does, to the same bits. Layers that attend to what one before them has
chosen ask for nothing: owners know it still.

T: rows of a home; N, I: heads of the indexer and their size; C: keys that a row chooses; D: numbers stored of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.attention import plan as planning
from headrace.attention.sparse import SparseRows, own_mask
from headrace.config import IndexSpec
from headrace.kernels.backend import Attend, SparseBackend, choosing
from headrace.kernels.indexer import IndexQueries, choose, chunks_of
from headrace.kernels.records import Pool
from headrace.parallel import group_layout
from headrace.parallel.group_context import GroupContext
from headrace.parallel.key_places import KINDS, KeyPlacing
from headrace.parallel.ring_q import RingQ
from headrace.parallel.transport import Tag, Transfer
from headrace.types import CHUNK

QUERIES, WEIGHTS, SCORES, FOUND, ASKED, FETCHED, SCALES = range(KINDS, KINDS + 7)
"""What a message holds, behind key_places.KEYS; its tag's piece also names a rank."""
NOWHERE = torch.iinfo(torch.int32).max
"""In place of a position: of what no row sees."""


def ring_q(context: GroupContext) -> Attend:
    """Attention of a group of strategy ring-q: ring pass-Q, or where rows leave keys out, this."""
    index = context.kernels.spec.index
    far = index is not None and any(part.end > index.chosen for part in context.group.parts)
    return FetchedKeys(context) if far else RingQ(context)


@dataclass(frozen=True)
class Hosted:
    """The rows of a home on one rank that owns chunks of their sequences: `rows` over that rank's pool. best: how many
    keys of it each row hears of."""

    rows: SparseRows
    best: int

    @property
    def count(self) -> int:
        return len(self.rows.positions)


class Chosen(NamedTuple):
    """What the rows of this rank attend to. keys int32 [T, C], where each lies among all that were fetched; counts
    int64 [T]: how many of them a row has. asked: of each owner the places in its pool, int32 [T, C], -1 for none."""

    keys: Tensor
    counts: Tensor
    asked: dict[int, Tensor]


class FetchedKeys(KeyPlacing):
    """Attention of one group on one rank."""

    def __init__(self, context: GroupContext) -> None:
        super().__init__(context)
        self.homes = {home: runs for home in range(self.size) if (runs := group_layout.runs(context.group, home))}
        self.hosted = {
            (home, host): hosted
            for home, runs in self.homes.items()
            for host in range(self.size)
            if self.rank in (home, host) and (hosted := self._hosted(runs, host)) is not None
        }
        self.guests = {home: each for (home, host), each in self.hosted.items() if host == self.rank != home}
        self.hosts = {host: each for (home, host), each in self.hosted.items() if home == self.rank != host}
        self.asked: dict[int, Tensor] = {}
        self.chosen: Chosen | None = None

    @property
    def index(self) -> IndexSpec:
        assert self.context.kernels.spec.index is not None, "the model has indexers"
        return self.context.kernels.spec.index

    @cached_property
    def kernels(self) -> SparseBackend:
        return choosing(self.context.kernels.backend)

    def _hosted(self, runs: list[group_layout.RowRange], host: int) -> Hosted | None:
        """None for a rank without chunks of these rows' sequences."""
        per_rank, spans = self.context.slots_per_rank, []
        for run in runs:
            slots = group_layout.slots_of(self.context.group, run)
            here = np.where(slots // per_rank == host, slots % per_rank, -1).astype(np.int32)
            spans.append(planning.Span(here, run.start, run.rows))
        plan = planning.build(spans)
        items = plan.items_within(None)
        if not len(items):
            return None
        best = min(self.index.chosen, CHUNK * len(np.unique(items[:, 1])))
        rows = SparseRows(
            self.kernels, self.context.kernels.spec, torch.from_numpy(items), torch.from_numpy(plan.positions)
        )
        return Hosted(rows, best)

    # -- one layer

    def sparse(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: IndexQueries | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        out = self._layer(layer, q, k, v, index)
        return out if rows is None else out[rows]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        """Of a rank without rows."""
        self._layer(layer, q, k, v, None)
        return q

    def _layer(self, layer: int, q: Tensor, k: Tensor, v: Tensor, index: IndexQueries | None) -> Tensor:
        stored = self.context.storage.pool(layer)
        coming = self.expect_keys(layer, k)
        sends = self.send_keys(layer, k, v)
        self.context.wait_for_own(layer)  # before a chunk that comes is written in
        self.store(stored, k, v, coming)
        if self.index.own[layer]:
            sends += self._choose(layer, stored, q.dtype, index)
        sends += self._send_fetched(layer, stored, q.dtype)
        out = self._attend(layer, stored, q) if len(q) else q
        for work in sends:
            work.drain()
        return out

    def _choose(self, layer: int, stored: Pool, dtype: torch.dtype, index: IndexQueries | None) -> list[Transfer]:
        """Every rank scores its own keys for all homes, each of which then asks for what its rows choose."""
        sends: list[Transfer] = []
        guests = {home: self._expect_index(layer, home, dtype) for home in self.guests}
        answers = {host: self._expect_best(layer, host) for host in self.hosts}
        if index is not None:
            assert index.weights is not None, "rows choose keys, not blocks"
            for host in self.hosts:
                sends.append(self._send(layer, QUERIES, self.rank, index.q.contiguous(), host))
                sends.append(self._send(layer, WEIGHTS, self.rank, index.weights.contiguous(), host))
        for home, (theirs, works) in guests.items():
            _wait(works)
            values, positions = self._best(stored, self.guests[home], theirs)
            sends.append(self._send(layer, SCORES, self.rank, values, home))
            sends.append(self._send(layer, FOUND, self.rank, positions, home))
        asked = {home: self._expect_asked(layer, home) for home in self.guests}
        if index is not None:
            found = [] if (own := self.hosted.get((self.rank, self.rank))) is None else [self._best(stored, own, index)]
            for values, positions, works in answers.values():
                _wait(works)
                found.append((values, positions))
            self.chosen = self._chosen(*(torch.cat(each, dim=1) for each in zip(*found, strict=True)))
            for host in self.hosts:
                sends.append(self._send(layer, ASKED, self.rank, self.chosen.asked[host], host))
        for home, (places, works) in asked.items():
            _wait(works)
            self.asked[home] = self._checked(places)
        return sends

    def _best(self, stored: Pool, hosted: Hosted, index: IndexQueries) -> tuple[Tensor, Tensor]:
        """Of each row the best keys here: their scores fp32 [T, best] and positions int32 [T, best], ascending."""
        values, positions = [], []
        for scores in hosted.rows.scores(stored, index, torch.arange(hosted.count)):
            found = choose(scores, hosted.best)
            values.append(scores.gather(1, found.long()))
            positions.append(found)
        return torch.cat(values), torch.cat(positions)

    def _chosen(self, values: Tensor, positions: Tensor) -> Chosen:
        """What this rank's rows choose among the best keys of all ranks, as one rank would: values and positions [T,
        n]. A row that sees C keys or fewer has chosen them all."""
        own, most = torch.cat([torch.arange(run.start, run.end) for run in self.homes[self.rank]]), self.index.chosen
        counts = (own + 1).clamp(max=most)
        chosen = torch.arange(most, dtype=torch.int32).repeat(len(own), 1)
        far = own >= most
        if far.any():
            ordered = torch.where(values[far] == -torch.inf, NOWHERE, positions[far]).sort(dim=1, stable=True)
            among = choose(values[far].gather(1, ordered.indices), most).long()
            chosen[far] = ordered.values.gather(1, among)
        return self._placed(chosen, counts)

    def _placed(self, chosen: Tensor, counts: Tensor) -> Chosen:
        """Where keys of these positions [T, C] lie, of which each row has the first `counts` [T]."""
        here = torch.arange(chosen.shape[1]) < counts[:, None]
        chunks = torch.where(here, chosen // CHUNK, 0)
        slots = self._slots.gather(1, chunks.long())
        owners, places = (
            slots // self.context.slots_per_rank,
            slots % self.context.slots_per_rank * CHUNK + chosen % CHUNK,
        )
        keys, asked, first = torch.zeros_like(chosen), {}, 0
        for owner in (self.rank, *self.hosts):
            theirs = here & (owners == owner)
            asked[owner] = torch.where(theirs, places, -1).int().contiguous()
            count = int(theirs.sum())
            keys[theirs] = torch.arange(first, first + count, dtype=torch.int32)
            first += chunks_of(count) * CHUNK
        return Chosen(keys, counts, asked)

    @cached_property
    def _slots(self) -> Tensor:
        """The group's slots of the chunks of each of this rank's rows, int32 [T, chunks]."""
        runs = self.homes[self.rank]
        tables = [torch.from_numpy(group_layout.slots_of(self.context.group, run)) for run in runs]
        padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        return padded.repeat_interleave(torch.tensor([run.rows for run in runs]), dim=0)

    # -- what is fetched

    def _send_fetched(self, layer: int, stored: Pool, dtype: torch.dtype) -> list[Transfer]:
        """To each home the keys here that it has asked for."""
        sends = []
        for home in self.guests:
            for kind, tensor in zip((FETCHED, SCALES), self._taken(stored, self.asked[home], dtype), strict=False):
                sends.append(self._send(layer, kind, self.rank, tensor, home))
                self.context.counters.sent(home, len(tensor) * CHUNK if kind == FETCHED else 0)
        return sends

    def _taken(self, stored: Pool, places: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Keys at these places [T, C], -1 for none, without the indexer's numbers: tensors of a pool of as many chunks
        as they take, one row's behind another's; none for no keys."""
        some = places[places >= 0][None]
        if not some.numel():
            return []
        every = torch.arange(len(stored.v), dtype=torch.int32)[None]
        return [each.clone() for each in self.kernels.gather(stored, every, some, self.index.size, dtype).tensors]

    def _attend(self, layer: int, stored: Pool, q: Tensor) -> Tensor:
        """q [T, Hq, D - I] -> the same of what its rows have chosen."""
        assert self.chosen is not None, "the first layer has an indexer"
        coming = {host: self._expect_fetched(layer, host, stored) for host in self.hosts}
        parts = [self._taken(stored, self.chosen.asked[self.rank], q.dtype)]
        for tensors, works in coming.values():
            _wait(works)
            parts.append(tensors)
        pool = Pool.of([torch.cat(each) for each in zip(*filter(None, parts), strict=True)], once=True)
        every = torch.arange(len(pool.v), dtype=torch.int32)[None]
        sinks = self.context.kernels.sinks_of(layer)
        out, most = [], SparseRows.at_once(self.index, q)
        for some, keys, counts in zip(*(x.split(most) for x in (q, self.chosen.keys, self.chosen.counts)), strict=True):
            made = self.kernels.gather(pool, every.repeat(len(keys), 1), keys, 0, q.dtype)
            mask = own_mask(self.context.kernels.spec, keys, counts, sinks)
            out.append(self.kernels.attend(some.contiguous(), made, mask))
        return torch.cat(out)

    def _checked(self, places: Tensor) -> Tensor:
        """Raises ValueError for places that this rank has not."""
        if len(places) and not -1 <= int(places.min()) <= int(places.max()) < self.context.slots_per_rank * CHUNK:
            raise ValueError("another rank asks for keys beyond this one's pool")
        return places

    # -- messages

    def _tag(self, layer: int, kind: int, rank: int) -> Tag:
        return self.context.tag(layer, kind * self.size + rank)

    def _send(self, layer: int, kind: int, rank: int, x: Tensor, to: int) -> Transfer:
        return self.context.transport.isend(x, to, self._tag(layer, kind, rank))

    def _expect(self, layer: int, kind: int, source: int, *tensors: Tensor) -> list[Transfer]:
        return [
            self.context.transport.irecv(x, source, self._tag(layer, kind + i, source)) for i, x in enumerate(tensors)
        ]

    def _expect_index(self, layer: int, home: int, dtype: torch.dtype) -> tuple[IndexQueries, list[Transfer]]:
        rows, heads = self.guests[home].count, self.index.heads
        theirs = IndexQueries(torch.empty(rows, heads, self.index.size, dtype=dtype), torch.empty(rows, heads))
        assert theirs.weights is not None
        return theirs, self._expect(layer, QUERIES, home, theirs.q, theirs.weights)

    def _expect_best(self, layer: int, host: int) -> tuple[Tensor, Tensor, list[Transfer]]:
        shape = self.hosts[host].count, self.hosts[host].best
        values, positions = torch.empty(shape), torch.empty(shape, dtype=torch.int32)
        return values, positions, self._expect(layer, SCORES, host, values, positions)

    def _expect_asked(self, layer: int, home: int) -> tuple[Tensor, list[Transfer]]:
        places = torch.empty(self.guests[home].count, self.index.chosen, dtype=torch.int32)
        return places, self._expect(layer, ASKED, home, places)

    def _expect_fetched(self, layer: int, host: int, stored: Pool) -> tuple[list[Tensor], list[Transfer]]:
        assert self.chosen is not None, "the first layer has an indexer"
        chunks = chunks_of(int((self.chosen.asked[host] >= 0).sum()))
        if not chunks:
            return [], []
        parts = Pool.parts(chunks, 1, stored.v.shape[-1] - self.index.size, stored.v.dtype, once=True)
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in parts]
        return tensors, self._expect(layer, FETCHED, host, *tensors)


def _wait(works: list[Transfer]) -> None:
    for work in works:
        work.wait()
