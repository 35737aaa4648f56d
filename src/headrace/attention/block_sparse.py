"""Attention of a step whose rows choose blocks of keys by an indexer, for each KV head by itself (MiniMax-M3).

As in attention.sparse a row attends to the keys of its blocks as if they were its whole past. Blocks are whole chunks,
so nothing is copied: a row and KV head has the pool's own chunks as its items, in the order of their positions.

T: rows of a step; F: of these those that see more blocks than they may choose; C: how many these are; N: KV heads, G:
query heads of each; D: numbers stored of a key, I / N of them the indexer's.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from headrace.attention.execute import items_of
from headrace.attention.plan import Plan
from headrace.attention.sparse import AT_ONCE, ChoosingAttention, tables_of
from headrace.config import AttentionSpec
from headrace.kernels.backend import SparseBackend
from headrace.kernels.indexer import IndexQueries, choose
from headrace.kernels.records import Mask, Pool
from headrace.types import CHUNK


class BlockRows:
    """Rows of a step that attend to blocks of one pool, which they choose. items int32 [n, 4], positions int64 [T]: as
    in kernels.records.Mask."""

    def __init__(self, kernels: SparseBackend, spec: AttentionSpec, items: Tensor, positions: Tensor) -> None:
        assert spec.index is not None, "the model has indexers"
        self.kernels, self.spec, self.index = kernels, spec, spec.index
        self.items, self.positions = items, positions

    @property
    def chunks_of_block(self) -> int:
        return self.index.block // CHUNK

    @cached_property
    def tables(self) -> Tensor:
        """Slots of each row's chunks, int32 [T, chunks]: the same in all steps of a run."""
        return tables_of(self.items.numpy(), len(self.positions))

    def advance(self, positions: Tensor) -> None:
        """The same rows a step later in a run."""
        self.positions = positions

    def attend(
        self, pool: Pool, q: Tensor, index: IndexQueries | None, rows: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of rows [F] over the blocks that they choose: [F, Hq, D - I / N]. q [T, Hq, D - I / N]; sinks: of
        no model of this kind."""
        assert index is not None and sinks is None, "rows of a layer with an indexer choose, without sinks"
        heads, parts = self.spec.kv_heads, []
        for some in rows.split(max(1, AT_ONCE // (4 * heads * self.tables.shape[1]))):
            blocks = self.chosen(self.scores(pool, index, some), self.positions[some])
            mask = self.mask(self._slots(some, blocks), blocks, self.positions[some])
            parts.append(self.attended(q[some], by_head(pool), mask))
        return torch.cat(parts)

    def attended(self, q: Tensor, pool: Pool, mask: Mask) -> Tensor:
        """q [F, Hq, D - I / N] over a pool each slot of which is a chunk and KV head: as many."""
        wide = torch.nn.functional.pad(
            q.reshape(len(q) * self.spec.kv_heads, -1, q.shape[2]), (self.spec.index_width, 0)
        )
        return self.kernels.attend(wide, pool, mask)[..., self.spec.index_width :].reshape(q.shape)

    def scores(self, pool: Pool, index: IndexQueries, rows: Tensor) -> Tensor:
        """Of chunks for rows [F]: fp32 [F, N, chunks]."""
        items = items_of(self.items, rows)
        return self.kernels.block_scores(index.q[rows], pool, items, self.positions[rows], self.tables.shape[1])

    def chosen(self, scores: Tensor, positions: Tensor) -> Tensor:
        """scores [F, N, chunks] -> blocks int64 [F, N, C], ascending, the last of them the row's own."""
        rows, heads, chunks = scores.shape
        blocks = -(-chunks // self.chunks_of_block)
        padded = torch.nn.functional.pad(scores, (0, blocks * self.chunks_of_block - chunks), value=-torch.inf)
        of_blocks = padded.view(rows, heads, blocks, self.chunks_of_block).amax(-1)
        own = positions // self.index.block
        for before in range(self.index.local):
            of_blocks.scatter_(2, (own - before).clamp(min=0)[:, None, None].expand(-1, heads, 1), torch.inf)
        count = self.index.chosen // self.index.block
        return choose(of_blocks.view(rows * heads, blocks), count).view(rows, heads, count).long()

    def chunks(self, blocks: Tensor) -> Tensor:
        """Chunks of blocks [F, N, C]: [F, N, C x chunks of a block], ascending."""
        return (blocks[..., None] * self.chunks_of_block + torch.arange(self.chunks_of_block)).flatten(2)

    def _slots(self, rows: Tensor, blocks: Tensor) -> Tensor:
        """Where the chunks of `blocks` lie in a pool of one KV head: int64 as `chunks`; -1 of a row beyond its own."""
        chunks = self.chunks(blocks)
        heads, tables = self.spec.kv_heads, self.tables[rows].long()
        slots = tables.gather(1, chunks.clamp(max=tables.shape[1] - 1).flatten(1)).view(chunks.shape)
        return slots * heads + torch.arange(heads)[None, :, None]

    def mask(self, slots: Tensor, blocks: Tensor, positions: Tensor) -> Mask:
        """What each row [F] and KV head sees: the chunks of its blocks [F, N, C], one behind the other, which lie in
        `slots`, as `chunks` of a pool of one KV head."""
        count, heads, _ = blocks.shape
        ends = positions.repeat_interleave(heads)
        seen = self.chunks(blocks).view(count * heads, -1) <= ends[:, None] // CHUNK
        row, place = seen.nonzero(as_tuple=True)
        items = torch.stack((slots.view(count * heads, -1)[seen], place * CHUNK, row, row + 1), dim=1).int()
        return Mask(items.contiguous(), (seen.sum(1) - 1) * CHUNK + ends % CHUNK, scale=self.spec.scale)


class BlockSparseAttention(ChoosingAttention):
    """In layers without an indexer rows attend to all keys."""

    @cached_property
    def _rows(self) -> BlockRows:
        return BlockRows(self.choosing, self.spec, self.items[None], self.positions)

    def advance(self, plan: Plan) -> None:
        super().advance(plan)
        self._rows.advance(self.positions)

    def _choose(self, index: IndexQueries | None) -> bool:
        return index is not None

    def _attended(self, layer: int, q: Tensor, index: IndexQueries | None, rows: Tensor) -> Tensor:
        return self._rows.attend(self.storage.pool(layer), q, index, rows, self._sinks(layer))


def by_head(pool: Pool) -> Pool:
    """The same memory as a pool of one KV head: chunk and head are a slot."""
    k, v = (each.view(-1, 1, *each.shape[2:]) for each in (pool.k, pool.v))
    if pool.k_scale is None or pool.v_scale is None:
        return Pool(k, v)
    return Pool(k, v, pool.k_scale.view(-1, 1, CHUNK), pool.v_scale.view(-1, 1, CHUNK))
