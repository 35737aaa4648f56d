"""Attention of a rank's rows over chunks that arrive one by one, in the canonical order whatever comes first.

T: rows, Hq: query heads, D: head size. If everything is there, it is one `attend`. Otherwise each run merges its chunks
from left to right as far as they are there; beyond a gap, whole blocks of 2,048 keys (on a GPU 512) are merged apart
and put in when their turn comes (kernels.state.merge_blocks). The bits are those of one `attend` in any case
(docs/attention.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.attention import plan as planning
from headrace.attention.plan import Int32
from headrace.config import AttentionSpec
from headrace.config.attention import first_seen
from headrace.kernels.backend import Backend, in_pieces
from headrace.kernels.records import Mask, Pool
from headrace.kernels.state import RunningState
from headrace.parallel.group_layout import RowRange
from headrace.parallel.transport import Transfer
from headrace.types import CHUNK

Kept = dict[Any, Any]
"""See Mask."""


class Kernels:
    """A backend with what is the same in all of its calls. Raises ValueError for one that cannot attend in pieces."""

    def __init__(
        self, backend: Backend, spec: AttentionSpec, bias: Tensor | None, sinks: Sequence[Tensor] | None = None
    ) -> None:
        self.backend, self.spec, self.bias, self.sinks = in_pieces(backend), spec, bias, sinks

    @property
    def block_chunks(self) -> int:
        """Chunks of a block of the backend's canonical order."""
        return self.backend.capabilities.block_chunks

    def attend(
        self, layer: int, q: Tensor, pool: Pool, items: Tensor, positions: Tensor, kept: Kept | None = None
    ) -> Tensor:
        """kept: see Mask; of the same items and positions in each call."""
        return self.backend.attend(q, pool, self._mask(layer, items, positions, kept))

    def partial(
        self, layer: int, q: Tensor, pool: Pool, items: Tensor, positions: Tensor, state: RunningState | None,
        kept: Kept | None = None,
    ) -> RunningState:  # fmt: skip
        return self.backend.partial(q, pool, self._mask(layer, items, positions, kept), state)

    def finish(self, layer: int, state: RunningState, dtype: torch.dtype) -> Tensor:
        return self.backend.finish(state, dtype, self.sinks_of(layer))

    def sinks_of(self, layer: int) -> Tensor | None:
        """Those of a layer (kernels.records.Mask)."""
        return None if self.sinks is None else self.sinks[layer]

    def _mask(self, layer: int, items: Tensor, positions: Tensor, kept: Kept | None) -> Mask:
        spec, window = self.spec, self.spec.windows[layer]
        more: dict[str, Any] = dict(bias=self.bias, cap=spec.score_cap, sinks=self.sinks_of(layer), scale=spec.scale)
        return Mask(items, positions, window=window, kept=kept, **more)


class Arriving(NamedTuple):
    """Chunks begin .. end-1 of the workspace, and what brings them: a receive of each tensor, or this rank's pool."""

    works: Sequence[Transfer]
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

    def __init__(self, runs: list[RowRange], tables: list[Int32], kernels: Kernels, device: torch.device) -> None:
        """device: where keys are written. To carry slots there for each layer would hold up the host."""
        self.runs, self.tables, self.kernels = runs, tables, kernels
        plan = planning.build([planning.Span(t, r.start, r.rows) for r, t in zip(runs, tables, strict=True)])
        self.positions = torch.from_numpy(plan.positions)
        self.slots, self.offsets = (torch.from_numpy(x).to(device) for x in (plan.row_slots, plan.row_offsets))
        windows = set(kernels.spec.windows)
        self.items = {window: torch.from_numpy(plan.items_within(window)) for window in windows}
        self.kept: dict[int | None, Kept] = {window: {} for window in windows}

    def __len__(self) -> int:
        return len(self.positions)

    def attend(self, layer: int, q: Tensor, pool: Pool, arrivals: list[Arriving]) -> Tensor:
        """q [T, Hq, D] over all that the rows see -> [T, Hq, D]. Returns when every arrival has come."""
        ready = np.ones(len(pool.k), dtype=bool)
        for each in arrivals:
            ready[each.begin : each.end] = False
        pending = _note(arrivals, ready)
        if not pending:
            window = self.kernels.spec.windows[layer]
            return self.kernels.attend(layer, q, pool, self.items[window], self.positions, self.kept[window])
        merging = self._runs(layer, q, pool)
        while not all(run.finished for run in merging):
            pending = _note(pending, ready)
            if any([run.advance(ready) for run in merging]) or any(run.look_ahead(ready) for run in merging):
                continue
            _take(pending.pop(0), ready)
        for each in pending:
            each.wait()
        return torch.cat([run.finish(q.dtype) for run in merging])

    def _runs(self, layer: int, q: Tensor, pool: Pool) -> list[_MergingRun]:
        merging, begin = [], 0
        for run, table in zip(self.runs, self.tables, strict=True):
            rows = slice(begin, begin + run.rows)
            merging.append(_MergingRun(self.kernels, layer, q[rows], pool, table, self.positions[rows], run.start))
            begin += run.rows
        return merging


