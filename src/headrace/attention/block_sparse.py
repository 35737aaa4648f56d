"""Attention of a step whose rows choose blocks of keys by an indexer, for each KV head by itself (MiniMax-M3).

As in attention.sparse a row attends to the keys of its blocks as if they were its whole past. Blocks are whole chunks,
so nothing is copied: a row and KV head has the pool's own chunks as its items, in the order of their positions.

T: rows of a step; F: of these those that see more blocks than they may choose; C: how many these are; N: KV heads, G:
query heads of each; D: numbers stored of a key, I / N of them the indexer's.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from headrace.attention.execute import items_of
from headrace.attention.sparse import AT_ONCE, ChoosingAttention, tables_of
from headrace.kernels.indexer import IndexQueries, choose
from headrace.kernels.records import Mask, Pool
from headrace.types import CHUNK


class BlockSparseAttention(ChoosingAttention):
    """In layers without an indexer rows attend to all keys."""

    @property
    def chunks_of_block(self) -> int:
        return self.index.block // CHUNK

    @cached_property
    def tables(self) -> Tensor:
        """Slots of each row's chunks, int32 [T, chunks]: the same in all steps of a run."""
        return tables_of(self.items[None].numpy(), self.plan.rows)

    def _choose(self, index: IndexQueries | None) -> bool:
        return index is not None

    def _attended(self, layer: int, q: Tensor, index: IndexQueries | None, rows: Tensor) -> Tensor:
        assert index is not None, "_choose said so"
        pool = self.storage.pool(layer)
        heads, chunks, width = self.spec.kv_heads, self.tables.shape[1], self.spec.index_width
        parts = []
        for some in rows.split(max(1, AT_ONCE // (4 * heads * chunks))):
            items = items_of(self.items[None], some)
            scores = self.choosing.block_scores(index.q[some], pool, items, self.positions[some], chunks)
            mask = self._mask(some, self._chosen(scores, self.positions[some]))
            by_head = torch.nn.functional.pad(q[some].view(len(some) * heads, -1, q.shape[2]), (width, 0))
            parts.append(self.kernels.attend(by_head, _by_head(pool), mask)[..., width:].reshape(-1, *q.shape[1:]))
        return torch.cat(parts)

    def _chosen(self, scores: Tensor, positions: Tensor) -> Tensor:
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

    def _mask(self, rows: Tensor, blocks: Tensor) -> Mask:
        """What each row [F] and KV head sees: the chunks of its blocks [F, N, C], one behind the other."""
        count, heads, _ = blocks.shape
        chunks = blocks.numpy()[..., None] * self.chunks_of_block + np.arange(self.chunks_of_block)
        chunks = chunks.reshape(count * heads, -1)
        positions = np.repeat(self.positions[rows].numpy(), heads)
        seen = chunks <= positions[:, None] // CHUNK
        row, place = np.nonzero(seen)
        slots = self.tables.numpy()[rows.numpy()[row // heads], chunks[seen]] * heads + row % heads
        items = np.stack((slots, place * CHUNK, row, row + 1), axis=1).astype(np.int32)
        ends = (seen.sum(1) - 1) * CHUNK + positions % CHUNK
        return Mask(torch.from_numpy(items), torch.from_numpy(ends), scale=self.spec.scale)


def _by_head(pool: Pool) -> Pool:
    """The same memory as a pool of one KV head: chunk and head are a slot."""
    k, v = (each.view(-1, 1, *each.shape[2:]) for each in (pool.k, pool.v))
    if pool.k_scale is None or pool.v_scale is None:
        return Pool(k, v)
    return Pool(k, v, pool.k_scale.view(-1, 1, CHUNK), pool.v_scale.view(-1, 1, CHUNK))
