"""Something to attend over: a storage filled with random keys and values, and plans over it.

Only what every caller of attention may use is used here: plans, KVStorage and PlanAttention. What lies where in the
pools is the kernels' affair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headrace.attention.execute import PlanAttention
from headrace.attention.plan import Int32, Plan, Span, build
from headrace.config import AttentionSpec
from headrace.kernels.backend import backend_of
from headrace.kv.storage import KVStorage
from headrace.types import CHUNK, chunks_for

ELEMENT = 2
"""Bytes of a bf16 number."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of one attention layer."""

    name: str
    heads: int
    kv_heads: int
    dim: int

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(1, self.heads, self.kv_heads, self.dim, self.dim**-0.5, (None,))

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token."""
        return self.spec.kv_bytes_per_token(ELEMENT)

    @property
    def token_bytes_int8(self) -> int:
        """The same, stored as int8 with scales."""
        return KVStorage.bytes_per_token(self.spec, torch.int8)

    def ops(self, pairs: int) -> int:
        """Operations of both products over that many (row, key) pairs, all heads."""
        return 4 * self.dim * self.heads * pairs

    def rows(self, count: int) -> Tensor:
        """Random query rows [count, heads, dim]."""
        return torch.randn(count, self.heads, self.dim).bfloat16()

    def keys(self, count: int) -> Tensor:
        """Random keys or values [count, KV heads, dim]."""
        return torch.randn(count, self.kv_heads, self.dim).bfloat16()


MHA = Heads("mha", 32, 32, 128)
GQA = Heads("gqa", 32, 8, 128)
H64 = Heads("h64", 32, 32, 64)


@dataclass(frozen=True, slots=True)
class Repeated:
    """A call that does the same work several times: what is timed is one of them."""

    run: Callable[[], object]
    calls: int

    def __call__(self) -> object:
        return self.run()


class AttentionTestbed:
    """`slots` chunks of random keys and values for each of some layers of that shape."""

    def __init__(
        self, heads: Heads, slots: int, backend: str, stored: torch.dtype = torch.bfloat16, layers: int = 1
    ) -> None:
        self.heads, self.backend = heads, backend_of(backend)
        self.spec = replace(heads.spec, layers=layers, windows=(None,) * layers)
        self.storage = KVStorage(self.spec, slots, stored)
        block = 16 * CHUNK
        q, k, v = heads.rows(block), heads.keys(block), heads.keys(block)
        for first in range(0, slots, 16):
            count = min(16, slots - first) * CHUNK
            plan = Plan(
                items=np.zeros((0, 4), dtype=np.int32),
                shared=0,
                positions=np.arange(count),
                row_slots=np.repeat(np.arange(first, first + count // CHUNK, dtype=np.int32), CHUNK),
                row_offsets=np.tile(np.arange(CHUNK, dtype=np.int32), count // CHUNK),
            )
            store = PlanAttention(plan, self.storage, self.spec, self.backend)
            for layer in range(layers):
                store(layer, q[:count], k[:count], v[:count])

    def attend(self, plan: Plan) -> Repeated:
        """Attention of random rows by `plan` in every layer, one after another as in a step."""
        mask = PlanAttention(plan, self.storage, self.spec, self.backend).masks[None]
        q = self.heads.rows(plan.rows)

        def step() -> Tensor:
            for layer in range(self.spec.layers):
                out = self.backend.attend(q, self.storage.pool(layer), mask)
            return out

        return Repeated(step, self.spec.layers)


def decode_spans(paths: list[list[int]], length: int) -> list[Span]:
    """One row per sequence at the end of `length` tokens whose chunks lie in the slots of `paths`."""
    return [Span(np.array(path, dtype=np.int32), length - 1, 1) for path in paths]


def private(sequences: int, length: int) -> list[list[int]]:
    """Slots of sequences that share nothing."""
    width = chunks_for(length)
    return [list(range(first, first + width)) for first in range(0, sequences * width, width)]


def shared(groups: list[int], lengths: list[int], own: int) -> list[list[int]]:
    """Slots of sequences in a tree: lengths[i] tokens are shared at level i, by all of a node's sequences.

    groups[i]: children of a node at level i; the last level's children are the sequences, with `own` tokens each.
    """
    paths: list[list[int]] = [[]]
    free = 0
    for count, tokens in zip([*groups, 1], [*lengths, own], strict=True):
        width = chunks_for(tokens)
        grown = []
        for path in paths:
            node = [*path, *range(free, free + width)]
            free += width
            grown += [list(node) for _ in range(count)]
        paths = grown
    return paths


def slots_of(paths: list[list[int]]) -> int:
    """Slots that a storage for these paths needs."""
    return max(max(path) for path in paths) + 1


def unmerged(paths: list[list[int]], length: int) -> Plan:
    """A plan over shared slots that meets them once per sequence, as a kernel does that does not know of sharing."""
    alone = build(decode_spans(private(len(paths), length), length))
    where = np.array([slot for path in paths for slot in path], dtype=np.int32)
    items = alone.items.copy()
    items[:, 0] = where[items[:, 0]]
    return replace(alone, items=items, row_slots=where[alone.row_slots])


def chunk_first(plan: Plan) -> Plan:
    """The first phase alone: the items that cover several sequences."""
    return replace(plan, items=np.ascontiguousarray(plan.items[: plan.shared]))


def pairs(plan: Plan) -> int:
    """(row, key) pairs that the mask lets through."""
    return int(sum(_seen(item, plan.positions) for item in plan.items))


def _seen(item: Int32, positions: np.ndarray) -> int:
    _, key, begin, end = item.tolist()
    return int(np.clip(positions[begin:end] - key + 1, 0, CHUNK).sum())
