"""One rank computes a group by itself, from its own pool: what a rank does when there is no other."""

from __future__ import annotations

import numpy as np

from headrace.attention import plan as planning
from headrace.attention.execute import PlanAttention
from headrace.kernels.block import Attend
from headrace.parallel import layout
from headrace.parallel.chain import Chain
from headrace.parallel.context import Context


def make(context: Context) -> Attend:
    """Attend of a group whose parts are computed each by one rank. Chunks of other ranks come through a workspace."""
    group, rank, per_rank = context.group, context.rank, context.slots_per_rank
    if shares(context):
        return Chain(context)
    spans = [
        planning.Span(np.array(layout.slots_of(group, run) - rank * per_rank, dtype=np.int32), run.start, run.rows)
        for run in layout.runs(group, rank)
    ]
    kernels = context.kernels
    return PlanAttention(planning.build(spans), context.storage, kernels.spec, kernels.backend, kernels.bias)


def shares(context: Context) -> bool:
    """Whether a part needs chunks of another rank than its own."""
    per_rank = context.slots_per_rank
    return any(slot // per_rank != part.ranks[0] for part in context.group.parts for slot in part.slots)
