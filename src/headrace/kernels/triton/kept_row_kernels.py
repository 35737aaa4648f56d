"""Storing rows of the residual stream in chunks on a GPU, in Triton. T: rows, H: hidden size."""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keep(x, pool, slots, offsets, row_stride, width, COLUMNS: tl.constexpr):
    """Rows x [T, H], row_stride elements apart, to pool [slots, 64, H] as row offsets[t] of chunk slots[t], unless that
    is negative."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot, at = tl.load(slots + row).to(tl.int64), tl.load(offsets + row)
    there = tl.where(slot >= 0, column, width) < width
    kept = tl.load(x + row * row_stride + column, mask=there)
    tl.store(pool + (slot * 64 + at) * width + column, kept, mask=there)
