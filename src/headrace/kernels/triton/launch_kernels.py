"""A kernel that tells how its arguments arrived (launch_agreement)."""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def echo(blocks, words, factor, one, even, odd, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COPIED: tl.constexpr):
    """out fp32 [programs, ROWS, COLUMNS] of blocks [programs * ROWS, COLUMNS], 16 bits, and words int32 [COLUMNS].
    COPIED: blocks is a tensor descriptor."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    first = tl.program_id(0) * ROWS
    if COPIED:
        numbers = blocks.load([first, 0])
    else:
        numbers = tl.load(blocks + (first + row) * COLUMNS + column)
    more = tl.load(words + column) * one + even * 3 + odd * 5
    tl.store(out + (first + row) * COLUMNS + column, numbers.to(tl.float32) * factor + more)
