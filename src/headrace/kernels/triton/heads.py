"""Sizes of a layer's heads, and how they lie in the tasks of attention on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.triton import tile_schedule

STATE_BYTES = 1 << 29
"""Of states that tasks of one span may leave; more rows walk all their spans one after another."""


class Heads(NamedTuple):
    """Hq, Hkv and D of a layer, and how its lanes lie in tasks. once: values are the keys as well (records.Pool).
    lanes: that a task may have."""

    heads: int
    kv_heads: int
    dim: int
    once: bool = False
    lanes: int = tile_schedule.LANES

    @property
    def part(self) -> int:
        """Query heads of a task: all of a KV head, where they fit."""
        return min(self.heads // self.kv_heads, self.lanes)

    @property
    def padded(self) -> int:
        """D as the kernels' tiles have it: a power of two."""
        return max(16, 1 << (self.dim - 1).bit_length())

    @property
    def columns(self) -> int:
        """Programs that take the same task."""
        return self.kv_heads * -(-self.heads // self.kv_heads // self.part)

    @property
    def most_states(self) -> int:
        return max(0, STATE_BYTES // (self.heads * (self.dim + 2) * 4))

    def states(self, count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """acc [count, Hq, D], m and z [count, Hq], fp32."""
        acc, m, z = (torch.empty(shape, device=device) for shape in self.state_shapes(count))
        return acc, m, z

    def state_shapes(self, count: int) -> list[tuple[int, ...]]:
        return [(count, self.heads, self.dim), (count, self.heads), (count, self.heads)]
