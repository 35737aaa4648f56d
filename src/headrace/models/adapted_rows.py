"""Which rows of a step have which adapter, and what adapters add to a layer's products (LoRA, arXiv 2106.09685).

To W x an adapter adds up (down x): `down` [R, K] brings a row to a few numbers, `up` [N, R] makes outputs of these.
The rows of all adapters are multiplied together, each adapter's by its own matrices, as those of experts are: one order
of sums for every number of rows, so that no row's bits depend on other rows, nor on their adapters.

T: rows (tokens) of a step. K, N: inputs and outputs of a matrix; R: rank, of all its parts together, padded by zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from headrace.kernels import experts, ops


@dataclass(frozen=True, slots=True)
class Pair:
    """What an adapter has for one of our matrices: down [R, K], and up [N, R], which has the adapter's scale in it."""

    down: ops.Weight
    up: ops.Weight

    @property
    def nbytes(self) -> int:
        return int(self.down.nbytes + self.up.nbytes)


Pairs = Mapping[str, Sequence[Pair | None]]
"""Matrix, as in layers.0.qkv -> what each adapter has for it, all of one R; None: nothing."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that have adapters of some kind. order [n]: their numbers, by adapter; None: all, in their order. met: the
    adapters that have rows, and begin: where in `order` each one's begin, and the end of the last."""

    order: Tensor | None
    met: list[int]
    begin: list[int]


class AdaptedRows:
    """The rows of a step, or some of them. numbers: of each row's adapter, int64 [T]; -1: none."""

    def __init__(self, pairs: Pairs, numbers: Tensor) -> None:
        self._pairs, self._numbers = pairs, numbers
        self._groups: dict[tuple[bool, ...], _Group] = {}

    def of(self, rows: Tensor) -> AdaptedRows:
        """Of these rows alone, int64 [n]."""
        return AdaptedRows(self._pairs, self._numbers[rows])

    def changes(self, layer: int, name: str) -> bool:
        """Whether some adapter of the engine changes the layer's matrix `name`."""
        return f"layers.{layer}.{name}" in self._pairs

    def added(self, layer: int, name: str, x: Tensor, made: Tensor) -> Tensor:
        """made [T, N], what the layer's matrix `name` makes of x [T, K], with what the rows' adapters add to it: in
        the same memory."""
        pairs = self._pairs.get(f"layers.{layer}.{name}")
        if pairs is None:
            return made
        group = self._group(tuple(pair is not None for pair in pairs))
        if not group.met:
            return made
        met = [pair for number in group.met if (pair := pairs[number]) is not None]
        rows = x if group.order is None else x[group.order]
        inner = experts.linear(rows, [pair.down for pair in met], group.begin)
        change = experts.linear(inner, [pair.up for pair in met], group.begin)
        if group.order is None:
            return made.add_(change)
        made[group.order] += change
        return made

    def _group(self, has: tuple[bool, ...]) -> _Group:
        """The rows whose adapters have something, by their numbers."""
        if has not in self._groups:
            self._groups[has] = _grouped(self._numbers, has)
        return self._groups[has]


def row_numbers(runs: Sequence[tuple[int, int, int, int]]) -> Tensor | None:
    """Of rows that come in runs (begin, end, number, start): positions begin .. end - 1 of a sequence that has the
    adapter of that number from the position `start` on. int64 [T], -1 for none; None where no row has one."""
    if all(number < 0 for _, _, number, _ in runs):
        return None
    parts = [torch.where(torch.arange(begin, end) < start, -1, number) for begin, end, number, start in runs]
    return torch.cat(parts)


def _grouped(numbers: Tensor, has: tuple[bool, ...]) -> _Group:
    rows = torch.tensor([*has, False])[numbers].nonzero().flatten()  # -1, no adapter, is the last one
    order = rows[numbers[rows].argsort(stable=True)]
    counts = torch.bincount(numbers[order], minlength=len(has)).tolist()
    met = [number for number, count in enumerate(counts) if count]
    begin = list(accumulate((counts[number] for number in met), initial=0))
    whole = len(met) == 1 and len(order) == len(numbers)
    return _Group(None if whole else order, met, begin)
