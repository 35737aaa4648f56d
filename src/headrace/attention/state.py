"""The primitive: attention over a segment of keys is a value, and such values can be merged.

T: rows, Hq: query heads, D: head size. Everything is fp32 with natural logarithms; EMPTY = (0, -inf).
docs/attention.md has the mathematics. A `Partial` is the same value unnormalised, the form in which kernels fold:
out = acc / l, lse = m + log l. This file is the only place that converts between the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttnState:
    """Attention of rows over a segment: out fp32 [T, Hq, D], lse fp32 [T, Hq] (natural log; -inf: no key seen)."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True, slots=True)
class Partial:
    """The same, unnormalised: acc [T, Hq, D] and l [T, Hq] relative to the maximum m [T, Hq]; EMPTY = (0, -inf, 0)."""

    acc: Tensor
    m: Tensor
    l: Tensor  # noqa: E741


def empty(rows: int, heads: int, head_dim: int) -> AttnState:
    """The state of rows that have seen no key: the neutral element of merge."""
    return AttnState(torch.zeros(rows, heads, head_dim), torch.full((rows, heads), -torch.inf))


def empty_partial(rows: int, heads: int, head_dim: int) -> Partial:
    state = empty(rows, heads, head_dim)
    return Partial(state.out, state.lse, torch.zeros(rows, heads))


def _shift(m: Tensor, top: Tensor) -> Tensor:
    """exp(m - top), and 0 where m is -inf, top being -inf or not."""
    return torch.where(m == -torch.inf, 0.0, torch.exp(m - torch.where(top == -torch.inf, 0.0, top)))


def fold(left: Partial, right: Partial) -> Partial:
    """Both segments' attention, unnormalised (ChunkAttention, equation 2). Folding EMPTY changes no bit."""
    top = torch.maximum(left.m, right.m)
    x, y = _shift(left.m, top), _shift(right.m, top)
    return Partial(left.acc * x[..., None] + right.acc * y[..., None], top, left.l * x + right.l * y)


def normalise(partial: Partial) -> AttnState:
    """out = acc / l and lse = m + log l; rows that saw nothing become EMPTY."""
    seen = partial.l > 0
    out = torch.where(seen[..., None], partial.acc / torch.where(seen, partial.l, 1.0)[..., None], 0.0)
    return AttnState(out, torch.where(seen, partial.m + torch.log(torch.where(seen, partial.l, 1.0)), -torch.inf))


def merge(left: AttnState, right: AttnState) -> AttnState:
    """Attention over the union of two disjoint segments (context parallelism, equation 4). Two EMPTY give EMPTY."""
    top = torch.maximum(left.lse, right.lse)
    x, y = _shift(left.lse, top), _shift(right.lse, top)
    total = x + y
    seen = total > 0
    safe = torch.where(seen, total, 1.0)
    out = (left.out * x[..., None] + right.out * y[..., None]) / safe[..., None]
    return AttnState(out, torch.where(seen, top + torch.log(safe), -torch.inf))
