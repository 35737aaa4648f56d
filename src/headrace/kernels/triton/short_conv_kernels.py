"""Short convolutions between two gates on a GPU, in Triton: rows at once, then the inputs that states keep.

See kernels.short_conv for what is computed; T: rows, K: inputs of the convolution, H: channels (CHANNELS). mixed
[T, 3 H] = (B, C, x).
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.recurrent_kernels import convolved, keep_last


@triton.jit(do_not_specialize=["rows"])
def convolve(
    mixed, last, taps, conv, out, rows, mixed_stride,
    CHANNELS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of a row: out [T, H]."""
    row = tl.program_id(0).to(tl.int64) + tl.zeros([1], tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < CHANNELS
    nothing = tl.zeros([BLOCK], tl.float32)
    x = convolved(mixed, last, taps, conv, nothing, row, row < rows, mixed_stride, at, there, CHANNELS, K, True)
    gate = tl.load(mixed + row * mixed_stride + CHANNELS + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * CHANNELS + at, (x * gate).to(out.dtype.element_ty), mask=there)


@triton.jit
def keep(
    mixed, last, segments, groups, mixed_stride,
    CHANNELS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of last [slots, K - 1, H] behind the segments groups[n] .. groups[n + 1] - 1, one after the other.
    segments int32 [n, 4]: as kernels.gated_delta has them. No other group has a slot that one of its segments
    writes."""
    group, part = tl.program_id(0), tl.program_id(1)
    for number in range(tl.load(groups + group), tl.load(groups + group + 1)):
        segment = segments + number * 4
        begin, end = tl.load(segment).to(tl.int64), tl.load(segment + 1).to(tl.int64)
        source, target = tl.load(segment + 2).to(tl.int64), tl.load(segment + 3).to(tl.int64)
        keep_last(mixed, last, mixed_stride, begin, end, source, target, part, CHANNELS, K, BLOCK, True)
        tl.debug_barrier()  # the next segment may begin with this state
