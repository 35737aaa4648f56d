"""Attention of a step whose rows choose their keys by an indexer (DSA; DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

A row attends to the keys that it has chosen as if they were its whole past: in the order of their positions, in chunks
of 64. So a row that sees no more keys than it may choose, attends as any other model's does, over the chunks that it
shares; its bits follow from its own past alone either way, whatever else a step computes.

T: rows of a step; F: of these those that see more keys than they may choose; C: how many these are; D: numbers stored
of a token, I of them the indexer's.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from headrace.attention.execute import PlanAttention, items_of
from headrace.attention.plan import Int32, Plan
from headrace.config import IndexSpec
from headrace.kernels.backend import SparseBackend, choosing
from headrace.kernels.indexer import IndexQueries, choose, chunks_of
from headrace.kernels.records import Mask, Pool
from headrace.types import CHUNK

AT_ONCE = 1 << 24
"""Bytes of scores, or of chosen keys, that are made at once, such as caches hold: rows come in as many turns as that
takes."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Keys int32 [n, C] that rows of a step, int64 [n], have chosen, both ascending."""

    rows: Tensor
    keys: Tensor

    def of(self, rows: Tensor) -> Tensor:
        """Of some of the rows."""
        return self.keys[torch.searchsorted(self.rows, rows)]


class ChoosingAttention(PlanAttention):
    """PlanAttention of a model with indexers: rows that see no more keys than they may choose go their usual way."""

    @property
    def index(self) -> IndexSpec:
        assert self.spec.index is not None, "the model has indexers"
        return self.spec.index

    @cached_property
    def choosing(self) -> SparseBackend:
        return choosing(self.kernels)

    @cached_property
    def tables(self) -> Tensor:
        """Slots of each row's chunks, int32 [T, chunks]: the same in all steps of a run."""
        return _tables(self.items[None].numpy(), self.plan.rows)

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
        is_far, width = self.positions[wanted] >= self.index.chosen, self.spec.index_width
        wide = torch.nn.functional.pad(q, (width, 0))
        if not self._choose(index) or not is_far.any():
            return self(layer, wide, k, v, rows)[..., width:]
        far, near = wanted[is_far], wanted[~is_far]
        out = q.new_empty(len(wanted), *q.shape[1:])
        if len(near):
            out[~is_far] = self(layer, wide, k, v, near)[..., width:]
        else:
            self.kernels.append(self.storage.pool(layer), k, v, self.row_slots, self.row_offsets)
        out[is_far] = self._attended(layer, q, index, far)
        return out

    def _sinks(self, layer: int) -> Tensor | None:
        """Those of a layer (kernels.records.Mask)."""
        return None if self.sinks is None else self.sinks[layer]

    def _choose(self, index: IndexQueries | None) -> bool:
        """Whether rows of a layer attend to some keys alone. index: what its indexer makes of them, if it has one."""
        return True

    @abstractmethod
    def _attended(self, layer: int, q: Tensor, index: IndexQueries | None, rows: Tensor) -> Tensor:
        """Attention of rows [F] over the keys that they choose: [F, Hq, D - I]. q [T, Hq, D - I]."""


class SparseAttention(ChoosingAttention):
    """What a layer's rows choose is kept for those behind it without an indexer."""

    _choice: Choice | None = None

    def advance(self, plan: Plan) -> None:
        super().advance(plan)
        self._choice = None

    def _attended(self, layer: int, q: Tensor, index: IndexQueries | None, rows: Tensor) -> Tensor:
        pool, sinks = self.storage.pool(layer), self._sinks(layer)
        if index is not None:
            self._choice = Choice(rows, self._chosen(pool, index, rows))
        assert self._choice is not None, "the first layer has an indexer"
        keys, chunks = self._choice.of(rows), chunks_of(self.index.chosen)
        bytes_of_row = chunks * CHUNK * q.shape[2] * self.storage.dtype.itemsize
        parts = []
        for some, theirs in zip(*(each.split(max(1, AT_ONCE // bytes_of_row)) for each in (rows, keys)), strict=True):
            made = self.choosing.gather(pool, self.tables[some], theirs, self.index.size, q.dtype)
            items, last = _own_items(len(some), chunks), _last(len(some), self.index.chosen)
            mask = Mask(items, last, scale=self.spec.scale, sinks=sinks)
            parts.append(self.kernels.attend(q[some], made, mask))
        return torch.cat(parts)

    def _chosen(self, pool: Pool, index: IndexQueries, rows: Tensor) -> Tensor:
        """What rows [F] choose: int32 [F, C]."""
        keys = self.tables.shape[1] * CHUNK
        chosen = []
        for some in rows.split(max(1, AT_ONCE // (4 * keys))):
            items = items_of(self.items[None], some)
            scores = self.choosing.index_scores(index.of(some), pool, items, self.positions[some], keys)
            chosen.append(choose(scores, self.index.chosen))
        return torch.cat(chosen)


def _tables(items: Int32, rows: int) -> Tensor:
    """Slots of each row's chunks, int32 [T, chunks], -1 for none, from the items of a plan."""
    chunks = int(items[:, 1].max(initial=-CHUNK)) // CHUNK + 1
    tables = np.full((chunks, rows), -1, dtype=np.int32)
    for slot, key, begin, end in items.tolist():
        tables[key // CHUNK, begin:end] = slot
    return torch.from_numpy(np.ascontiguousarray(tables.T))


def _own_items(rows: int, chunks: int) -> Tensor:
    """Items of rows each of which has so many chunks of its own, one row's behind another's."""
    slots = torch.arange(rows * chunks, dtype=torch.int32)
    row = slots // chunks
    return torch.stack((slots, slots % chunks * CHUNK, row, row + 1), dim=1)


def _last(rows: int, keys: int) -> Tensor:
    """Positions of rows that see so many keys."""
    return torch.full((rows,), keys - 1)
