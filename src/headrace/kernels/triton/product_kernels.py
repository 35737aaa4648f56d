"""Products with weights on a GPU, in Triton, whose order is a function of K alone.

T: rows, K: inputs, N: outputs. An element is one chain over all inputs in the tensor core's fp32 accumulator (fp32
weights: multiply-adds one by one), whatever the tile, and so has the same bits in tiles of every shape whose
instructions add up alike; which do is checked where a weight is loaded (products.py).
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.row_kernels import activated, gated


@triton.jit
def _tile(number, rows, outputs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr):
    """First row and column of a tile: those that follow one another share rows of x and columns of w, which stay in the
    cache."""
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(outputs, COLUMNS)
    group, within = number // (TOGETHER * across), number % (TOGETHER * across)
    high = tl.minimum(down - group * TOGETHER, TOGETHER)
    return (group * TOGETHER + within % high) * ROWS, within // high * COLUMNS


@triton.jit
def _weights(w, column, k, at, inputs, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(w + column[None, :] * inputs + (at + k)[:, None])
    return tl.load(w + column[None, :] * inputs + (at + k)[:, None], mask=(at + k < inputs)[:, None], other=0.0)


@triton.jit
def _prefetch(w, column, inputs, LINES: tl.constexpr):
    """The first LINES lines of 128 bytes of these columns to the second-level cache."""
    elements: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth
    k = tl.minimum(tl.arange(0, LINES) * elements, inputs - 1)
    at = (w + column[:, None] * inputs + k[None, :]).to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _wait_for_rows(w, column, inputs, outputs, GATED: tl.constexpr, AHEAD: tl.constexpr):
    """Fetches the first AHEAD lines of these columns of weights while the kernel before ends; 0: it has ended."""
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
        _prefetch(w, column, inputs, AHEAD)
        if GATED:
            _prefetch(w, column + outputs, inputs, AHEAD)
        tl.extra.cuda.gdc_wait()


@triton.jit
def _rounded(numbers, like):
    """fp32 numbers, rounded to the type of what `like` points to."""
    return numbers.to(like.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def product(
    x, w, bias, out, rows, inputs, outputs, x_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, TOGETHER: tl.constexpr, EVEN: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x [T, K], rows x_stride apart, times w [N, K] transposed, plus bias [N] (BIAS): out [T, N]. EVEN: STEP divides K.
    KIND: an activation of the rounded sums (row_kernels), or ""; GATED: w [2 N, K] and bias [2 N] are its (gate, up).
    AHEAD: lines of weights to fetch while the kernel before still runs; 0: it has ended."""
    row, column = _tile(tl.program_id(0), rows, outputs, ROWS, COLUMNS, TOGETHER)
    row, column, k = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS), tl.arange(0, STEP)
    # What lies outside is computed from the last row or column, and not stored.
    from_row = tl.minimum(row, rows - 1).to(tl.int64)
    from_column = tl.minimum(column, outputs - 1).to(tl.int64)
    _wait_for_rows(w, from_column, inputs, outputs, GATED, AHEAD)
    first = tl.zeros((ROWS, COLUMNS), tl.float32)
    second = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, inputs, STEP):
        if EVEN:
            part = tl.load(x + from_row[:, None] * x_stride + (at + k)[None, :])
        else:
            part = tl.load(
                x + from_row[:, None] * x_stride + (at + k)[None, :], mask=(at + k < inputs)[None, :], other=0.0
            )
        first = tl.dot(part, _weights(w, from_column, k, at, inputs, EVEN), first, input_precision=PRECISION)
        if GATED:
            up = _weights(w, from_column + outputs, k, at, inputs, EVEN)
            second = tl.dot(part, up, second, input_precision=PRECISION)
    if BIAS:
        first += tl.load(bias + from_column).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            second += tl.load(bias + from_column + outputs).to(tl.float32)[None, :]
        first = gated(_rounded(first, x), _rounded(second, x), KIND)
    elif KIND != "":
        first = activated(_rounded(first, x), KIND)
    taken = (row < rows)[:, None] & (column < outputs)[None, :]
    tl.store(out + from_row[:, None] * outputs + column[None, :], first.to(out.dtype.element_ty), mask=taken)


@triton.jit(do_not_specialize=["rows"])
def product_of_few(
    x, w, weights, bias, out, rows, inputs, outputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The same for up to ROWS rows, as w times x transposed: x and w are tensor descriptors of blocks [ROWS, STEP] and
    [COLUMNS, STEP], which the GPU copies by itself; weights: what w describes."""
    column = tl.program_id(0) * COLUMNS
    columns, row = column + tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    inside = tl.minimum(columns, outputs - 1).to(tl.int64)
    _wait_for_rows(weights, inside, inputs, outputs, GATED, AHEAD)
    first = tl.zeros((COLUMNS, ROWS), tl.float32)
    second = tl.zeros((COLUMNS, ROWS), tl.float32)
    for at in range(0, inputs, STEP):
        part = x.load([0, at]).T
        first = tl.dot(w.load([column, at]), part, first)
        if GATED:
            second = tl.dot(w.load([column + outputs, at]), part, second)
    if BIAS:
        first += tl.load(bias + inside).to(tl.float32)[:, None]
    if GATED:
        if BIAS:
            second += tl.load(bias + inside + outputs).to(tl.float32)[:, None]
        first = gated(_rounded(first, weights), _rounded(second, weights), KIND)
    elif KIND != "":
        first = activated(_rounded(first, weights), KIND)
    at = out + row.to(tl.int64)[None, :] * outputs + columns[:, None]
    tl.store(at, first.to(out.dtype.element_ty), mask=(row < rows)[None, :] & (columns < outputs)[:, None])


@triton.jit(do_not_specialize=["rows"])
def product_by_blocks(
    x, w, bias, out, rows, inputs, outputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, TOGETHER: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The same for many rows: x, w and out are tensor descriptors, of blocks [ROWS, STEP], [COLUMNS, STEP] and [ROWS,
    COLUMNS / 2]. A program goes from tile to tile: loads of the next one begin before the last is stored."""
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(outputs, COLUMNS)
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, column = _tile(number, rows, outputs, ROWS, COLUMNS, TOGETHER)
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, inputs, STEP):
            acc = tl.dot(x.load([row, at]), w.load([column, at]).T, acc)
        if BIAS:
            each = column + tl.arange(0, COLUMNS)
            acc += tl.load(bias + each, mask=each < outputs, other=0.0).to(tl.float32)[None, :]
        # By halves: less shared memory for the way out, more for the loads.
        left, right = tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        out.store([row, column], left.to(out.dtype))
        out.store([row, column + COLUMNS // 2], right.to(out.dtype))
