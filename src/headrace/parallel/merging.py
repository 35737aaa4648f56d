"""Attention of a rank's rows over chunks that arrive one by one, in the canonical order whatever comes first.

T: rows, Hq: query heads, D: head size. If everything is there, it is one `attend`. Otherwise each run folds its chunks
from left to right as far as they are there; beyond a gap, whole blocks of 2,048 keys are folded apart and put in when
their turn comes (kernels.state.fold_blocks). The bits are those of one `attend` in any case (docs/attention.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.attention import plan as planning
from headrace.attention.execute import BACKENDS
from headrace.attention.plan import Int32
from headrace.config import AttentionSpec
from headrace.kernels.state import FoldState
from headrace.parallel.group_layout import RowRange
from headrace.parallel.transport import Transfer
from headrace.parallel.workspace import scales
from headrace.types import BLOCK_CHUNKS, CHUNK

Tensors = list[Tensor]
"""K, V and, for int8, their scales, of all chunks in reach: see parallel.workspace."""


class Kernels:
    """A backend with what is the same in all of its calls."""

    def __init__(self, backend: str, spec: AttentionSpec, bias: Tensor | None) -> None:
        self.ops: Any = BACKENDS[backend]
        self.backend, self.spec, self.bias = backend, spec, bias

    def empty(self, q: Tensor) -> FoldState:
        """The state of rows q [T, Hq, D] that have met no chunk."""
        state: FoldState = self.ops.empty_fold(*q.shape, q.dtype)
        return state

    def append(self, pools: Tensors, k: Tensor, v: Tensor, slots: Tensor, offsets: Tensor) -> None:
        self.ops.append(pools[0], pools[1], k, v, slots, offsets, **scales(pools))

    def attend(self, layer: int, q: Tensor, pools: Tensors, items: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.ops.attend(q, pools[0], pools[1], items, positions, **self._fixed(layer, pools))
        return out

    def partial(
        self, layer: int, q: Tensor, pools: Tensors, items: Tensor, positions: Tensor, state: FoldState | None
    ) -> FoldState:
        fixed = self._fixed(layer, pools)
        done: FoldState = self.ops.partial(q, pools[0], pools[1], items, positions, state=state, **fixed)
        return done

    def _fixed(self, layer: int, pools: Tensors) -> dict[str, Any]:
        window = self.spec.windows[layer]
        return {"scale": self.spec.scale, "window": window, "bias": self.bias, **scales(pools)}


@dataclass(slots=True)
class Arrival:
    """Chunks that a transfer brings: a receive of each tensor, and the workspace's chunks begin .. end-1."""

    works: list[Transfer]
    begin: int
    end: int

    @property
    def done(self) -> bool:
        return all(work.done for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Rows:
    """A rank's rows in a group, its plan over the workspace, and the tables of its runs."""

    def __init__(self, runs: list[RowRange], tables: list[Int32], kernels: Kernels) -> None:
        self.runs, self.tables, self.kernels = runs, tables, kernels
        plan = planning.build([planning.Span(t, r.start, r.rows) for r, t in zip(runs, tables, strict=True)])
        self.positions = torch.from_numpy(plan.positions)
        self.slots, self.offsets = torch.from_numpy(plan.row_slots), torch.from_numpy(plan.row_offsets)
        windows = set(kernels.spec.windows)
        self.items = {window: torch.from_numpy(plan.items_within(window)) for window in windows}

    def __len__(self) -> int:
        return len(self.positions)

    def attend(self, layer: int, q: Tensor, pools: Tensors, arrivals: list[Arrival]) -> Tensor:
        """q [T, Hq, D] over all that the rows see -> [T, Hq, D]. Returns when every arrival has come."""
        pending = [each for each in arrivals if not each.done]
        if not pending:
            items = self.items[self.kernels.spec.windows[layer]]
            return self.kernels.attend(layer, q, pools, items, self.positions)
        ready = np.ones(len(pools[0]), dtype=bool)
        for each in pending:
            ready[each.begin : each.end] = False
        folds = self._folds(layer, q, pools)
        while not all(fold.finished for fold in folds):
            pending = _note(pending, ready)
            if any([fold.advance(ready) for fold in folds]) or any(fold.look_ahead(ready) for fold in folds):
                continue
            pending[0].wait()
        for each in pending:
            each.wait()
        return torch.cat([fold.finish(q.dtype) for fold in folds])

    def _folds(self, layer: int, q: Tensor, pools: Tensors) -> list[_Fold]:
        folds, begin = [], 0
        for run, table in zip(self.runs, self.tables, strict=True):
            rows = slice(begin, begin + run.rows)
            folds.append(_Fold(self.kernels, layer, q[rows], pools, table, self.positions[rows], run.start))
            begin += run.rows
        return folds


def _note(pending: list[Arrival], ready: np.ndarray) -> list[Arrival]:
    """Marks what has come; what has not."""
    left = []
    for each in pending:
        if each.done:
            ready[each.begin : each.end] = True
        else:
            left.append(each)
    return left


@dataclass(slots=True)
class _Fold:
    """Where one run stands: chunks before `next` are folded into `state`; `early` holds blocks folded apart."""

    kernels: Kernels
    layer: int
    q: Tensor
    pools: Tensors
    table: Int32
    positions: Tensor
    start: int
    next: int = 0
    state: FoldState | None = None
    early: dict[int, FoldState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        window = self.kernels.spec.windows[self.layer]
        if window is not None:
            self.next = max(0, (self.start - window + 1) // CHUNK)

    @property
    def finished(self) -> bool:
        return self.next == len(self.table)

    def advance(self, ready: np.ndarray) -> bool:
        """Folds on as far as chunks are there; False if that is nowhere."""
        before = self.next
        while not self.finished:
            block = self.next // BLOCK_CHUNKS
            if block in self.early:
                self._put_in(block)
                continue
            end = self._reach(ready)
            if end == self.next:
                break
            self.state = self._partial(self.next, end, self.state)
            self.next = end
        return self.next > before

    def _reach(self, ready: np.ndarray) -> int:
        """The chunk before which the next call must stop: one that is not there, or in a block folded apart."""
        missing = np.flatnonzero(~ready[self.table[self.next :]])
        end = self.next + int(missing[0]) if len(missing) else len(self.table)
        return min([end, *(block * BLOCK_CHUNKS for block in self.early)])

    def _put_in(self, block: int) -> None:
        right = self.early.pop(block)
        self.state = right if self.state is None else self.kernels.ops.fold_blocks(self.state, right)
        self.next = min((block + 1) * BLOCK_CHUNKS, len(self.table))

    def look_ahead(self, ready: np.ndarray) -> bool:
        """Folds one whole block beyond the gap, apart; False if there is none."""
        for block in range(self.next // BLOCK_CHUNKS + 1, -(-len(self.table) // BLOCK_CHUNKS)):
            begin, end = block * BLOCK_CHUNKS, min((block + 1) * BLOCK_CHUNKS, len(self.table))
            if block not in self.early and ready[self.table[begin:end]].all():
                self.early[block] = self._partial(begin, end, None)
                return True
        return False

    def _partial(self, begin: int, end: int, state: FoldState | None) -> FoldState:
        chunks = np.arange(begin, end, dtype=np.int32)
        items = np.empty((len(chunks), 4), dtype=np.int32)
        items[:, 0], items[:, 1] = self.table[begin:end], chunks * CHUNK
        items[:, 2], items[:, 3] = np.maximum(0, chunks * CHUNK - self.start), len(self.q)
        return self.kernels.partial(self.layer, self.q, self.pools, torch.from_numpy(items), self.positions, state)

    def finish(self, dtype: torch.dtype) -> Tensor:
        assert self.state is not None, "a row sees its own chunk"
        out: Tensor = self.kernels.ops.finish(self.state, dtype)
        return out
