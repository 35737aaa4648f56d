"""The one loop of the system: run a plan over the cache, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from headrace.attention.plan import Int32, Plan
from headrace.config import AttentionSpec
from headrace.kernels.backend import Attend, Backend, PreparedStep
from headrace.kernels.cpu_step import Pools, Step, StepOver, over_layers
from headrace.kernels.records import QKRotary, StepInputs
from headrace.kv.storage import KVStorage, LayerPools
from headrace.types import CHUNK

__all__ = ["Attend", "KeepActivations", "PlanAttention", "items_of"]


class PlanAttention(Attend):
    """Attend for one step: a plan, the storage it reads and writes, and the backend that runs it.

    key_bias: fp32 [Hq, positions] for ALiBi, else None; sinks: fp32 [Hq] of each layer, or None.
    """

    def __init__(
        self,
        plan: Plan,
        storage: LayerPools,
        spec: AttentionSpec,
        backend: Backend,
        key_bias: Tensor | None = None,
        sinks: Sequence[Tensor] | None = None,
    ) -> None:
        self.plan, self.storage, self.spec, self.key_bias, self.sinks = plan, storage, spec, key_bias, sinks
        self.kernels = backend
        self.positions = torch.from_numpy(plan.positions)
        self.row_slots = torch.from_numpy(plan.row_slots)
        self.row_offsets = torch.from_numpy(plan.row_offsets)
        self.items = {window: torch.from_numpy(plan.items_within(window)) for window in set(spec.windows)}
        self.inputs = StepInputs(
            self.items, self.positions, self.row_slots, self.row_offsets, heads=spec.heads, dtype=storage.dtype,
            shape=(storage.slots, *spec.shape(0)), scale=spec.scale, cap=spec.score_cap, bias=key_bias, once=spec.once,
        )  # fmt: skip
        self.masks = self.inputs.masks(self.positions)
        self.steps = {shape: step for shape in spec.every_shape if (step := self._step(shape)) is not None}
        if self.steps and spec.index is None and backend.capabilities.all_layers and isinstance(storage, KVStorage):
            self.prepared = self._over(_pools(storage, spec))

    def advance(self, plan: Plan) -> None:
        """Takes the plan of a later step of the same run (plan.PlannedStep): other positions for the same items.

        Items that have left a window since stay: they are masked, as for any row that sees none of them."""
        positions, offsets = torch.from_numpy(plan.positions), torch.from_numpy(plan.row_offsets)
        for step in self.steps.values():
            step.go_on(positions, offsets)
        self.plan, self.positions, self.row_offsets = plan, positions, offsets
        self.masks = self.inputs.masks(positions)

    def _over(self, pools: Pools) -> StepOver:
        spec, steps = self.spec, self.steps
        if len(spec.every_shape) == 1 and not spec.shared:
            return steps[spec.shape(0)].over(pools, spec.windows, self.sinks)
        own = {shape: step for shape, step in steps.items() if isinstance(step, Step)}
        return over_layers(own, pools, spec, self.sinks)

    def _step(self, shape: tuple[int, int]) -> PreparedStep | None:
        """append and attend in one call, prepared once for all layers of a shape, where the backend has that."""
        can = self.kernels.capabilities
        if not (can.prepared_int8 if self.storage.dtype == torch.int8 else can.prepared_step):
            return None
        items = {window: self.items[window] for window in self.spec.windows_of(shape)}
        return self.kernels.prepare(replace(self.inputs, items=items, shape=(self.storage.slots, *shape)))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        pool, window = self.storage.pool(layer), self.spec.windows[layer]
        sinks = None if self.sinks is None else self.sinks[layer]
        step = self.steps.get(self.spec.shape(layer))
        if step is not None and rows is None:
            return step(pool, q, k, v, window, sinks)
        self.kernels.append(pool, k, v, self.row_slots, self.row_offsets)
        return self.stored(layer, q, rows)

    def stored(self, layer: int, q: Tensor, rows: Tensor | None = None) -> Tensor:
        mask, pool = self.masks[self.spec.windows[layer]], self.storage.pool(layer)
        if self.sinks is not None:
            mask = replace(mask, sinks=self.sinks[layer])
        if rows is not None:
            q = q[rows]
            mask = replace(mask, items=items_of(mask.items, rows), positions=mask.positions[rows])
        return self.kernels.attend(q, pool, mask)

    def projected(self, layer: int, heads: Tensor, rotary: QKRotary, rows: Tensor | None = None) -> Tensor:
        step = self.steps.get(self.spec.shape(layer))
        if step is None or rows is not None:
            return super().projected(layer, heads, rotary, rows)
        sinks = None if self.sinks is None else self.sinks[layer]
        return step.projected(self.storage.pool(layer), heads, rotary, self.spec.windows[layer], sinks)


_known: WeakKeyDictionary[KVStorage, Pools] = WeakKeyDictionary()


def _pools(storage: KVStorage, spec: AttentionSpec) -> Pools:
    """The pools of a storage, checked once: they stay where they are."""
    pools = _known.get(storage)
    if pools is None:
        shapes = [(storage.slots, *spec.shape(layer)) for layer in range(spec.stored)]
        _known[storage] = pools = Pools(storage.pools, shapes)
    return pools


class KeepActivations:
    """What Decoder.forward calls as `watch`: copies a step's activations into the storage's X pools.

    slots, offsets int32 [T]: where each row goes; those of negative slots are not kept.
    """

    def __init__(self, slots: Int32, offsets: Int32, storage: KVStorage) -> None:
        if storage.x is None:
            raise ValueError("this storage keeps no activations; make it with `hidden`")
        kept, device = slots >= 0, storage.x[0].device
        self.rows = None if kept.all() else torch.from_numpy(kept.nonzero()[0]).to(device)
        places = slots[kept].astype("int64") * CHUNK + offsets[kept]
        self.pools, self.places = storage.x, torch.from_numpy(places).to(device)

    def __call__(self, layer: int, x: Tensor) -> None:
        """x [T, H], the residual stream as it enters the layer."""
        kept = x if self.rows is None else x[self.rows]
        self.pools[layer].view(-1, x.shape[-1]).index_copy_(0, self.places, kept)


def items_of(items: Tensor, rows: Tensor) -> Tensor:
    """The items of a plan for some of its rows, int64 [n], ascending, which are then numbered from 0."""
    begin, end = torch.searchsorted(rows, items[:, 2].contiguous()), torch.searchsorted(rows, items[:, 3].contiguous())
    kept = end > begin
    return torch.stack((items[:, 0], items[:, 1], begin.int(), end.int()), dim=1)[kept].contiguous()
