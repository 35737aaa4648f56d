"""What gather, chain and ring pass-KV share: the rows stay, keys and values come to them through a workspace.

T: a rank's rows of the group; q [T, Hq, D], k and v [T, Hkv, D]. For each layer: receives are posted (one layer ahead),
the rank's own keys and values are written and sent, its rows attend to what has arrived (parallel.merging), and what
the rank owns goes into its pool. The strategies differ in who sends which piece to whom.
"""

from __future__ import annotations

from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from headrace.attention.block_sparse import BlockRows
from headrace.attention.execute import items_of
from headrace.attention.plan import Int32
from headrace.attention.sparse import SparseRows, apart
from headrace.kernels.backend import Attend, choosing
from headrace.kernels.indexer import IndexQueries
from headrace.kv.chunk_copies import copy_chunks, copy_chunks_alone
from headrace.parallel import group_layout
from headrace.parallel.coming import CachedPiece
from headrace.parallel.group_context import GroupContext
from headrace.parallel.group_layout import KVPiece
from headrace.parallel.merging import Arriving, Rows
from headrace.parallel.workspace import LayerBuffer


class KVExchange(Attend):
    """Attention of one group on one rank. Subclasses say what is exchanged."""

    def __init__(self, context: GroupContext) -> None:
        self.context = context
        group, rank = context.group, context.rank
        self.layout = group_layout.arrange(group, context.slots_per_rank)
        runs = group_layout.runs(group, rank)
        tables = [self.layout.table(group_layout.slots_of(group, run)) for run in runs]
        kernels, device = context.kernels, context.workspace.device
        self.rows = Rows(runs, tables, kernels, device)
        wanted = group_layout.runs(group, rank, wanted=True)
        tables = [self.layout.table(group_layout.slots_of(group, run)) for run in wanted]
        self.wanted = Rows(wanted, tables, kernels, device)
        self.kept_from, self.kept_in = self._kept()
        context.workspace.reserve(self.layout.chunks)
        self.arrivals: dict[int, list[Arriving]] = {}
        self.own: dict[int, dict[int, CachedPiece]] = {}
        self._post(0)

    def _kept(self) -> tuple[Int32, Int32]:
        """Chunks of the workspace that this rank keeps, and its slots for them: new ones that it owns."""
        mine, per_rank = self.context.rank, self.context.slots_per_rank
        new = {index for piece in self.layout.pieces if not piece.cached for index in range(piece.begin, piece.end)}
        pairs = sorted(
            (index, slot % per_rank)
            for slot, index in self.layout.index.items()
            if slot // per_rank == mine and index in new
        )
        return tuple(np.array(pairs, dtype=np.int32).reshape(-1, 2).T.copy())  # type: ignore[return-value]

    # -- what a strategy decides

    def receives(self, layer: int, buffer: LayerBuffer) -> list[Arriving]:
        """Posts the receives of a layer; what is to be sent on goes on by relay."""
        raise NotImplementedError

    def send_own(self, layer: int, buffer: LayerBuffer) -> None:
        """Sends what this rank has just written."""
        raise NotImplementedError

    def before_writing(self, layer: int, buffer: LayerBuffer) -> None:
        """Called before the rank's own keys and values are written."""

    def before_attending(self, layer: int, buffer: LayerBuffer) -> None:
        """Called before the rows attend to what has arrived."""

    def after_attention(self, layer: int, q: Tensor, buffer: LayerBuffer, rows: Rows) -> None:
        """Called when the rows have attended."""

    # -- one layer

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        buffer = self._exchange(layer, k, v)
        chosen = self.rows if rows is None else self.wanted
        q = q if rows is None else q[rows]
        out = self._attend(layer, q, buffer, chosen)
        self.after_attention(layer, q, buffer, chosen)
        return out

    def _exchange(self, layer: int, k: Tensor, v: Tensor) -> LayerBuffer:
        """The rank's own keys and values are written and sent, and what comes is under way."""
        buffer = self.context.workspace.at(layer)
        if layer + 1 < self.context.layers:
            self._post(layer + 1)
        self.before_writing(layer, buffer)
        if len(self.rows):
            self.context.kernels.backend.append(buffer.pool, k, v, self.rows.slots, self.rows.offsets)
        self.send_own(layer, buffer)
        self.before_attending(layer, buffer)
        return buffer

    def sparse(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: IndexQueries | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        spec, kernels, positions = self.context.kernels.spec, self.context.kernels, self.rows.positions
        assert spec.index is not None, "the model has indexers"
        wide = torch.nn.functional.pad(q, (spec.index_width, 0))
        wanted = torch.arange(len(q)) if rows is None else rows
        is_far = positions[wanted] >= spec.index.most
        attends_to_all = index is None and spec.index.block > 1
        if attends_to_all or not is_far.any():
            return self(layer, wide, k, v, rows)[..., spec.index_width :]
        buffer = self._exchange(layer, k, v)
        for each in self.arrivals.pop(layer):  # rows choose among all keys
            each.wait()
        del self.own[layer]

        def near(some: Tensor) -> Tensor:
            items = items_of(self.rows.items[None], some)
            return kernels.attend(layer, wide[some], buffer.pool, items, positions[some])[..., spec.index_width :]

        def far(some: Tensor) -> Tensor:
            return self._choosing.attend(buffer.pool, q, index, some, kernels.sinks_of(layer))

        out = apart(q, wanted, is_far, near, far)
        self._keep(layer, buffer)
        return out

    @cached_property
    def _choosing(self) -> SparseRows | BlockRows:
        kernels = self.context.kernels
        assert kernels.spec.index is not None, "the model has indexers"
        kind = SparseRows if kernels.spec.index.block == 1 else BlockRows
        return kind(choosing(kernels.backend), kernels.spec, self.rows.items[None], self.rows.positions)

    def _attend(self, layer: int, q: Tensor, buffer: LayerBuffer, rows: Rows) -> Tensor:
        """The rows' attention; without rows nothing is waited for but what this rank keeps, and what comes into its own
        pool and goes on from there: nobody else does."""
        arrivals = self.arrivals.pop(layer)
        own = self.own.pop(layer)
        if len(rows):
            q = rows.attend(layer, q, buffer.pool, arrivals)
        else:
            for each in arrivals if len(self.kept_from) else own.values():
                each.wait()
        self._keep(layer, buffer)
        return q

    def _keep(self, layer: int, buffer: LayerBuffer) -> None:
        copy_chunks(buffer.pool, self.kept_from, self.context.storage.pool(layer), self.kept_in)

    def _post(self, layer: int) -> None:
        buffer = self.context.workspace.at(layer)
        buffer.drain()
        own = self._load_cached(layer, buffer)
        self.arrivals[layer] = [*own, *self.receives(layer, buffer)]
        for arrival in self.arrivals[layer]:
            buffer.works += arrival.works

    def _load_cached(self, layer: int, buffer: LayerBuffer) -> list[Arriving]:
        """Cached chunks that this rank owns, from its pool; what is still on its way there arrives later."""
        arrivals = []
        self.own[layer] = {}
        for piece, slots in self._cached_here():
            at = np.arange(piece.begin, piece.end, dtype=np.int32)
            pool = self.context.storage.pool(layer)
            parts = self.context.pending(slots.tolist(), layer)
            if not parts:
                copy_chunks(pool, slots, buffer.pool, at)
                continue
            side = self.context.side
            copy = copy_chunks_alone if side is None else copy_chunks
            cached = CachedPiece(parts, partial(copy, pool, slots, buffer.pool, at), side)
            self.own[layer][piece.index] = cached
            arrivals.append(Arriving([cached], piece.begin, piece.end))
        return arrivals

    def _cached_here(self) -> list[tuple[KVPiece, Int32]]:
        """Each cached piece that this rank holds, and its local slots."""
        slot_of = {index: slot for slot, index in self.layout.index.items()}
        return [
            (p, np.array([slot_of[i] % self.context.slots_per_rank for i in range(p.begin, p.end)], dtype=np.int32))
            for p in self.layout.pieces
            if p.cached and p.holder == self.context.rank
        ]

    # -- for strategies

    def receive(
        self, layer: int, buffer: LayerBuffer, piece: KVPiece, source: int, relay: int | None, tokens: int
    ) -> Arriving:
        works = self.context.receive(view(buffer, piece), source, layer, piece.index, relay, tokens)
        return Arriving(works, piece.begin, piece.end)

    def send(self, layer: int, buffer: LayerBuffer, piece: KVPiece, to: int, tokens: int) -> None:
        def now() -> None:
            buffer.works.extend(self.context.send(view(buffer, piece), to, layer, piece.index, tokens))

        cached = self.own[layer].get(piece.index)
        if cached is None:
            now()
        else:
            cached.then(now)

    def exchange_cached(self, layer: int, buffer: LayerBuffer) -> list[Arriving]:
        """Every rank sends the cached chunks that it owns to all others that have rows."""
        mine, arrivals = self.context.rank, []
        readers = {rank for part in self.context.group.parts for rank in part.ranks}
        for piece in self.layout.pieces:
            if not piece.cached:
                continue
            if piece.holder != mine and mine in readers:
                arrivals.append(self.receive(layer, buffer, piece, piece.holder, None, 0))
            if piece.holder == mine:
                for other in sorted(readers - {mine}):
                    self.send(layer, buffer, piece, other, piece.filled[0])
        return arrivals


def view(buffer: LayerBuffer, piece: KVPiece) -> list[Tensor]:
    return [x[piece.begin : piece.end] for x in buffer.pool.tensors]


def bytes_of(x: Tensor) -> Tensor:
    """The same memory as bytes."""
    return x.view(torch.uint8)
