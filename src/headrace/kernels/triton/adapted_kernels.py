"""What adapters add to products on a GPU, in Triton. T: rows, N: outputs, A: adapters."""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_changes(made, change, numbers, place, has, adapters, made_stride, change_stride, width, COLUMNS: tl.constexpr):
    """Adds row place[t] of change, change_stride elements apart, to row t of made [T, N], made_stride apart, where
    number numbers[t] is below A and has[it] is not 0: int32 [T], [T] and [A]."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.load(numbers + row)
    changed = tl.load(has + number, mask=number < adapters, other=0) != 0
    there = tl.where(changed, column, width) < width
    from_change = change + tl.load(place + row).to(tl.int64) * change_stride + column
    added = tl.load(from_change, mask=there, other=0.0).to(tl.float32)
    total = tl.load(made + row * made_stride + column, mask=there, other=0.0).to(tl.float32) + added
    tl.store(made + row * made_stride + column, total.to(made.dtype.element_ty), mask=there)
