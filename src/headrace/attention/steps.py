"""Attention of a step, as the model's kind asks for, and of one step after another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from headrace.attention.block_sparse import BlockSparseAttention
from headrace.attention.execute import PlanAttention
from headrace.attention.plan import Plan, PlannedStep
from headrace.attention.sparse import SparseAttention
from headrace.config import AttentionSpec
from headrace.kernels.backend import Backend
from headrace.kv.storage import KVStorage, LayerPools


def attention_of(
    plan: Plan,
    storage: LayerPools,
    spec: AttentionSpec,
    backend: Backend,
    key_bias: Tensor | None = None,
    sinks: Sequence[Tensor] | None = None,
) -> PlanAttention:
    """Attend for a step of a model with this spec."""
    kind = PlanAttention
    if spec.index is not None:
        kind = SparseAttention if spec.index.block == 1 else BlockSparseAttention
    return kind(plan, storage, spec, backend, key_bias, sinks)


class StepAttention:
    """The PlanAttention of one step after another, made once for each run of steps (plan.PlannedStep)."""

    def __init__(
        self,
        storage: KVStorage,
        spec: AttentionSpec,
        backend: Backend,
        key_bias: Tensor | None = None,
        sinks: Sequence[Tensor] | None = None,
    ) -> None:
        self._make = partial(attention_of, storage=storage, spec=spec, backend=backend, key_bias=key_bias, sinks=sinks)
        self._first: Plan | None = None
        self._attention: PlanAttention | None = None

    def at(self, step: PlannedStep) -> PlanAttention:
        """Attention of the step; valid until the next call."""
        if self._attention is None or step.first is not self._first:
            self._first, self._attention = step.first, self._make(step.plan)
        else:
            self._attention.advance(step.plan)
        return self._attention
