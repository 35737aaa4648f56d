"""Rows rounded to int8 or FP8 and their products with such codes, in Triton: the numbers of kernels.rounded_rows.

T: rows, K: inputs, K': K up to whole steps of a tile, N: outputs. Sums of int8 are whole numbers: tiles have no part in
a row's bits. Sums of FP8 are one chain over K in the tensor core's accumulators. Hopper's keep fewer digits than fp32
for FP8, so what they have added up over a step goes to sums in fp32: steps are alike in all tiles. (For other GPUs
Triton joins the two: one chain.)
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.weight_kernels import _tile_of_expert


@triton.jit
def _whole(steps):
    """int8 of fp32 numbers: the nearest one, of two as near the even one. Beyond 2^23 there are whole numbers alone."""
    return ((steps + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def _e4m3(steps):
    """Bits of the nearest e4m3 as int8, of numbers fp32 up to 448: by whole numbers, which every GPU and the
    interpreter have alike. The type has 3 bits of mantissa, 120 less of exponent, and multiples of 2^-9 below 2^-6."""
    bits = steps.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    small = (tl.abs(steps) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return (tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 128)).to(tl.int8)


@triton.jit
def _codes(part, zero, inverse, LARGEST: tl.constexpr, E4M3: tl.constexpr):
    """int8 of fp32 numbers times an inverse scale; of none if `zero`."""
    # Held to its range, a product is rounded before anything is added: the two are no multiply-add.
    steps = tl.clamp(tl.where(zero, 0.0, part * inverse), -LARGEST, LARGEST)
    return _e4m3(steps) if E4M3 else _whole(steps)


@triton.jit(do_not_specialize=["inputs"])
def round_rows(
    x, codes, scales, inputs, k_stride, x_stride,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, E4M3: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each row of x [T, K], rows x_stride apart, as codes int8 [T, K'] under a scale: fp32 [T]. k_stride: K', of which
    zeros fill what is behind K. E4M3: codes are bits of that type. The first BLOCK inputs are read once."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x, codes = x + row * x_stride + k, codes + row * k_stride + k
    first = tl.load(x, mask=k < inputs, other=0.0).to(tl.float32)
    most = first.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # as bits NaN is above infinity
    for at in range(BLOCK, inputs, BLOCK):
        part = tl.load(x + at, mask=at + k < inputs, other=0.0).to(tl.float32)
        most = tl.maximum(most, part.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    bits = tl.max(most, 0)
    finite, top = bits < 0x7F800000, bits.to(tl.float32, bitcast=True)
    zero = (bits >= 0x7F800000) | (top < LEAST)
    top = tl.where(zero, 1.0, top)
    scale = tl.where(zero, 0.0, tl.div_rn(top, LARGEST))
    tl.store(scales + row, tl.where(finite, scale, float("nan")))
    inverse = tl.div_rn(LARGEST, top)
    tl.store(codes, _codes(first, zero, inverse, LARGEST, E4M3), mask=k < k_stride)
    for at in range(BLOCK, k_stride, BLOCK):
        part = tl.load(x + at, mask=at + k < inputs, other=0.0).to(tl.float32)
        tl.store(codes + at, _codes(part, zero, inverse, LARGEST, E4M3), mask=at + k < k_stride)


@triton.jit(do_not_specialize=["rows"])
def product(
    x, x_scales, weight, scales, bias, out, table, begin, order, rows, k_stride, outputs, out_stride, experts, chosen,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, BIAS: tl.constexpr, EXPERTS: tl.constexpr,
    SENT: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Codes x [T, K'] under x_scales fp32 [T] times codes weight [N, K'] under scales fp32 [N], plus bias [N]: out
    [T, N], rows out_stride apart. k_stride: K', a multiple of STEP. E4M3: of the codes, else int8. EXPERTS, table,
    begin, order, chosen, SENT: see weight_kernels.product."""
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
    acc = tl.zeros((COLUMNS, ROWS), tl.float32 if E4M3 else tl.int32)
    for at in range(0, k_stride, STEP):
        if E4M3:
            # Not max_num_imprecise_acc, by which Triton 3.6 reads accumulators of instructions that may not have ended.
            acc += tl.dot(tl.load(from_w + at), tl.load(from_x + at))
        else:
            acc = tl.dot(tl.load(from_w + at), tl.load(from_x + at), acc, out_dtype=tl.int32)
    total = acc.to(tl.float32) * tl.load(x_scales + source)[None, :]
    scale = tl.load(scales + read)[:, None].broadcast_to(total.shape)
    if BIAS:
        total = tl.fma(total, scale, tl.load(bias + read).to(tl.float32)[:, None].broadcast_to(total.shape))
    else:
        total = total * scale
    to = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(to, tl.trans(total).to(out.dtype.element_ty), mask=(row < last)[:, None] & (column < outputs)[None, :])
