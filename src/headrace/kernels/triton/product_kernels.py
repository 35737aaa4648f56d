"""Products on a GPU, in Triton, that give a row the same bits whatever other rows ride along.

T: rows, K: inputs, N: outputs. cuBLAS chooses the order in which it adds up by the number of rows.
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(
    x, w, bias, out, rows, inputs, outputs, x_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, SEGMENT: tl.constexpr, SPLIT: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x [T, K], rows x_stride apart, times w [N, K] transposed: out [T, N]; SPLIT: out [segments, T, N] fp32, each
    segment of SEGMENT inputs for itself. Inputs are added up within their segment, then segments from left to right."""
    # Programs that go through the same weights are neighbours.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, STEP)
    from_x = x + row.to(tl.int64)[:, None] * x_stride
    from_w = w + column.to(tl.int64)[None, :] * inputs
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    first = tl.program_id(2) * SEGMENT if SPLIT else 0
    last = tl.minimum(first + SEGMENT, inputs) if SPLIT else inputs
    for segment in range(first, last, SEGMENT):
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(segment, tl.minimum(segment + SEGMENT, inputs), STEP):
            there = at + k < inputs
            part = tl.load(from_x + (at + k)[None, :], mask=(row < rows)[:, None] & there[None, :], other=0.0)
            weight = tl.load(from_w + (at + k)[:, None], mask=(column < outputs)[None, :] & there[:, None], other=0.0)
            acc = tl.dot(part, weight, acc, input_precision=PRECISION)
        total += acc
    taken = (row < rows)[:, None] & (column < outputs)[None, :]
    at = row.to(tl.int64)[:, None] * outputs + column[None, :]
    if SPLIT:
        at += tl.program_id(2).to(tl.int64) * rows * outputs
    elif BIAS:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=taken)


@triton.jit
def add_segments(parts, bias, out, elements, outputs, segments, WIDTH: tl.constexpr, BIAS: tl.constexpr):
    """parts [segments, T, N] added up from left to right, plus bias [N]: out [T, N]. elements: T N."""
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for segment in range(segments):
        total += tl.load(parts + segment * elements + at, mask=at < elements, other=0.0)
    if BIAS:
        total += tl.load(bias + at % outputs, mask=at < elements, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < elements)
