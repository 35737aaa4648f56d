"""Norms and activations on a GPU, in Triton, that give a row the same bits whatever other rows ride along.

T: rows, H: width of a row, I: MLP width. torch's own reductions choose the order in which they add up by the number of
rows. Where a product could be contracted with a sum, `tl.fma` says so: no compiler decides how it is rounded.
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm(
    x, part, total, weight, bias, out, width, eps, offset, stride, heads,
    P: tl.constexpr, ADD: tl.constexpr, RMS: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Each of `heads` stretches of `width` elements of a row of x, rows `stride` apart: out [T, heads, width]. RMS: a
    root-mean-square norm, else to mean 0 and variance 1. ADD: x and part, both contiguous, are added first: total.
    OVERLAPS: a product behind may begin to fetch its weights (product_kernels)."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    row, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, P)
    there = d < width
    at = (row * heads + head) * width + d
    numbers = tl.load(x + row * stride + head * width + d, mask=there, other=0.0)
    if ADD:
        more = tl.load(part + at, mask=there, other=0.0)
        numbers = (numbers.to(tl.float32) + more.to(tl.float32)).to(numbers.dtype)
        tl.store(total + at, numbers, mask=there)
    numbers = numbers.to(tl.float32)
    if not RMS:
        numbers = tl.where(there, numbers - tl.sum(numbers, 0) / width, 0.0)
    result = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / width + eps)
    by = tl.full((P,), 1.0, tl.float32)
    if WEIGHT:
        by = tl.load(weight + d, mask=there, other=0.0).to(tl.float32) + offset
    if BIAS:
        result = tl.fma(result, by, tl.load(bias + d, mask=there, other=0.0).to(tl.float32))
    else:
        result = result * by
    tl.store(out + at, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def activated(x, KIND: tl.constexpr):
    """An activation of fp32 numbers. KIND: relu, gelu, gelu_tanh, silu, sigmoid."""
    if KIND == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if KIND == "gelu_tanh":
        inner = tl.fma(x * x * 0.044715, x, x) * 1.5957691216057308
        return x / (1.0 + tl.exp(-inner))
    return (x if KIND == "silu" else 1.0) / (1.0 + tl.exp(-x))


@triton.jit
def gated(gate, up, KIND: tl.constexpr):
    """f(gate) * up, fp32. KIND: as `activated` has them, or swiglu_oai or swiglu_clamped (see ops)."""
    if KIND == "swiglu_oai":
        gate, up = tl.minimum(gate, 7.0), tl.minimum(tl.maximum(up, -7.0), 7.0)
        return (up + 1.0) * (gate / (1.0 + tl.exp(-1.702 * gate)))
    if KIND == "swiglu_clamped":
        gate, up = tl.minimum(gate, 10.0), tl.minimum(tl.maximum(up, -10.0), 10.0)
        return activated(gate, "silu") * up
    return activated(gate, KIND) * up


@triton.jit
def activate(
    x, out, stride, width, WIDTH: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, OVERLAPS: tl.constexpr
):
    """x [T, I], rows `stride` apart, or x = (gate, up) [T, 2 I] if GATED: out [T, I]. width: I. OVERLAPS: see norm."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = d < width
    first = tl.load(x + row * stride + d, mask=there, other=0.0).to(tl.float32)
    if GATED:
        result = gated(first, tl.load(x + row * stride + width + d, mask=there, other=0.0).to(tl.float32), KIND)
    else:
        result = activated(first, KIND)
    tl.store(out + row * width + d, result.to(out.dtype.element_ty), mask=there)
