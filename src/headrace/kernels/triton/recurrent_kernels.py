"""What recurrent layers of all kinds do on a GPU, in Triton: the convolution of rows, and the inputs that are kept.

T: rows, K: inputs of the convolution, C: its channels (CHANNELS). Where a product could be contracted with a sum inside
a loop, `tl.fma` says so: no compiler decides how it is rounded.
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def given(mixed, row, at, there, mixed_stride, CHANNELS: tl.constexpr, GATED: tl.constexpr):
    """Inputs of channels `at` that a row gives, 0 where not `there`: mixed's, or, if GATED, mixed's times those 2 C
    behind them, rounded to its type."""
    place = mixed + row * mixed_stride + at
    x = tl.load(place, mask=there, other=0.0)
    if GATED:
        other = tl.load(place + 2 * CHANNELS, mask=there, other=0.0)
        x = (x.to(tl.float32) * other.to(tl.float32)).to(mixed.dtype.element_ty)
    return x


@triton.jit
def convolved(
    mixed, last, taps, conv, total, row, known, mixed_stride, at, there,
    CHANNELS: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """total, fp32, plus the convolution of channels `at`, from the oldest input to the row's own; `total` where not
    `there`. row: int64, which broadcasts against `at`; known: whether there is such a row. taps int32 [T, K - 1]: where
    the inputs before a row's own lie (recurrent_schedule.Arranged)."""
    for tap in tl.static_range(K - 1):
        place = tl.load(taps + row * (K - 1) + tap, mask=known, other=-1).to(tl.int64)
        new = given(mixed, place, at, there & (place >= 0), mixed_stride, CHANNELS, GATED)
        kept = tl.load(last + (-2 - place) * CHANNELS + at, mask=there & (place < -1), other=0.0)
        weight = tl.load(conv + tap * CHANNELS + at, mask=there, other=0.0)
        total = tl.fma(tl.where(place >= 0, new, kept).to(tl.float32), weight, total)
    own = given(mixed, row, at, there, mixed_stride, CHANNELS, GATED).to(tl.float32)
    return tl.fma(own, tl.load(conv + (K - 1) * CHANNELS + at, mask=there, other=0.0), total)


@triton.jit
def keep_last(
    mixed, last, mixed_stride, begin, end, source, target, part,
    CHANNELS: tl.constexpr, K: tl.constexpr, PART: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The last K - 1 inputs behind a segment's rows, of PART channels, from those before it: oldest first, so that none
    is overwritten before it is moved."""
    channel = part * PART + tl.arange(0, PART)
    for tap in tl.static_range(K - 1):
        row = end - (K - 1) + tap
        before = row - begin + (K - 1)  # among the inputs before the segment
        of_new, of_kept = tl.where(row >= begin, CHANNELS, 0), tl.where((row < begin) & (source >= 0), CHANNELS, 0)
        new = given(mixed, row, channel, channel < of_new, mixed_stride, CHANNELS, GATED)
        from_last = last + (source * (K - 1) + before) * CHANNELS + channel
        kept = tl.load(from_last, mask=channel < of_kept, other=0.0)
        into = last + (target * (K - 1) + tap) * CHANNELS + channel
        tl.store(into, tl.where(row >= begin, new, kept), mask=channel < CHANNELS)


@triton.jit
def softplus(x):
    """log(1 + e^x)."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
