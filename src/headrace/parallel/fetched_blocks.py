"""parallel.fetched for rows that choose blocks of keys, for each KV head by itself (MiniMax-M3).

Each host tells a home's row of the scores of its chunks; what is sent is whole chunks of one KV head. Layers without an
indexer, whose rows attend to all keys, go by ring pass-Q.

T: rows of a home; N: KV heads, as many as the indexer has; n: chunks of the blocks that a row chooses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.attention.block_sparse import BlockRows, by_head
from headrace.kernels.indexer import IndexQueries
from headrace.kernels.records import Mask, Pool
from headrace.parallel.fetched import Fetching
from headrace.parallel.group_context import GroupContext
from headrace.parallel.ring_q import RingQ
from headrace.types import CHUNK


class FetchedBlocks(Fetching[BlockRows]):
    """mask: of this rank's rows, once they have chosen, over what was fetched for them."""

    mask: Mask

    def __init__(self, context: GroupContext) -> None:
        super().__init__(context)
        self.passing = RingQ(context)

    def sparse(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: IndexQueries | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        if index is None:
            return self.passing.sparse(layer, q, k, v, index, rows)
        return super().sparse(layer, q, k, v, index, rows)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        return super().__call__(layer, q, k, v) if self.index.own[layer] else self.passing(layer, q, k, v, rows)

    def hosted(self, items: Tensor, positions: Tensor) -> BlockRows:
        return BlockRows(self.kernels, self.spec, items, positions)

    def index_parts(self, index: IndexQueries) -> Sequence[Tensor]:
        return (index.q,)

    def room_for_index(self, rows: BlockRows, dtype: torch.dtype) -> IndexQueries:
        return IndexQueries(torch.empty(len(rows.positions), self.index.heads, self.index.size, dtype=dtype))

    def best(self, stored: Pool, rows: BlockRows, index: IndexQueries) -> Sequence[Tensor]:
        """fp32 [T, N, chunks], up to the last chunk here."""
        return (rows.scores(stored, index, torch.arange(len(rows.positions))),)

    def room_for_best(self, rows: BlockRows) -> Sequence[Tensor]:
        return (torch.empty(len(rows.positions), self.index.heads, rows.tables.shape[1]),)

    def choose(self, found: Sequence[Sequence[Tensor]]) -> Mapping[int, Tensor]:
        """A row that sees no more blocks than it may choose has chosen them all."""
        chunks = max(self.slots.shape[1], self.index.chosen // CHUNK)
        scores = torch.full((len(self.positions), self.index.heads, chunks), -torch.inf)
        for (each,) in found:
            scores[..., : each.shape[2]] = torch.where(each == -torch.inf, scores[..., : each.shape[2]], each)
        rows = self._rows()
        blocks = rows.chosen(scores, self.positions)
        near = self.positions < self.index.chosen
        blocks[near] = torch.arange(blocks.shape[2])
        return self._placed(rows, blocks)

    def _rows(self) -> BlockRows:
        """This rank's rows, wherever their chunks lie."""
        return BlockRows(self.kernels, self.spec, torch.empty(0, 4, dtype=torch.int32), self.positions)

    def _placed(self, rows: BlockRows, blocks: Tensor) -> Mapping[int, Tensor]:
        """Where the chunks of `blocks` [T, N, C] lie: `mask`, and what each rank is asked for, as slots of its pool by
        head."""
        chunks, per_rank, heads = rows.chunks(blocks), self.context.slots_per_rank, self.index.heads
        here = chunks <= (self.positions // CHUNK)[:, None, None]
        slots = self.slots.gather(1, torch.where(here, chunks, 0).flatten(1)).view(chunks.shape)
        owners, places = slots // per_rank, slots % per_rank * heads + torch.arange(heads)[None, :, None]
        lies, asked, first = torch.zeros_like(chunks), {}, 0
        for owner in (self.rank, *self.hosts):
            theirs = here & (owners == owner)
            asked[owner] = torch.where(theirs, places, -1).int()
            count = int(theirs.sum())
            lies[theirs] = torch.arange(first, first + count)
            first += count
        self.mask = rows.mask(lies, blocks, self.positions)
        return asked

    def room_for_asked(self, rows: BlockRows) -> Tensor:
        chunks = self.index.chosen // CHUNK
        return torch.empty(len(rows.positions), self.index.heads, chunks, dtype=torch.int32)

    def most_places(self, stored: Pool) -> int:
        return len(stored.v) * self.index.heads

    def taken(self, stored: Pool, places: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        some = places[places >= 0].long()
        return [each[some] for each in by_head(stored).tensors] if len(some) else ()

    def room_for_taken(self, stored: Pool, places: Tensor) -> Sequence[Tensor]:
        count = int((places >= 0).sum())
        return [each.new_empty(count, *each.shape[1:]) for each in by_head(stored).tensors] if count else ()

    def attend(self, layer: int, q: Tensor, pool: Pool) -> Tensor:
        return self._rows().attended(q, pool, self.mask)
