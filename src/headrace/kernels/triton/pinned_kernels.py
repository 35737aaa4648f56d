"""Kernels that read host memory where it lies."""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather(addresses, into, tasks, words, BLOCK: tl.constexpr):
    """Pieces of `words` int64 at these addresses, one behind the other into `into`; a task is BLOCK words of one."""
    per = tl.cdiv(words, BLOCK)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        piece, block = task // per, task % per
        source = tl.load(addresses + piece).to(tl.pointer_type(tl.int64))
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < words
        tl.store(into + piece.to(tl.int64) * words + at, tl.load(source + at, mask=inside), mask=inside)
