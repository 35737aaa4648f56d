"""Penalties and biases on a GPU, in Triton: rows of logits changed before a token is chosen from them, and the counts
of tokens that penalties depend on.

N: rows that are changed, V: vocabulary. Arithmetic is that of engine.sampler, in fp64, one rounding for each operation:
`change` is compiled without contraction of products and sums.
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl

REQUEST = tl.constexpr(9)
ROW, INTO, COUNTS, BIASED, BIASES, NUMBER, REPETITION, FREQUENCY, PRESENCE = (tl.constexpr(i) for i in range(9))
"""Columns of `request` int64 [N, 9]: the row of logits, which is that of the choice; the address of the changed ones,
fp64 [V]; of `counts` int32 [V], how often each token stands in the answer, -1 where it is in neither prompt nor answer,
0 for no penalties; of tokens int32 [n], and of what is added to their logits, fp64 [n]; n; the penalties, as the bits
of fp64."""
LANES = tl.constexpr(128)
"""Biases that a program looks at together."""


@triton.jit
def change(logits, stride, request, width, BLOCK: tl.constexpr):
    """Writes the changed logits of a block of a row."""
    asked, block = request + tl.program_id(1).to(tl.int64) * REQUEST, tl.program_id(0)
    into = tl.load(asked + INTO).to(tl.pointer_type(tl.float64))
    at = block * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    x = tl.load(logits + tl.load(asked + ROW) * stride + at, mask=there, other=0.0).to(tl.float64)
    counts = tl.load(asked + COUNTS)
    if counts != 0:
        count = tl.load(counts.to(tl.pointer_type(tl.int32)) + at, mask=there, other=-1)
        repetition = tl.load(asked + REPETITION).to(tl.float64, bitcast=True)
        frequency = tl.load(asked + FREQUENCY).to(tl.float64, bitcast=True)
        presence = tl.load(asked + PRESENCE).to(tl.float64, bitcast=True)
        less = tl.where(x > 0, x / repetition, x * repetition) - frequency * count.to(tl.float64)
        x = tl.where(count >= 0, less - tl.where(count > 0, presence, 0.0), x)
    tl.store(into + at, x, mask=there)
    tl.debug_barrier()
    tokens, more = tl.load(asked + BIASED).to(tl.pointer_type(tl.int32)), tl.load(asked + BIASES)
    for first in range(0, tl.load(asked + NUMBER), LANES):
        place = first + tl.arange(0, LANES)
        known = place < tl.load(asked + NUMBER)
        token = tl.load(tokens + place, mask=known, other=0)
        mine = known & (token // BLOCK == block)
        bias = tl.load(more.to(tl.pointer_type(tl.float64)) + place, mask=mine, other=0.0)
        tl.store(into + token, tl.load(into + token, mask=mine, other=0.0) + bias, mask=mine)


@triton.jit
def count(request, tokens):
    """Counts the token of a row among those of its answer."""
    asked = request + tl.program_id(0).to(tl.int64) * REQUEST
    counts = tl.load(asked + COUNTS)
    if counts != 0:
        of = counts.to(tl.pointer_type(tl.int32)) + tl.load(tokens + tl.load(asked + ROW))
        tl.store(of, tl.maximum(tl.load(of), 0) + 1)
