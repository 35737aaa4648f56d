"""The tokens of a step on a GPU, some of which the host does not know: the step before has chosen them there."""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def look_up(tokens, chosen, known, rows, BLOCK: tl.constexpr):
    """known [rows]: tokens [rows], or chosen[n] where a token is -1 - n."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    token = tl.load(tokens + row, mask=there, other=0)
    earlier = tl.load(chosen + (-1 - token), mask=there & (token < 0), other=0)
    tl.store(known + row, tl.where(token < 0, earlier, token), mask=there)
