"""Sequences that share prefixes in pools, and attention of their rows by any backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.attention import plan as planning
from headrace.kernels import reference
from headrace.kernels.records import Mask, Pool
from headrace.types import CHUNK

SHAPES = [(4, 4, 64), (8, 2, 128), (8, 1, 80), (6, 2, 96), (4, 2, 256), (71, 1, 64), (7, 1, 32)]
TREES = {
    "alone": [(0, 700)],
    "short": [(0, 3)],
    "shared": [(640, 700 + 13 * i) for i in range(5)],
    "few": [(1024, 1030 + i) for i in range(3)],
    "none": [(0, 65 + 200 * i) for i in range(4)],
}
"""For each sequence how many tokens it shares with the one before it, and its length."""


class PoolTestbed:
    """Sequences in pools, shares as in TREES. What nobody has written is NaN. once: values are keys (Pool)."""

    def __init__(
        self,
        shares: list[tuple[int, int]],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        apart: bool,
        once: bool = False,
    ) -> None:
        heads, kv_heads, dim = shape
        self.once = once
        total = sum(-(-length // CHUNK) for _, length in shares) + 1
        random = torch.Generator().manual_seed(7)
        self.k = torch.full((total, kv_heads, dim, CHUNK), float("nan"), dtype=dtype)
        self.v = torch.full((total, kv_heads, CHUNK, dim), float("nan"), dtype=dtype)
        self.k = self.v.transpose(2, 3) if once else self.k
        self.tables: list[np.ndarray] = []
        self.tokens: list[tuple[Tensor, Tensor, Tensor]] = []
        slot = total - 1
        for shared, length in shares:
            q = torch.randn(length, heads, dim, generator=random).to(dtype)
            k, v = (torch.randn(length, kv_heads, dim, generator=random).to(dtype) for _ in range(2))
            v = k if once else v
            common = 0 if not self.tables else shared // CHUNK
            if common:
                k[: common * CHUNK], v[: common * CHUNK] = (x[: common * CHUNK] for x in self.tokens[-1][1:])
            table = np.zeros(-(-length // CHUNK), np.int32)
            for chunk in range(len(table)):
                if chunk < common and not apart:
                    table[chunk] = self.tables[-1][chunk]
                    continue
                slot -= 1
                table[chunk] = slot
                part = slice(chunk * CHUNK, min(length, (chunk + 1) * CHUNK))
                offsets = torch.arange(part.stop - part.start, dtype=torch.int32)
                reference.append(Pool(self.k, self.v), k[part], v[part], torch.full_like(offsets, slot), offsets)
            self.tables.append(table)
            self.tokens.append((q, k, v))

    def int8(self) -> Pool:
        """The same rounded to int8. Scales of what nobody has written are NaN."""
        slots, kv_heads, dim, _ = self.k.shape

        def room(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.full(tuple(shape), 77 if dtype == torch.int8 else float("nan"), dtype=dtype)

        pool = Pool.make(slots, kv_heads, dim, torch.int8, room)
        for table, (_, k, v) in zip(self.tables, self.tokens, strict=True):
            at = torch.arange(len(k))
            reference.append(pool, k, v, torch.from_numpy(table)[at // CHUNK], (at % CHUNK).int())
        return pool

    def attend(
        self, rows: list[tuple[int, int, int]], kernels: Any, device: str, pool: Pool | None = None, **others: Any
    ) -> list[Tensor]:
        """rows: (sequence, first position, count). Returns the attention of each. pool: instead of the own one."""
        spans = [planning.Span(self.tables[s][: -(-(at + n) // CHUNK)], at, n) for s, at, n in rows]
        order = planning.batch_order([span.slots for span in spans])
        plan = planning.build([spans[i] for i in order])
        q = torch.cat([self.tokens[rows[i][0]][0][rows[i][1] : rows[i][1] + rows[i][2]] for i in order]).to(device)
        if pool is None:
            tensors = [self.v] if self.once else [self.k, self.v]
            tensors = [x.nan_to_num() if kernels is reference else x.to(device) for x in tensors]
            pool = Pool.of(tensors, self.once)
        items = torch.from_numpy(plan.items_within(others.get("window")))
        mask = Mask(items, torch.from_numpy(plan.positions), scale=q.shape[-1] ** -0.5, **others)
        out: Tensor = kernels.attend(q, pool, mask)
        parts = dict(zip(order, out.cpu().split([rows[i][2] for i in order]), strict=True))
        return [parts[i] for i in range(len(rows))]


def ends(testbed: PoolTestbed, count: int = 1) -> list[tuple[int, int, int]]:
    return [(s, len(q) - count, count) for s, (q, _, _) in enumerate(testbed.tokens)]
