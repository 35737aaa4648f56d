"""Mamba-2 layers on a GPU, in Triton: the convolution of rows, the recurrence token by token, the norm behind a gate.

See kernels.mamba2 for what is computed and for the letters T, K, C, D, V; KEY_HEADS, VALUE_HEADS: Hk, Hv; VALUES: Hv V;
CHANNELS: C. mixed [T, Hv V + C] = (z, x, k, q).
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.recurrent_kernels import convolved, keep_last, softplus
from headrace.kernels.triton.row_kernels import activated


@triton.jit(do_not_specialize=["rows"])
def convolve(
    mixed, last, taps, conv, bias, gates, rate, dt_bias, made, scalars, rows, mixed_stride,
    VALUE_HEADS: tl.constexpr, VALUES: tl.constexpr, CHANNELS: tl.constexpr, K: tl.constexpr, BIASED: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of a row of made fp32 [T, C]; the last part of a row has scalars fp32 [T, 2 Hv]: decay and step of
    each head. bias [C], if BIASED; HEADS: Hv as a power of 2."""
    row, part = tl.program_id(0).to(tl.int64) + tl.zeros([1], tl.int64), tl.program_id(1)
    if part < (CHANNELS + BLOCK - 1) // BLOCK:
        at = part * BLOCK + tl.arange(0, BLOCK)
        there = at < CHANNELS
        total = tl.load(bias + at, mask=there, other=0.0) if BIASED else tl.zeros([BLOCK], tl.float32)
        channels = mixed + VALUES
        x = convolved(channels, last, taps, conv, total, row, row < rows, mixed_stride, at, there, CHANNELS, K, False)
        tl.store(made + row * CHANNELS + at, activated(x, "silu"), mask=there)
    else:
        head = tl.arange(0, HEADS)
        known = head < VALUE_HEADS
        given = tl.load(gates + row * VALUE_HEADS + head, mask=known, other=0.0)
        step = softplus(given + tl.load(dt_bias + head, mask=known, other=0.0))
        told = scalars + row * 2 * VALUE_HEADS + head
        tl.store(told, tl.exp(-tl.load(rate + head, mask=known, other=0.0) * step), mask=known)
        tl.store(told + VALUE_HEADS, step, mask=known)


@triton.jit
def recur(
    made, scalars, mixed, last, matrices, skip, segments, groups, mixed_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, VALUES: tl.constexpr, CHANNELS: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, K: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """COLUMNS of a head's matrices [slots, Hv, D, V] through the segments groups[n] .. groups[n + 1] - 1, one after the
    other; what a row reads of them takes the place of its x in `made`. segments int32 [n, 4]: as kernels.gated_delta
    has them. No other program of the group reads or writes these columns, nor these PART channels of
    last [slots, K - 1, C]; no other group has a slot that one of its segments writes."""
    group, part = tl.program_id(0), tl.program_id(1)
    blocks: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    head, d, column = part // blocks, tl.arange(0, P), part % blocks * COLUMNS + tl.arange(0, COLUMNS)
    here = (d < D)[:, None] & (column < V)[None, :]
    at = (head * D + d[:, None]) * V + column[None, :]
    size: tl.constexpr = VALUE_HEADS * D * V
    passed = tl.load(skip + head)
    for number in range(tl.load(groups + group), tl.load(groups + group + 1)):
        segment = segments + number * 4
        begin, end = tl.load(segment).to(tl.int64), tl.load(segment + 1).to(tl.int64)
        source, target = tl.load(segment + 2).to(tl.int64), tl.load(segment + 3).to(tl.int64)
        keep_last(mixed + VALUES, last, mixed_stride, begin, end, source, target, part, CHANNELS, K, PART, False)
        begun = here & (at < tl.where(source >= 0, size, 0))
        matrix = tl.load(matrices + source * size + at, mask=begun, other=0.0)
        k, q, x, decay, step = _inputs(made, scalars, begin, end, head, d, column, KEY_HEADS, VALUE_HEADS, VALUES, D, V)
        for row in range(begin, end):
            next_k, next_q, next_x, next_decay, next_step = _inputs(
                made, scalars, row + 1, end, head, d, column, KEY_HEADS, VALUE_HEADS, VALUES, D, V
            )
            matrix = tl.fma(k[:, None], (x * step)[None, :], matrix * decay)
            out = tl.fma(x, passed, tl.sum(matrix * q[:, None], 0))
            tl.store(made + row * CHANNELS + head * V + column, out, mask=column < V)
            k, q, x, decay, step = next_k, next_q, next_x, next_decay, next_step
        tl.store(matrices + target * size + at, matrix, mask=here)
        tl.debug_barrier()  # the next segment may begin with this state


@triton.jit
def _inputs(
    made, scalars, row, end, head, d, column,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """k, q [P], x [COLUMNS], decay and step of a row; zeros from the end on."""
    keys: tl.constexpr = KEY_HEADS * D
    there = row < end
    in_keys, in_values = d < tl.where(there, D, 0), column < tl.where(there, V, 0)
    from_row, told = made + row * (VALUES + 2 * keys), scalars + row * 2 * VALUE_HEADS + head
    of_group = from_row + VALUES + head // (VALUE_HEADS // KEY_HEADS) * D + d
    k = tl.load(of_group, mask=in_keys, other=0.0)
    q = tl.load(of_group + keys, mask=in_keys, other=0.0)
    x = tl.load(from_row + head * V + column, mask=in_values, other=0.0)
    return k, q, x, tl.load(told, mask=there, other=0.0), tl.load(told + VALUE_HEADS, mask=there, other=0.0)


@triton.jit
def gate(
    made, mixed, weight, out, mixed_stride, eps,
    VALUES: tl.constexpr, CHANNELS: tl.constexpr, TOGETHER: tl.constexpr, P: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """TOGETHER numbers of a row of what recur leaves, the heads of a group, times the silu of mixed's first Hv V
    columns, and if NORMED normed, times weight [Hv V]: out [T, Hv, V]."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    there, at = i < TOGETHER, tl.program_id(1) * TOGETHER + i
    x = tl.load(made + row * CHANNELS + at, mask=there, other=0.0)
    z = tl.load(mixed + row * mixed_stride + at, mask=there, other=0.0).to(tl.float32)
    x = x * activated(z, "silu")
    if NORMED:
        x = x * tl.rsqrt(tl.sum(x * x, 0) / TOGETHER + eps) * tl.load(weight + at, mask=there, other=0.0)
    tl.store(out + row * VALUES + at, x.to(out.dtype.element_ty), mask=there)
