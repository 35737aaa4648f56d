"""Attention of a step whose rows choose their keys by an indexer (DSA; DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

A row attends to the keys that it has chosen as if they were its whole past: in the order of their positions, in chunks
of 64. So a row that sees no more keys than it may choose, attends as any other model's does, over the chunks that it
shares; its bits follow from its own past alone either way, whatever else a step computes.

T: rows of a step; F: of these those that see more keys than they may choose; C: how many these are; D: numbers stored
of a token, I of them the indexer's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from headrace.attention.execute import PlanAttention, items_of
from headrace.attention.plan import Int32, Plan
from headrace.config import AttentionSpec, IndexSpec
from headrace.kernels.backend import SparseBackend, choosing
from headrace.kernels.indexer import IndexQueries, choose, chunks_of
from headrace.kernels.records import Mask, Pool
from headrace.types import CHUNK

AT_ONCE = 1 << 24
"""Bytes of scores, or of chosen keys, that are made at once, such as caches hold: rows come in as many turns as that
takes."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Keys int32 [n, C] that rows of a step, int64 [n], have chosen, both ascending; counts int64 [n]: how many."""

    rows: Tensor
    keys: Tensor
    counts: Tensor

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and counts of some of the rows."""
        at = torch.searchsorted(self.rows, rows)
        return self.keys[at], self.counts[at]


class SparseRows:
    """Rows of a step that attend to keys of one pool, which they choose. What a layer's rows choose is kept for those
    behind it without an indexer. items int32 [n, 4], positions int64 [T]: as in kernels.records.Mask."""

    def __init__(self, kernels: SparseBackend, spec: AttentionSpec, items: Tensor, positions: Tensor) -> None:
        assert spec.index is not None, "the model has indexers"
        self.kernels, self.spec, self.index = kernels, spec, spec.index
        self.items, self.positions = items, positions
        self._choice: Choice | None = None

    @cached_property
    def tables(self) -> Tensor:
        """Slots of each row's chunks, int32 [T, chunks]: the same in all steps of a run."""
        return tables_of(self.items.numpy(), len(self.positions))

    def advance(self, positions: Tensor) -> None:
        """The same rows a step later in a run."""
        self.positions, self._choice = positions, None

    def attend(
        self, pool: Pool, q: Tensor, index: IndexQueries | None, rows: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of rows [F] over the keys that they choose by `index`, or have chosen: [F, Hq, D - I]. q [T, Hq,
        D - I]; sinks: see kernels.records.Mask."""
        if index is not None:
            self._choice = Choice(rows, *self.chosen(pool, index, rows))
        assert self._choice is not None, "the first layer has an indexer"
        most, parts = self.at_once(self.index, q), []
        chosen = (each.split(most) for each in (rows, *self._choice.of(rows)))
        for some, theirs, counts in zip(*chosen, strict=True):
            made = self.kernels.gather(pool, self.tables[some], theirs, self.spec.index_width, q.dtype)
            parts.append(self.kernels.attend(q[some], made, own_mask(self.spec, theirs, counts, sinks)))
        return torch.cat(parts)

    @staticmethod
    def at_once(index: IndexSpec, q: Tensor) -> int:
        """Rows of q [T, Hq, D - I] whose keys are copied together."""
        return max(1, AT_ONCE // (chunks_of(index.most) * CHUNK * q.shape[2] * q.itemsize))

    def chosen(self, pool: Pool, index: IndexQueries, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What rows [F] choose, as `keys_of` tells it."""
        count = self.index.chosen // self.index.pool
        found = torch.cat([choose(scores, count) for scores in self.scores(pool, index, rows)])
        return keys_of(self.index, found, self.positions[rows])

    def scores(self, pool: Pool, index: IndexQueries, rows: Tensor) -> Iterator[Tensor]:
        """Of rows [F], some after some: fp32 [n, keys], by position, or of pools."""
        keys = self.tables.shape[1] * CHUNK
        for some in rows.split(max(1, AT_ONCE // (4 * keys))):
            items = items_of(self.items, some)
            yield self.kernels.index_scores(index.of(some), pool, items, self.positions[some], keys)


class ChoosingAttention(PlanAttention):
    """PlanAttention of a model with indexers: rows that see no more keys than they may choose go their usual way."""

    @property
    def index(self) -> IndexSpec:
        assert self.spec.index is not None, "the model has indexers"
        return self.spec.index

    @cached_property
    def choosing(self) -> SparseBackend:
        return choosing(self.kernels)

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
        is_far, width = self.positions[wanted] >= self.index.most, self.spec.index_width
        wide = torch.nn.functional.pad(q, (width, 0))
        if not self._choose(index) or not is_far.any():
            return self(layer, wide, k, v, rows)[..., width:]
        if is_far.all():
            self.kernels.append(self.storage.pool(layer), k, v, self.row_slots, self.row_offsets)

        def near(some: Tensor) -> Tensor:
            return self(layer, wide, k, v, some)[..., width:]

        return apart(q, wanted, is_far, near, lambda some: self._attended(layer, q, index, some))

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
    """Of rows that choose keys one by one."""

    @cached_property
    def _rows(self) -> SparseRows:
        return SparseRows(self.choosing, self.spec, self.items[None], self.positions)

    def advance(self, plan: Plan) -> None:
        super().advance(plan)
        self._rows.advance(self.positions)

    def _attended(self, layer: int, q: Tensor, index: IndexQueries | None, rows: Tensor) -> Tensor:
        return self._rows.attend(self.storage.pool(layer), q, index, rows, self._sinks(layer))


def apart(
    q: Tensor, wanted: Tensor, is_far: Tensor, near: Callable[[Tensor], Tensor], far: Callable[[Tensor], Tensor]
) -> Tensor:
    """Attention of rows `wanted` [n], which `far` makes of those that choose keys, and `near`, first, of the others:
    [n, Hq, D - I]. q [T, Hq, D - I]."""
    out = q.new_empty(len(wanted), *q.shape[1:])
    for these, attend in ((~is_far, near), (is_far, far)):
        if these.any():
            out[these] = attend(wanted[these])
    return out


def keys_of(index: IndexSpec, chosen: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Keys int32 [n, most] that rows attend to, and how many int64 [n], by those that they have chosen, int32 [n, C].
    Where keys are pooled, `chosen` are pools, and those behind a row's last whole one follow, up to its position."""
    if (of := index.pool) == 1:
        return chosen, torch.full((len(chosen),), chosen.shape[1])
    keys = (chosen[..., None] * of + torch.arange(of, dtype=torch.int32)).flatten(1)
    seen = (positions + 1)[:, None]
    last = (seen // of * of + torch.arange(of - 1)).minimum(seen - 1)
    return torch.cat((keys, last.int()), dim=1), keys.shape[1] + seen[:, 0] % of


def tables_of(items: Int32, rows: int) -> Tensor:
    """Slots of each row's chunks, int32 [T, chunks], -1 for none, from the items of a plan."""
    chunks = int(items[:, 1].max(initial=-CHUNK)) // CHUNK + 1
    tables = np.full((chunks, rows), -1, dtype=np.int32)
    for slot, key, begin, end in items.tolist():
        tables[key // CHUNK, begin:end] = slot
    return torch.from_numpy(np.ascontiguousarray(tables.T))


def own_mask(spec: AttentionSpec, keys: Tensor, counts: Tensor | None, sinks: Tensor | None) -> Mask:
    """What rows see whose `keys` [n, C] lie in chunks of their own, one row's behind another's. counts int64 [n]: how
    many of them each has; None: all."""
    rows, most = keys.shape
    chunks = chunks_of(most)
    last = torch.full((rows,), most - 1) if counts is None else counts - 1
    slots = torch.arange(rows * chunks, dtype=torch.int32)
    row, begin = slots // chunks, slots % chunks * CHUNK
    items = torch.stack((slots, begin, row, row + 1), dim=1)
    return Mask(items[begin <= last[row]].contiguous(), last, scale=spec.scale, sinks=sinks)
