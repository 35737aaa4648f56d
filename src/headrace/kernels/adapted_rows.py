"""Which rows of a step have which adapter, and what adapters add to a layer's products (LoRA, arXiv 2106.09685).

To W x an adapter adds up (down x): `down` [R, K] brings a row to a few numbers, `up` [N, R] makes outputs of these.
The rows of all adapters are multiplied together, each adapter's by its own matrices, as those of experts are: one order
of sums for every number of rows, so that no row's bits depend on other rows, nor on their adapters.

T: rows (tokens) of a step. K, N: inputs and outputs of a matrix; R: rank, of all its parts together, padded by zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from headrace.kernels import dispatch, experts, ops

if TYPE_CHECKING:  # it imports Triton
    from headrace.kernels.triton.adapted import GpuPairs, GpuRows


@dataclass(frozen=True, slots=True)
class Pair:
    """What an adapter has for one of our matrices: down [R, K], and up [N, R], which has the adapter's scale in it."""

    down: ops.Weight
    up: ops.Weight

    @property
    def nbytes(self) -> int:
        return int(self.down.nbytes + self.up.nbytes)


Pairs = Sequence[Pair | None]
"""What each adapter has for a matrix, all of one R; None: nothing."""
PlacedPairs: TypeAlias = "Pairs | GpuPairs"
"""The same as products take it where it lies."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that have adapters of some kind. order [n]: their numbers, by adapter; None: all, in their order. met: the
    adapters that have rows, and begin: where in `order` each one's begin, and the end of the last."""

    order: Tensor | None
    met: list[int]
    begin: list[int]


class AdaptedRows:
    """The rows of a step, or some of them. numbers: of each row's adapter, whole numbers [T], anywhere; -1: none."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers
        self._groups: dict[tuple[bool, ...], _Group] = {}
        self._there: GpuRows | None = None

    def of(self, rows: Tensor) -> AdaptedRows:
        """Of these rows alone, int64 [n]."""
        return AdaptedRows(self.numbers[rows])

    def added(self, pairs: PlacedPairs, x: Tensor, made: Tensor, first: int = 0) -> Tensor:
        """made [T, n], what n of a matrix's outputs from `first` on make of x [T, K], with what the rows' adapters add
        to them by these pairs: in the same memory."""
        if dispatch.on_gpu(x):
            from headrace.kernels.triton import adapted

            assert isinstance(pairs, adapted.GpuPairs), "`placed` makes them"
            if self._there is None:
                self._there = adapted.arranged(self.numbers.to(x.device), len(pairs))
            return pairs.added(self._there, x, made, first)
        assert isinstance(pairs, Sequence)
        group = self._group(tuple(pair is not None for pair in pairs))
        if not group.met:
            return made
        met = [pair for number in group.met if (pair := pairs[number]) is not None]
        rows = x if group.order is None else x[group.order]
        inner = experts.linear(rows, [pair.down for pair in met], group.begin)
        change = experts.linear(inner, [pair.up for pair in met], group.begin)[:, first : first + made.shape[1]]
        if group.order is None:
            return made.add_(change)
        made[group.order] += change
        return made

    def _group(self, has: tuple[bool, ...]) -> _Group:
        """The rows whose adapters have something, by their numbers."""
        if has not in self._groups:
            self._groups[has] = _grouped(self.numbers, has)
        return self._groups[has]


def placed(pairs: Pairs) -> PlacedPairs:
    """The pairs as `AdaptedRows.added` takes them where they lie."""
    down = next((pair.down for pair in pairs if pair is not None), None)
    if not isinstance(down, Tensor) or not dispatch.on_gpu(down):
        return pairs
    from headrace.kernels.triton import adapted

    return adapted.GpuPairs([None if pair is None else (pair.down, pair.up) for pair in pairs])


def rows_at(positions: Tensor, numbers: Tensor | int, starts: Tensor | int) -> AdaptedRows | None:
    """Rows at these positions, int64 [T], of sequences that have adapters of these numbers, -1 for none, from these
    positions on: of each row's sequence, [T], or of all. None where no row has one."""
    each = torch.where(positions < starts, -1, numbers)
    return AdaptedRows(each) if bool((each >= 0).any()) else None


def row_numbers(runs: Sequence[tuple[int, int, int, int]]) -> Tensor | None:
    """Of rows that come in runs (begin, end, number, start): positions begin .. end - 1 of a sequence that has the
    adapter of that number from the position `start` on. int64 [T], -1 for none; None where no row has one."""
    if all(number < 0 for _, _, number, _ in runs):
        return None
    each: list[int] = []
    for begin, end, number, start in runs:
        own = min(max(start, begin), end)
        each += [-1] * (own - begin) + [number] * (end - own)
    return torch.tensor(each, dtype=torch.int64)


def _grouped(numbers: Tensor, has: tuple[bool, ...]) -> _Group:
    rows = torch.tensor([*has, False])[numbers].nonzero().flatten()  # -1, no adapter, is the last one
    order = rows[numbers[rows].argsort(stable=True)]
    counts = torch.bincount(numbers[order], minlength=len(has)).tolist()
    met = [number for number, count in enumerate(counts) if count]
    begin = list(accumulate((counts[number] for number in met), initial=0))
    whole = len(met) == 1 and len(order) == len(numbers)
    return _Group(None if whole else order, met, begin)
