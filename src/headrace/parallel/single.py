"""`single`: one rank computes a prompt from its own pool; chunks of other ranks come to it through a workspace."""

from __future__ import annotations

import numpy as np

from headrace.attention import plan as planning
from headrace.attention.steps import attention_of
from headrace.kernels.backend import Attend
from headrace.parallel.chain import Chain
from headrace.parallel.coming import WaitingAttend
from headrace.parallel.group_context import GroupContext
from headrace.parallel.group_layout import runs, slots_of


def make(context: GroupContext) -> Attend | None:
    """Attend of a group whose parts are computed each by one rank. Chunks of other ranks come through a workspace.

    None for a rank that has no rows, where no rank needs chunks of another.
    """
    group, rank, per_rank = context.group, context.rank, context.slots_per_rank
    if shares(context):
        return Chain(context)
    mine = runs(group, rank)
    if not mine:
        return None
    spans = [
        planning.Span((slots_of(group, run) - rank * per_rank).astype(np.int32), run.start, run.rows) for run in mine
    ]
    plan, kernels = planning.build(spans), context.kernels
    attend = attention_of(plan, context.storage, kernels.spec, kernels.backend, kernels.bias, kernels.sinks)
    own = context.own_slots() if context.coming else []
    waits = any(context.pending(own, layer) for layer in range(context.layers))
    return WaitingAttend(attend, context.coming, own, kernels.spec) if waits else attend


def shares(context: GroupContext) -> bool:
    """Whether a part needs chunks of another rank than its own."""
    per_rank = context.slots_per_rank
    return any(slot // per_rank != part.ranks[0] for part in context.group.parts for slot in part.slots)
