"""Decoding of rows that choose what they attend to from chunks of several ranks: what they choose comes to the rows.

A row attends to so many keys at most, as if they were its whole past, packed into chunks in the order of their
positions (attention.sparse, attention.block_sparse). Neighbours there lie on several ranks, so no rank could merge its
part of them alone; and they are a few megabytes of a layer, however long the context is. So each rank that owns chunks
scores its own for the rows of every home, and sends the best of them; the home chooses among all, asks each owner for
what it has of these, and attends to them as one rank does, to the same bits.

T: rows of a home; N, I: heads of the indexer and their size. A home is a rank with rows, a host one with chunks of
their sequences, whose guests they are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from headrace.attention import plan as planning
from headrace.attention.plan import Int32
from headrace.config import AttentionSpec, IndexSpec
from headrace.kernels.backend import SparseBackend, choosing
from headrace.kernels.indexer import IndexQueries
from headrace.kernels.records import Pool
from headrace.parallel import group_layout
from headrace.parallel.group_context import GroupContext
from headrace.parallel.key_places import KINDS, KeyPlacing
from headrace.parallel.transport import Tag, Transfer

Rows = TypeVar("Rows")
"""Those of a home over the pool of a host."""
QUERIES, BEST, ASKED, FETCHED = (KINDS + kind for kind in (0, 3, 5, 6))
"""What a message holds, behind those of key_places; its tag's piece also names a rank. QUERIES are three
tensors at most, BEST two, FETCHED as many as a pool has."""


class Fetching(KeyPlacing, Generic[Rows]):
    """Attention of one group on one rank. Subclasses say what rows choose, and how they attend to it.

    asked: of each guest what it wants in a layer and those behind it without an indexer; mine: what this rank's rows
    want of each rank.
    """

    mine: Mapping[int, Tensor]

    def __init__(self, context: GroupContext) -> None:
        super().__init__(context)
        self.homes = {home: runs for home in range(self.size) if (runs := group_layout.runs(context.group, home))}
        hosted = {
            (home, host): rows
            for home, runs in self.homes.items()
            for host in range(self.size)
            if self.rank in (home, host) and (rows := self._hosted(runs, host)) is not None
        }
        self.own = hosted.get((self.rank, self.rank))
        self.guests = {home: rows for (home, host), rows in hosted.items() if host == self.rank != home}
        self.hosts = {host: rows for (home, host), rows in hosted.items() if home == self.rank != host}
        self.asked: dict[int, Tensor] = {}

    # -- what a subclass decides

    @abstractmethod
    def hosted(self, items: Tensor, positions: Tensor) -> Rows:
        """Rows at these positions of a home, whose items lie in the pool of one host."""

    @abstractmethod
    def index_parts(self, index: IndexQueries) -> Sequence[Tensor]:
        """What hosts score keys by."""

    @abstractmethod
    def room_for_index(self, rows: Rows, dtype: torch.dtype) -> IndexQueries:
        """Memory for it, of a home's rows."""

    @abstractmethod
    def best(self, stored: Pool, rows: Rows, index: IndexQueries) -> Sequence[Tensor]:
        """What a host tells of its own keys."""

    @abstractmethod
    def room_for_best(self, rows: Rows) -> Sequence[Tensor]:
        """Memory for it."""

    @abstractmethod
    def choose(self, found: Sequence[Sequence[Tensor]]) -> Mapping[int, Tensor]:
        """This rank's rows choose, by what they have found, here first. What each host, and this rank, is asked for:
        int32, of the shape of `room_for_asked`, -1 for nothing."""

    @abstractmethod
    def room_for_asked(self, rows: Rows) -> Tensor:
        """Memory for what a home asks for."""

    @abstractmethod
    def taken(self, stored: Pool, places: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        """What was asked for, one behind the other: tensors of a pool; none for nothing."""

    @abstractmethod
    def room_for_taken(self, stored: Pool, places: Tensor) -> Sequence[Tensor]:
        """Memory for it."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, pool: Pool) -> Tensor:
        """q [T, Hq, D without the indexer's numbers] -> the same, over a pool of what has been fetched, this rank's own
        first."""

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
        return self._layer(layer, q, k, v, None)

    def _layer(self, layer: int, q: Tensor, k: Tensor, v: Tensor, index: IndexQueries | None) -> Tensor:
        stored = self.context.storage.pool(layer)
        coming = self.expect_keys(layer, k)
        sends = self.send_keys(layer, k, v)
        self.context.wait_for_own(layer)  # before a chunk that comes is written in
        self.store(stored, k, v, coming)
        if self.index.own[layer]:
            sends += self._choose(layer, stored, q.dtype, index)
        for home, places in self.asked.items():
            sends += self._send(layer, FETCHED, self.taken(stored, places, q.dtype), home)
            self.context.counters.sent(home, int((places >= 0).sum()))
        out = self._fetched(layer, stored, q) if len(q) else q
        for work in sends:
            work.drain()
        return out

    def _choose(self, layer: int, stored: Pool, dtype: torch.dtype, index: IndexQueries | None) -> list[Transfer]:
        """Every rank scores its own keys for all homes, each of which then asks for what its rows choose."""
        sends: list[Transfer] = []
        guests = {home: self.room_for_index(rows, dtype) for home, rows in self.guests.items()}
        queries = {home: self._expect(layer, QUERIES, home, self.index_parts(each)) for home, each in guests.items()}
        answers = {host: self.room_for_best(rows) for host, rows in self.hosts.items()}
        coming = {host: self._expect(layer, BEST, host, each) for host, each in answers.items()}
        if index is not None:
            for host in self.hosts:
                sends += self._send(layer, QUERIES, self.index_parts(index), host)
        for home, theirs in guests.items():
            _wait(queries[home])
            sends += self._send(layer, BEST, self.best(stored, self.guests[home], theirs), home)
        wanted = {home: self.room_for_asked(rows) for home, rows in self.guests.items()}
        asking = {home: self._expect(layer, ASKED, home, [each]) for home, each in wanted.items()}
        if index is not None:
            found = [] if self.own is None else [self.best(stored, self.own, index)]
            for host, works in coming.items():
                _wait(works)
                found.append(answers[host])
            self.mine = self.choose(found)
            for host in self.hosts:
                sends += self._send(layer, ASKED, [self.mine[host]], host)
        for home, works in asking.items():
            _wait(works)
            self.asked[home] = self._checked(stored, wanted[home])
        return sends

    def _fetched(self, layer: int, stored: Pool, q: Tensor) -> Tensor:
        """Attention of this rank's rows to what they have chosen, once it is here."""
        rooms = {host: self.room_for_taken(stored, self.mine[host]) for host in self.hosts}
        coming = {host: self._expect(layer, FETCHED, host, room) for host, room in rooms.items()}
        parts = [self.taken(stored, self.mine[self.rank], q.dtype)]
        for host, works in coming.items():
            _wait(works)
            parts.append(rooms[host])
        tensors = [torch.cat(each) for each in zip(*filter(len, parts), strict=True)]
        return self.attend(layer, q, Pool.of(tensors, once=stored.once))

    def _checked(self, stored: Pool, places: Tensor) -> Tensor:
        """Raises ValueError for places that this rank has not."""
        if not -1 <= int(places.min()) <= int(places.max()) < self.most_places(stored):
            raise ValueError("another rank asks for keys beyond this one's pool")
        return places

    @abstractmethod
    def most_places(self, stored: Pool) -> int:
        """Places of a pool, as homes ask for them."""

    # -- for subclasses

    @property
    def spec(self) -> AttentionSpec:
        return self.context.kernels.spec

    @property
    def index(self) -> IndexSpec:
        assert self.spec.index is not None, "the model has indexers"
        return self.spec.index

    @cached_property
    def kernels(self) -> SparseBackend:
        return choosing(self.context.kernels.backend)

    @cached_property
    def positions(self) -> Tensor:
        """Of this rank's rows, int64 [T]."""
        return torch.cat([torch.arange(run.start, run.end) for run in self.homes[self.rank]])

    @cached_property
    def slots(self) -> Tensor:
        """The group's slots of the chunks of each of this rank's rows, int64 [T, chunks]; 0 behind its last."""
        runs = self.homes[self.rank]
        tables = [torch.from_numpy(group_layout.slots_of(self.context.group, run)).long() for run in runs]
        padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        return padded.repeat_interleave(torch.tensor([run.rows for run in runs]), dim=0)

    def _hosted(self, runs: list[group_layout.RowRange], host: int) -> Rows | None:
        """None for a rank without chunks of these rows' sequences."""
        per_rank, spans = self.context.slots_per_rank, []
        for run in runs:
            slots = group_layout.slots_of(self.context.group, run)
            here: Int32 = np.where(slots // per_rank == host, slots % per_rank, -1).astype(np.int32)
            spans.append(planning.Span(here, run.start, run.rows))
        plan = planning.build(spans)
        items = plan.items_within(None)
        return self.hosted(torch.from_numpy(items), torch.from_numpy(plan.positions)) if len(items) else None

    def _tag(self, layer: int, kind: int, rank: int) -> Tag:
        return self.context.tag(layer, kind * self.size + rank)

    def _send(self, layer: int, kind: int, tensors: Sequence[Tensor], to: int) -> list[Transfer]:
        send = self.context.transport.isend
        return [send(x.contiguous(), to, self._tag(layer, kind + i, self.rank)) for i, x in enumerate(tensors)]

    def _expect(self, layer: int, kind: int, source: int, tensors: Sequence[Tensor]) -> list[Transfer]:
        receive = self.context.transport.irecv
        return [receive(x, source, self._tag(layer, kind + i, source)) for i, x in enumerate(tensors)]


def _wait(works: list[Transfer]) -> None:
    for work in works:
        work.wait()


def chunks_among(items: Tensor) -> int:
    """Chunks that items offer."""
    return len(items[:, 1].unique())
