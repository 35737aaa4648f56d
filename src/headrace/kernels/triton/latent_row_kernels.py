"""What lies between projections and attention where attention is latent, on a GPU, in Triton.

T: rows, Hq: query heads, D = TURNED + rank: size of the one KV head, whose first numbers are the rotated ones.
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotated(numbers, turn, d, there, TURNED: tl.constexpr):
    """Elements d of the first TURNED at `numbers`, rotated by halves: fp32. turn: (cos, sin) of the row."""
    HALF: tl.constexpr = TURNED // 2
    low = d < HALF
    x = tl.load(numbers + d, mask=there, other=0.0).to(tl.float32)
    y = tl.load(numbers + tl.where(low, d + HALF, d - HALF), mask=there, other=0.0).to(tl.float32)
    at = turn + tl.where(low, d, d - HALF)
    cos, sin = tl.load(at, mask=there, other=1.0), tl.load(at + HALF, mask=there, other=0.0)
    # No compiler decides which product is rounded.
    return tl.fma(x, cos, y * tl.where(low, -sin, sin))


@triton.jit(do_not_specialize=["stride", "turn_stride"])
def turn_queries(
    heads, cos_sin, out, stride, turn_stride,
    HEADS: tl.constexpr, QUERY: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr, P: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """The first TURNED numbers of TOGETHER of a row's heads [T, HEADS, QUERY], rows `stride` apart, rotated: the first
    of out [T, HEADS, D]."""
    row = tl.program_id(0).to(tl.int64)
    head, d = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)[:, None], tl.arange(0, P)[None, :]
    there = (head < HEADS) & (d < TURNED)
    turned = _rotated(heads + row * stride + head * QUERY, cos_sin + row * turn_stride, d, there, TURNED)
    tl.store(out + (row * HEADS + head) * D + d, turned.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["stride", "turn_stride"])
def make_keys(
    projected, norm, cos_sin, out, stride, turn_stride, eps,
    RANK: tl.constexpr, TURNED: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A row of [T, TURNED + RANK], rows `stride` apart: the first TURNED numbers rotated, the others, a latent, normed
    (rms) with weights [RANK]: out [T, TURNED + RANK]. P, R: RANK and TURNED rounded up to powers of two."""
    row = tl.program_id(0).to(tl.int64)
    d, r = tl.arange(0, P), tl.arange(0, R)
    numbers, into = projected + row * stride, out + row * (TURNED + RANK)
    x = tl.load(numbers + TURNED + d, mask=d < RANK, other=0.0).to(tl.float32)
    by_root = tl.rsqrt(tl.sum(x * x, 0) / RANK + eps)
    weights = tl.load(norm + d, mask=d < RANK, other=0.0).to(tl.float32)
    tl.store(into + TURNED + d, (x * by_root * weights).to(out.dtype.element_ty), mask=d < RANK)
    turned = _rotated(numbers, cos_sin + row * turn_stride, r, r < TURNED, TURNED)
    tl.store(into + r, turned.to(out.dtype.element_ty), mask=r < TURNED)


@triton.jit(do_not_specialize=["rows"])
def multiply_heads(
    x, weight, out, rows, x_row, x_head, w_head, w_out, w_in, out_row, out_head,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Head program_id(2) of x [T, Hq, INPUTS] times a matrix of its own: [T, Hq, OUTPUTS]. Element (n, k) of the matrix
    of head h lies at h w_head + n w_out + k w_in of weight. An output is one chain of sums over its inputs."""
    head = tl.program_id(2).to(tl.int64)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    taken, fits, j = row < rows, column < OUTPUTS, tl.arange(0, STEP)
    from_x = x + row.to(tl.int64)[:, None] * x_row + head * x_head + j[None, :]
    from_w = weight + head * w_head + j[:, None] * w_in + column[None, :] * w_out
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, INPUTS, STEP):
        there = at + j < INPUTS
        part = tl.load(from_x + at, mask=taken[:, None] & there[None, :], other=0.0)
        w = tl.load(from_w + at * w_in, mask=there[:, None] & fits[None, :], other=0.0)
        acc = tl.dot(part, w, acc, input_precision=PRECISION)
    into = out + row.to(tl.int64)[:, None] * out_row + head * out_head + column[None, :]
    tl.store(into, acc.to(out.dtype.element_ty), mask=taken[:, None] & fits[None, :])
