"""Attention of a step whose rows choose blocks of keys by an indexer, for each KV head by itself (MiniMax-M3).

As in attention.sparse a row attends to the keys of its blocks as if they were its whole past. Blocks are whole chunks,
so nothing is copied: a row and KV head has the pool's own chunks as its items, in the order of their positions.

T: rows of a step; F: of these those that see more blocks than they may choose; C: how many these are; N: KV heads, G:
query heads of each; D: numbers stored of a key, I / N of them the indexer's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.attention.execute import PlanAttention, items_of
from headrace.attention.plan import Plan
from headrace.attention.sparse import AT_ONCE, tables_of
from headrace.config import AttentionSpec
from headrace.kernels.backend import Backend, choosing
from headrace.kernels.indexer import IndexQueries, choose
from headrace.kernels.records import Mask, Pool
from headrace.kv.storage import LayerPools
from headrace.types import CHUNK


class BlockSparseAttention(PlanAttention):
    """PlanAttention of such a model."""

    def __init__(
        self,
        plan: Plan,
        storage: LayerPools,
        spec: AttentionSpec,
        backend: Backend,
        key_bias: Tensor | None = None,
        sinks: Sequence[Tensor] | None = None,
    ) -> None:
        assert spec.index is not None, "the model has indexers"
        super().__init__(plan, storage, spec, backend, key_bias, sinks)
        self.index, self.choosing, self.prepared = spec.index, choosing(backend), None
        self.chunks_of_block = spec.index.block // CHUNK
        self.tables = tables_of(self.items[None], plan.rows)

    def sparse(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: IndexQueries | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        wanted = torch.arange(len(q)) if rows is None else rows
        wide, width = torch.nn.functional.pad(q, (self.spec.index_width, 0)), self.spec.index_width
        is_far = self.positions[wanted] >= self.index.chosen
        if index is None or not is_far.any():
            return self(layer, wide, k, v, rows)[..., width:]
        far, near = wanted[is_far], wanted[~is_far]
        out = q.new_empty(len(wanted), *q.shape[1:])
        if len(near):
            out[~is_far] = self(layer, wide, k, v, near)[..., width:]
        else:
            self.kernels.append(self.storage.pool(layer), k, v, self.row_slots, self.row_offsets)
        out[is_far] = self._attended(layer, wide, index.q, far)[..., width:]
        return out

    def _attended(self, layer: int, q: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        """Attention of rows [F] over the blocks that they choose: [F, Hq, D]. q [T, Hq, D], index [T, N, I]."""
        pool, chunks = self.storage.pool(layer), self.tables.shape[1]
        parts = []
        for some in rows.split(max(1, AT_ONCE // (4 * self.spec.kv_heads * chunks))):
            items = items_of(self.items[None], some)
            scores = self.choosing.block_scores(index[some], pool, items, self.positions[some], chunks)
            mask = self._mask(some, self._chosen(scores, self.positions[some]))
            by_head = q[some].view(-1, self.spec.group, q.shape[2])
            parts.append(self.kernels.attend(by_head, _by_head(pool), mask).view(len(some), *q.shape[1:]))
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
