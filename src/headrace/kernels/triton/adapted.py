"""What adapters add to a layer's products on a GPU (kernels.adapted_rows): rows by adapter, as those of experts are.

Which row has which adapter stays on the GPU, and launches depend on the number of rows alone: a recording serves every
step of so many rows. T: rows, A: adapters. K, N: inputs and outputs of a matrix, R: rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.triton import adapted_kernels
from headrace.kernels.triton.experts import GpuExperts, Grouped, grouped
from headrace.kernels.triton.launching import direct

COLUMNS = 1024
"""Outputs of a row that one program changes."""


@dataclass(frozen=True, slots=True)
class GpuRows:
    """numbers: of each row's adapter, int32 [T]; A: none. by: the rows by these numbers, those of none behind all."""

    numbers: Tensor
    by: Grouped


def arranged(numbers: Tensor, adapters: int) -> GpuRows:
    """Rows that have adapters of these numbers, of so many; -1: none."""
    own = numbers.masked_fill(numbers < 0, adapters).int()
    return GpuRows(own, grouped(own[:, None], adapters))


class GpuPairs:
    """What adapters have for one matrix, (down, up) of each as in kernels.adapted_rows.Pair, or None. All of it is
    multiplied by two launches.

    Raises ValueError where no adapter has anything, and for matrices that differ in their form.
    """

    def __init__(self, pairs: Sequence[tuple[object, object] | None]) -> None:
        there = [pair for pair in pairs if pair is not None]
        if not there:
            raise ValueError("no adapter has anything for this matrix")
        # What nobody has is not added: the address of another's stands in its place.
        downs, ups = zip(*(there[0] if pair is None else pair for pair in pairs), strict=True)
        self.downs, self.ups = GpuExperts(downs, None), GpuExperts(ups, None)
        has = torch.tensor([pair is not None for pair in pairs], dtype=torch.int32)
        self.has = has.to(self.downs.table.device)

    def __len__(self) -> int:
        return len(self.has)

    def added(self, rows: GpuRows, x: Tensor, made: Tensor, first: int = 0) -> Tensor:
        """See kernels.adapted_rows.AdaptedRows.added."""
        if not len(x):
            return made
        inner = self.downs(x, rows.by, sent=True)
        change = self.ups(inner, rows.by, sent=False)[:, first : first + made.shape[1]]
        columns = min(COLUMNS, 1 << (made.shape[1] - 1).bit_length())
        direct(adapted_kernels.add_changes)[(len(made), -(-made.shape[1] // columns))](
            made, change, rows.numbers, rows.by.place, self.has, len(self), made.stride(0), change.stride(0),
            made.shape[1], COLUMNS=columns, num_warps=4,
        )  # fmt: skip
        return made
