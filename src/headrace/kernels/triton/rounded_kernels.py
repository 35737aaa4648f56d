"""Rows rounded to int8 and their products with codes of int8, in Triton: the numbers of kernels.rounded_rows.

T: rows, K: inputs, K': K up to whole steps of a tile, N: outputs. Sums are whole numbers, so tiles have no part in a
row's bits.
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.weight_kernels import _tile_of_expert


@triton.jit(do_not_specialize=["inputs"])
def round_rows(
    x, codes, scales, inputs, k_stride, x_stride, LARGEST: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr
):
    """Each row of x [T, K], rows x_stride apart, as codes int8 [T, K'] under a scale: fp32 [T]. k_stride: K', of
    which zeros fill what is behind K."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, inputs, BLOCK):
        part = tl.load(x + row * x_stride + at + k, mask=at + k < inputs, other=0.0).to(tl.float32)
        most = tl.maximum(most, part.to(tl.int32, bitcast=True) & 0x7FFFFFFF)  # as bits NaN is above infinity
    bits = tl.max(most, 0)
    finite, top = bits < 0x7F800000, bits.to(tl.float32, bitcast=True)
    zero = (bits >= 0x7F800000) | (top < LEAST)
    top = tl.where(zero, 1.0, top)
    scale = tl.where(zero, 0.0, tl.div_rn(top, LARGEST))
    tl.store(scales + row, tl.where(finite, scale, float("nan")))
    inverse = tl.div_rn(LARGEST, top)
    for at in range(0, k_stride, BLOCK):
        part = tl.load(x + row * x_stride + at + k, mask=at + k < inputs, other=0.0).to(tl.float32)
        # Held to its range, a product is rounded before anything is added: the two are no multiply-add.
        steps = tl.clamp(tl.where(zero, 0.0, part * inverse), -LARGEST, LARGEST)
        # Beyond 2^23 there are whole numbers alone: to the nearest one, of two as near to the even one.
        whole = (steps + 12582912.0) - 12582912.0
        tl.store(codes + row * k_stride + at + k, whole.to(tl.int8), mask=at + k < k_stride)


@triton.jit(do_not_specialize=["rows"])
def product(
    x, x_scales, weight, scales, bias, out, table, begin, order, rows, k_stride, outputs, out_stride, experts, chosen,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, BIAS: tl.constexpr, EXPERTS: tl.constexpr,
    SENT: tl.constexpr,
):  # fmt: skip
    """Codes x int8 [T, K'] under x_scales fp32 [T] times codes weight [N, K'] under scales fp32 [N], plus bias [N]: out
    [T, N], rows out_stride apart. k_stride: K', a multiple of STEP. EXPERTS, table, begin, order, chosen, SENT: see
    weight_kernels.product."""
    number, last = tl.program_id(0), rows
    first = number * ROWS
    if EXPERTS:
        expert, first, last = _tile_of_expert(begin, number, experts, EXPERTS, ROWS)
        if expert >= experts:
            return
        table += expert * 4
        weight = tl.multiple_of(tl.load(table).to(weight.dtype), 16)
        scales = tl.multiple_of(tl.load(table + 1).to(scales.dtype), 16)
        bias = tl.multiple_of(tl.load(table + 3).to(bias.dtype), 16)
    row, k = first + tl.arange(0, ROWS), tl.arange(0, STEP)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    # What lies outside is computed from the last row or column, and not stored.
    read, inside = tl.minimum(column, outputs - 1), tl.minimum(row, last - 1)
    source = tl.load(order + inside) // chosen if SENT else inside
    from_w = weight + read.to(tl.int64)[:, None] * k_stride + k[None, :]
    from_x = x + source.to(tl.int64)[None, :] * k_stride + k[:, None]
    acc = tl.zeros((COLUMNS, ROWS), tl.int32)
    for at in range(0, k_stride, STEP):
        acc = tl.dot(tl.load(from_w + at), tl.load(from_x + at), acc, out_dtype=tl.int32)
    total = acc.to(tl.float32) * tl.load(x_scales + source)[None, :]
    scale = tl.load(scales + read)[:, None].broadcast_to(total.shape)
    if BIAS:
        total = tl.fma(total, scale, tl.load(bias + read).to(tl.float32)[:, None].broadcast_to(total.shape))
    else:
        total = total * scale
    to = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(to, tl.trans(total).to(out.dtype.element_ty), mask=(row < last)[:, None] & (column < outputs)[None, :])
