"""Keys and values rounded to int8 as they are stored on a GPU, in Triton. D: head size, P: D rounded up."""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rounded(x):
    """x [P] as int8 times a scale: see reference.quantise. Where x holds NaN the scale is NaN, and codes are 0."""
    scale = tl.div_rn(tl.max(tl.abs(x), 0), 127.0)
    numbers = tl.sum((x != x).to(tl.int32), 0) == 0
    scale = tl.where(numbers, scale, float("nan"))
    by = tl.zeros(x.shape, tl.float32) + scale
    steps = tl.div_rn(x, by)
    steps = tl.where((by > 0) & (steps == steps), steps, 0.0)
    # Beyond 2^23 there are whole numbers alone: to the nearest one, of two as near to the even one.
    whole = (tl.clamp(steps, -127.0, 127.0) + 12582912.0) - 12582912.0
    return whole.to(tl.int8), scale


@triton.jit
def store(
    k_new, v_new, k, v, k_scale, v_scale, slots, offsets, k_stride, v_stride,
    KV_HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """A row's key and value of one KV head, rounded, into int8 pools (see attention_kernels.walk), and their scales
    fp32 [slots, KV_HEADS, 64]: key offsets[t] of chunk slots[t]; none of a negative slot."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, offset = tl.load(slots + row).to(tl.int64), tl.load(offsets + row)
    if slot < 0:
        return
    d = tl.arange(0, P)
    fits = d < D
    key = tl.load(k_new + row * k_stride + head * D + d, mask=fits, other=0.0).to(tl.float32)
    value = tl.load(v_new + row * v_stride + head * D + d, mask=fits, other=0.0).to(tl.float32)
    chunk = slot * KV_HEADS + head
    codes, scale = _rounded(key)
    tl.store(k + chunk * (64 * D) + d * 64 + offset, codes, mask=fits)
    tl.store(k_scale + chunk * 64 + offset, scale)
    codes, scale = _rounded(value)
    tl.store(v + chunk * (64 * D) + offset * D + d, codes, mask=fits)
    tl.store(v_scale + chunk * 64 + offset, scale)
