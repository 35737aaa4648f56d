"""The primitive: attention over a segment of keys is a value, and such values can be merged.

T: rows, Hq: query heads, D: head size. Everything is fp32 with natural logarithms; EMPTY = (0, -inf).
docs/attention.md has the mathematics. A `Partial` is the same value unnormalised, the form in which kernels merge:
out = acc / l, lse = m + log l. A `RunningState` is where rows stand in the canonical merge: what goes from one call of
a backend to the next, or from one rank to another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CPU = torch.device("cpu")


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


class StateRows(NamedTuple):
    """A state of rows begin .. end-1 of others."""

    begin: int
    end: int
    state: Partial


@dataclass(frozen=True, slots=True)
class RunningState:
    """Rows in the midst of the canonical merge, with all that is needed to go on to the same bits.

    total: the blocks that are finished, merged; block: the one that is not; block_of int32 [T]: its index (position of
    a key // length of the backend's blocks), -1 before the first. m counts in `unit` natural logarithms: 1, or log 2 in
    kernels that work in base 2. It stays in the unit of the kernels that merged, because a conversion would cost bits;
    only these kernels can go on merging.
    """

    total: Partial
    block: Partial
    block_of: Tensor
    unit: float = 1.0

    @property
    def shape(self) -> tuple[int, int, int]:
        """(T, Hq, D)."""
        rows, heads, dim = self.total.acc.shape
        return rows, heads, dim

    def expect(self, shape: tuple[int, ...], unit: float) -> None:
        """Raises ValueError unless the state has this shape and unit."""
        if self.shape != shape:
            raise ValueError(f"the state is of rows, heads and head size {self.shape}, these are {shape}")
        if self.unit != unit:
            raise ValueError(
                f"the state counts in {self.unit:.4f} natural logarithms, these kernels in {unit:.4f}: "
                "finish it with the backend and the instruction set that merged it"
            )


def empty(rows: int, heads: int, head_dim: int, device: torch.device = CPU) -> AttnState:
    """The state of rows that have seen no key: the neutral element of merge."""
    out = torch.zeros(rows, heads, head_dim, device=device)
    return AttnState(out, torch.full((rows, heads), -torch.inf, device=device))


def empty_partial(rows: int, heads: int, head_dim: int, device: torch.device = CPU) -> Partial:
    state = empty(rows, heads, head_dim, device)
    return Partial(state.out, state.lse, torch.zeros_like(state.lse))


def empty_running(rows: int, heads: int, head_dim: int, unit: float = 1.0, device: torch.device = CPU) -> RunningState:
    """The state of rows that have met no chunk."""
    total, block = (empty_partial(rows, heads, head_dim, device) for _ in range(2))
    return RunningState(total, block, torch.full((rows,), -1, dtype=torch.int32, device=device), unit)


def _shift(m: Tensor, top: Tensor) -> Tensor:
    """exp(m - top), and 0 where m is -inf, top being -inf or not."""
    return torch.where(m == -torch.inf, 0.0, torch.exp(m - torch.where(top == -torch.inf, 0.0, top)))


def merge_partials(left: Partial, right: Partial) -> Partial:
    """Both segments' attention, unnormalised (ChunkAttention, equation 2). Merging EMPTY changes no bit."""
    top = torch.maximum(left.m, right.m)
    x, y = _shift(left.m, top), _shift(right.m, top)
    return Partial(left.acc * x[..., None] + right.acc * y[..., None], top, left.l * x + right.l * y)


def choose(which: Tensor, left: Partial, right: Partial) -> Partial:
    """Left in the rows of `which`, bool [T], right in the others."""
    pairs = ((left.acc, right.acc), (left.m, right.m), (left.l, right.l))
    return Partial(*(torch.where(which.reshape(-1, *[1] * (a.dim() - 1)), a, b) for a, b in pairs))


def part_of(partial: Partial, begin: int, end: int) -> Partial:
    """Rows begin .. end-1, in the same memory."""
    return Partial(partial.acc[begin:end], partial.m[begin:end], partial.l[begin:end])


def taken(partial: Partial, rows: Tensor) -> Partial:
    """Rows int64 [n], copied."""
    return Partial(partial.acc[rows], partial.m[rows], partial.l[rows])


def put(partial: Partial, rows: Tensor, states: Partial) -> None:
    """Writes states [n, ..] into rows int64 [n], in place."""
    partial.acc[rows], partial.m[rows], partial.l[rows] = states.acc, states.m, states.l


def flattened(partial: Partial) -> Tensor:
    """All its numbers, fp32 [T * Hq * (D + 2)], as they are sent."""
    return torch.cat([x.reshape(-1) for x in (partial.acc, partial.m, partial.l)])


def unflattened(flat: Tensor, rows: int, heads: int, dim: int) -> Partial:
    """What was flattened, in the memory of `flat`."""
    acc, m, l = torch.split(flat, [rows * heads * dim, rows * heads, rows * heads])  # noqa: E741
    return Partial(acc.view(rows, heads, dim), m.view(rows, heads), l.view(rows, heads))


def merge_blocks(
    left: RunningState, right: RunningState, merged: Callable[[Partial, Partial], Partial] = merge_partials
) -> RunningState:
    """The merge of left, continued by a block that was merged elsewhere from nothing: the same bits as in one go.

    Right holds at most one block per row, which begins behind left's: cut at multiples of 2,048 keys. Otherwise this
    would not be the canonical order: ValueError. `merged` is how a backend merges.
    """
    right.expect(left.shape, left.unit)
    joins = right.block_of >= 0
    if bool((right.total.l > 0).any()) or bool((joins & (right.block_of <= left.block_of)).any()):
        raise ValueError(
            "only a single block that begins behind the left one's can be merged: cut at multiples of 2,048"
        )
    total = choose(joins, merged(left.total, left.block), left.total)
    block = choose(joins, right.block, left.block)
    return RunningState(total, block, torch.where(joins, right.block_of, left.block_of), left.unit)


def normalise(partial: Partial) -> AttnState:
    """out = acc / l and lse = m + log l; rows that saw nothing become EMPTY."""
    seen = partial.l > 0
    out = torch.where(seen[..., None], partial.acc / torch.where(seen, partial.l, 1.0)[..., None], 0.0)
    return AttnState(out, torch.where(seen, partial.m + torch.log(torch.where(seen, partial.l, 1.0)), -torch.inf))


def merge_states(left: AttnState, right: AttnState) -> AttnState:
    """Attention over the union of two disjoint segments (context parallelism, equation 4). Two EMPTY give EMPTY."""
    top = torch.maximum(left.lse, right.lse)
    x, y = _shift(left.lse, top), _shift(right.lse, top)
    total = x + y
    seen = total > 0
    safe = torch.where(seen, total, 1.0)
    out = (left.out * x[..., None] + right.out * y[..., None]) / safe[..., None]
    return AttnState(out, torch.where(seen, top + torch.log(safe), -torch.inf))
