"""Ring pass-Q's states against those of one rank: to the bit where blocks have one owner, 1e-6 where they do not."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
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
from headrace.types import BLOCK_CHUNKS, CHUNK, chunks_for
from tests.support.loopback_ranks import zigzag

SPEC = AttentionSpec(layers=1, heads=4, kv_heads=2, head_dim=64, scale=0.125, windows=(None,))
TOKENS, SLOTS = 5000, 80


def states_as_result(backend: str) -> Kernels:
    """Kernels whose `finish` gives the fp32 states, not their rounding."""
    kernels = Kernels(backend_of(backend), SPEC, None)
    ops: Any = kernels.backend
    names = ("append", "attend", "empty_running", "merge_blocks", "merge_into", "partial", "states_of")
    changed: Any = SimpleNamespace(
        finish=lambda state, dtype, sinks: ops.states_of(state).out, **{name: getattr(ops, name) for name in names}
    )
    kernels.backend = changed
    return kernels


def truth_of(backend: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The states of one rank that owns everything."""
    pool, ops = KVStorage(SPEC, SLOTS, q.dtype).pool(0), in_pieces(backend_of(backend))
    slots = np.arange(chunks_for(TOKENS), dtype=np.int32)
    plan = planning.build([planning.Span(slots, 0, TOKENS)])
    at = (torch.from_numpy(plan.row_slots), torch.from_numpy(plan.row_offsets))
    ops.append(pool, k, v, *at)
    items, positions = torch.from_numpy(plan.items), torch.from_numpy(plan.positions)
    return ops.states_of(ops.partial(q, pool, Mask(items, positions, scale=SPEC.scale))).out


def by_pass_q(backend: str, size: int, owners: list[int], qkv: list[Tensor]) -> Tensor:
    """The states of all rows, computed by `size` ranks as threads; owners[chunk] has the chunk."""
    bounds, ranks = zigzag(0, TOKENS, size)
    used = [0] * size
    slots = []
    for owner in owners:
        slots.append(owner * SLOTS + used[owner])
        used[owner] += 1
    group = StepGroup("ring-q", [StepPart([0] * TOKENS, 0, slots, bounds, ranks, TOKENS)])
    hub, out = LoopbackHub(size), torch.zeros(qkv[0].shape)

    def work(rank: int) -> None:
        storage = KVStorage(SPEC, SLOTS, qkv[0].dtype)
        context = GroupContext(
            group, 0, hub.transport(rank), storage, states_as_result(backend), Workspace(SPEC, storage.dtype), SLOTS,
            TokenCounters(), NothingComes(),
        )  # fmt: skip
        rows = torch.cat([torch.arange(run.start, run.end) for run in group_layout.runs(group, rank)])
        out[rows] = RingQ(context)(0, *(x[rows] for x in qkv))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_states_of_pass_q(size: int, dtype: Any) -> None:
    torch.manual_seed(1)
    shape = ((TOKENS, SPEC.heads, 64), (TOKENS, SPEC.kv_heads, 64), (TOKENS, SPEC.kv_heads, 64))
    qkv = [torch.randn(each).to(dtype) for each in shape]
    truth = truth_of("cpu", *qkv)
    chunks = range(chunks_for(TOKENS))
    by_block = by_pass_q("cpu", size, [chunk // BLOCK_CHUNKS % size for chunk in chunks], qkv)
    assert torch.equal(by_block, truth)
    scattered = by_pass_q("cpu", size, [(7 * chunk) % size for chunk in chunks], qkv)
    assert not torch.equal(scattered, truth), "another order of merging shows, or this test could not fail"
    # Relative to the size of what is averaged: |v| is about 1.
    assert (scattered - truth).abs().max() <= 1e-6 * qkv[2].float().abs().max()
    assert CHUNK * len(chunks) >= TOKENS
