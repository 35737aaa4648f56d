"""parallel.fetched for rows that choose keys one by one (DSA).

Each host tells a home's row of its best keys, or pools of them, scores and positions; what is sent is their latents,
without the numbers of indexers. Those behind the last whole pool are asked for as what is chosen is. Layers that attend
to what one before them has chosen ask for nothing: hosts know it still.

T: rows of a home; C: keys that a row attends to at most; D: numbers stored of a token, I of them an indexer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.attention.sparse import SparseRows, keys_of, own_mask
from headrace.kernels.backend import Attend
from headrace.kernels.indexer import IndexQueries, choose, chunks_of
from headrace.kernels.records import Pool
from headrace.parallel.fetched import Fetching, chunks_among
from headrace.parallel.fetched_blocks import FetchedBlocks
from headrace.parallel.group_context import GroupContext
from headrace.parallel.ring_q import RingQ
from headrace.types import CHUNK

NOWHERE = torch.iinfo(torch.int32).max
"""In place of a position: of what no row sees."""


def ring_q(context: GroupContext) -> Attend:
    """Attention of a group of strategy ring-q: ring pass-Q, or where rows leave keys out, parallel.fetched."""
    index = context.kernels.spec.index
    if index is None or all(part.end <= index.most for part in context.group.parts):
        return RingQ(context)
    return FetchedKeys(context) if index.block == 1 else FetchedBlocks(context)


class Hosted(NamedTuple):
    """A home's rows over a host's pool. best: how many keys of it each row hears of, or pools of keys."""

    rows: SparseRows
    best: int


class FetchedKeys(Fetching[Hosted]):
    """keys int32 [T, C]: where what rows attend to lies among all that was fetched; counts int64 [T]: how many keys a
    row has. Both of this rank's rows, once they have chosen."""

    keys: Tensor
    counts: Tensor

    def hosted(self, items: Tensor, positions: Tensor) -> Hosted:
        best = min(self.index.chosen, CHUNK * chunks_among(items)) // self.index.pool
        return Hosted(SparseRows(self.kernels, self.spec, items, positions), best)

    def index_parts(self, index: IndexQueries) -> Sequence[Tensor]:
        assert index.weights is not None, "rows choose keys, not blocks"
        return [part for part in index if part is not None]

    def room_for_index(self, rows: Hosted, dtype: torch.dtype) -> IndexQueries:
        shape, size = (len(rows.rows.positions), self.index.heads), self.index.size
        places = torch.empty(self.index.pool, size) if self.index.pool > 1 else None
        return IndexQueries(torch.empty(*shape, size, dtype=dtype), torch.empty(shape), places)

    def best(self, stored: Pool, rows: Hosted, index: IndexQueries) -> Sequence[Tensor]:
        """Scores fp32 [T, best] of each row's best keys here, and their positions int32 [T, best], ascending."""
        values, positions = [], []
        for scores in rows.rows.scores(stored, index, torch.arange(len(rows.rows.positions))):
            found = choose(scores, rows.best)
            values.append(scores.gather(1, found.long()))
            positions.append(found)
        return torch.cat(values), torch.cat(positions)

    def room_for_best(self, rows: Hosted) -> Sequence[Tensor]:
        shape = len(rows.rows.positions), rows.best
        return torch.empty(shape), torch.empty(shape, dtype=torch.int32)

    def choose(self, found: Sequence[Sequence[Tensor]]) -> Mapping[int, Tensor]:
        """A row that sees C keys or fewer has chosen them all."""
        values, positions = (torch.cat(each, dim=1) for each in zip(*found, strict=True))
        most = self.index.most
        chosen = torch.arange(most, dtype=torch.int32).repeat(len(self.positions), 1)
        far, self.counts = self.positions >= most, self.positions + 1
        if far.any():
            ordered = torch.where(values[far] == -torch.inf, NOWHERE, positions[far]).sort(dim=1, stable=True)
            among = choose(values[far].gather(1, ordered.indices), self.index.chosen // self.index.pool).long()
            chosen[far], self.counts[far] = keys_of(self.index, ordered.values.gather(1, among), self.positions[far])
        return self._placed(chosen)

    def _placed(self, chosen: Tensor) -> Mapping[int, Tensor]:
        """Where keys of these positions [T, C] lie: `keys`, and what each rank is asked for, as places of its pool."""
        here = torch.arange(chosen.shape[1]) < self.counts[:, None]
        slots = self.slots.gather(1, torch.where(here, chosen // CHUNK, 0).long())
        per_rank = self.context.slots_per_rank
        owners, places = slots // per_rank, slots % per_rank * CHUNK + chosen % CHUNK
        self.keys, asked, first = torch.zeros_like(chosen), {}, 0
        for owner in (self.rank, *self.hosts):
            theirs = here & (owners == owner)
            asked[owner] = torch.where(theirs, places, -1).int()
            count = int(theirs.sum())
            self.keys[theirs] = torch.arange(first, first + count, dtype=torch.int32)
            first += chunks_of(count) * CHUNK
        return asked

    def room_for_asked(self, rows: Hosted) -> Tensor:
        return torch.empty(len(rows.rows.positions), self.index.most, dtype=torch.int32)

    def most_places(self, stored: Pool) -> int:
        return len(stored.v) * CHUNK

    def taken(self, stored: Pool, places: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        """Packed into as many chunks as they take."""
        some = places[places >= 0][None]
        if not some.numel():
            return ()
        made = self.kernels.gather(stored, _every(stored), some, self.spec.index_width, dtype)
        return [each.clone() for each in made.tensors]

    def room_for_taken(self, stored: Pool, places: Tensor) -> Sequence[Tensor]:
        chunks = chunks_of(int((places >= 0).sum()))
        parts = Pool.parts(chunks, 1, stored.v.shape[-1] - self.spec.index_width, stored.v.dtype, once=True)
        return [torch.empty(shape, dtype=dtype) for shape, dtype in parts] if chunks else ()

    def attend(self, layer: int, q: Tensor, pool: Pool) -> Tensor:
        sinks, most = self.context.kernels.sinks_of(layer), SparseRows.at_once(self.index, q)
        out = []
        for some, keys, counts in zip(*(each.split(most) for each in (q, self.keys, self.counts)), strict=True):
            made = self.kernels.gather(pool, _every(pool).repeat(len(keys), 1), keys, 0, q.dtype)
            out.append(self.kernels.attend(some.contiguous(), made, own_mask(self.spec, keys, counts, sinks)))
        return torch.cat(out)


def _every(pool: Pool) -> Tensor:
    """All slots of a pool as one row's, int32 [1, slots]."""
    return torch.arange(len(pool.v), dtype=torch.int32)[None]
