"""Ring pass-Q over ranks as threads, and one rank that owns everything, of the same group: their fp32 states."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace.attention import plan as planning
from headrace.config import AttentionSpec
from headrace.kernels.backend import backend_of, in_pieces
from headrace.kernels.records import Mask
from headrace.kv.storage import KVStorage
from headrace.parallel import group_layout
from headrace.parallel.coming import NothingComes
from headrace.parallel.group_context import GroupContext, TokenCounters
from headrace.parallel.merging import Kernels
from headrace.parallel.messages import StepGroup, StepPart
from headrace.parallel.ring_q import RingQ
from headrace.parallel.transport import LoopbackHub
from headrace.parallel.workspace import Workspace
from headrace.types import CHUNK


@dataclass
class PassQ:
    """A group of one layer on `size` ranks of `slots` chunks each.

    new: q [N, Hq, D], k and v [N, Hkv, D] of the new tokens, part by part. cached: k and v of all slots of all ranks,
    [size * slots * 64, Hkv, D].
    """

    size: int
    slots: int
    group: StepGroup
    spec: AttentionSpec
    new: list[Tensor]
    cached: list[Tensor] | None = None
    kv: torch.dtype | None = None
    backend: str = "cpu"

    def truth(self) -> Tensor:
        """[N, Hq, D]."""
        pool, ops = self._storage(0, self.size * self.slots).pool(0), in_pieces(backend_of(self.backend))
        whole = StepGroup("single", [_by_one_rank(part) for part in self.group.parts])
        runs = group_layout.runs(whole, 0)
        plan = planning.build([planning.Span(group_layout.slots_of(whole, run), run.start, run.rows) for run in runs])
        q, k, v = (x[self._rows(runs)] for x in self.new)
        ops.append(pool, k, v, torch.from_numpy(plan.row_slots), torch.from_numpy(plan.row_offsets))
        window = self.spec.windows[0]
        items, positions = torch.from_numpy(plan.items_within(window)), torch.from_numpy(plan.positions)
        mask = Mask(items, positions, window=window, scale=self.spec.scale)
        out = torch.empty(q.shape)
        out[self._rows(runs)] = ops.states_of(ops.partial(q, pool, mask)).out
        return out

    def found(self) -> Tensor:
        """[N, Hq, D]. Raises what a rank raised."""
        hub, out = LoopbackHub(self.size), torch.zeros(self.new[0].shape)
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                storage = self._storage(rank * self.slots, self.slots)
                context = GroupContext(
                    self.group, 0, hub.transport(rank), storage, self._kernels(), Workspace(self.spec, storage.dtype),
                    self.slots, TokenCounters(), NothingComes(),
                )  # fmt: skip
                rows = self._rows(group_layout.runs(self.group, rank))
                out[rows] = RingQ(context)(0, *(x[rows] for x in self.new)).float()
            except BaseException as error:
                errors.append(error)
                hub.fail(repr(error))

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        assert hub.left_over() == 0
        return out

    def _storage(self, first: int, slots: int) -> KVStorage:
        """With what is cached in slots first .. first+slots-1."""
        storage = KVStorage(self.spec, slots, self.kv or self.new[0].dtype)
        if self.cached is not None:
            at = np.arange(slots * CHUNK, dtype=np.int32)
            k, v = (x[first * CHUNK : (first + slots) * CHUNK] for x in self.cached)
            places = (torch.from_numpy(at // CHUNK), torch.from_numpy(at % CHUNK))
            in_pieces(backend_of(self.backend)).append(storage.pool(0), k, v, *places)
        return storage

    def _rows(self, runs: list[group_layout.RowRange]) -> Tensor:
        """Where rows of these runs stand in `new`."""
        ends = np.cumsum([len(part.tokens) for part in self.group.parts]).tolist()
        found = [torch.arange(run.start, run.end) + ends[run.part] - self.group.parts[run.part].end for run in runs]
        return torch.cat([torch.empty(0, dtype=torch.int64), *found])

    def _kernels(self) -> Kernels:
        """Kernels whose `finish` gives the fp32 states, not their rounding."""
        kernels = Kernels(backend_of(self.backend), self.spec, None)
        ops: Any = kernels.backend
        names = (
            "append",
            "attend",
            "capabilities",
            "empty_running",
            "merge_blocks",
            "merge_into",
            "partial",
            "states_of",
        )
        changed: Any = SimpleNamespace(
            finish=lambda state, dtype, sinks: ops.states_of(state).out, **{name: getattr(ops, name) for name in names}
        )
        kernels.backend = changed
        return kernels


def _by_one_rank(part: StepPart) -> StepPart:
    return msgspec.structs.replace(part, bounds=[part.start, part.end], ranks=[0])