def _note(pending: list[Arriving], ready: np.ndarray) -> list[Arriving]:
    """Marks what has come; what has not."""
    left = []
    for each in pending:
        if each.done:
            _take(each, ready)
        else:
            left.append(each)
    return left


def _take(each: Arriving, ready: np.ndarray) -> None:
    """Waits; on a device that orders what reads the chunks behind their arrival, and the host goes on before it."""
    each.wait()
    ready[each.begin : each.end] = True


@dataclass(slots=True)
class _MergingRun:
    """Where one run stands: chunks before `next` are merged into `state`; `early` holds blocks merged apart."""

    kernels: Kernels
    layer: int
    q: Tensor
    pool: Pool
    table: Int32
    positions: Tensor
    start: int
    next: int = 0
    state: RunningState | None = None
    early: dict[int, RunningState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        window = self.kernels.spec.windows[self.layer]
        if window is not None:
            self.next = max(0, first_seen(self.start, window)) // CHUNK

    @property
    def _block(self) -> int:
        return self.kernels.block_chunks

    @property
    def finished(self) -> bool:
        return self.next == len(self.table)

    def advance(self, ready: np.ndarray) -> bool:
        """Merges on as far as chunks are there; False if that is nowhere."""
        before = self.next
        while not self.finished:
            block = self.next // self._block
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
        """The chunk before which the next call must stop: one that is not there, or in a block merged apart."""
        missing = np.flatnonzero(~ready[self.table[self.next :]])
        end = self.next + int(missing[0]) if len(missing) else len(self.table)
        return min([end, *(block * self._block for block in self.early)])

    def _put_in(self, block: int) -> None:
        right = self.early.pop(block)
        self.state = right if self.state is None else self.kernels.backend.merge_blocks(self.state, right)
        self.next = min((block + 1) * self._block, len(self.table))

    def look_ahead(self, ready: np.ndarray) -> bool:
        """Merges one whole block beyond the gap, apart; False if there is none."""
        for block in range(self.next // self._block + 1, -(-len(self.table) // self._block)):
            begin, end = block * self._block, min((block + 1) * self._block, len(self.table))
            if block not in self.early and ready[self.table[begin:end]].all():
                self.early[block] = self._partial(begin, end, None)
                return True
        return False

    def _partial(self, begin: int, end: int, state: RunningState | None) -> RunningState:
        chunks = np.arange(begin, end, dtype=np.int32)
        items = np.empty((len(chunks), 4), dtype=np.int32)
        items[:, 0], items[:, 1] = self.table[begin:end], chunks * CHUNK
        items[:, 2], items[:, 3] = np.maximum(0, chunks * CHUNK - self.start), len(self.q)
        return self.kernels.partial(self.layer, self.q, self.pool, torch.from_numpy(items), self.positions, state)

    def finish(self, dtype: torch.dtype) -> Tensor:
        assert self.state is not None, "a row sees its own chunk"
        return self.kernels.finish(self.layer, self.state, dtype)
