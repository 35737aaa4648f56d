"""Gated delta nets on a GPU, in Triton: the convolution of rows, the recurrence token by token, the norm with its gate.

See kernels.gated_delta for what is computed and for the letters T, K, C, D, V; KEY_HEADS, VALUE_HEADS: Hk, Hv. Where a
product could be contracted with a sum inside a loop, `tl.fma` says so: no compiler decides how it is rounded.
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
    mixed, last, taps, conv, gates, rate, dt_bias, made, scalars, decays, rows, mixed_stride, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, TOGETHER: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """TOGETHER heads of rows of mixed [T, C + Hv V]: made fp32 [T, C] has queries and keys of length 1, queries times
    `scale`, and values; scalars fp32 [T, 2 Hv + Hk] decay and beta of each value head, and q . k of each key head.
    taps int32 [T, K - 1]: where the inputs before a row's own lie (recurrent_schedule.Arranged). BY_CHANNEL: decays
    fp32 [T, Hk D] has those of each channel of a key, and queries have decayed already; scalars have none."""
    keys: tl.constexpr = KEY_HEADS * D
    channels: tl.constexpr = 2 * keys + VALUE_HEADS * V
    width: tl.constexpr = 2 * VALUE_HEADS + KEY_HEADS
    of_keys = (rows * KEY_HEADS + TOGETHER - 1) // TOGETHER
    part, near, d = tl.program_id(0), tl.arange(0, TOGETHER), tl.arange(0, P)[None, :]
    if part < of_keys:
        item = part * TOGETHER + near
        row, head = (item // KEY_HEADS).to(tl.int64), item % KEY_HEADS
        there = (row < rows)[:, None] & (d < D)
        at, to = head[:, None] * D + d, made + row[:, None] * channels
        q = _unit(_convolved(mixed, last, taps, conv, row, rows, mixed_stride, at, there, channels, K)) * scale
        k = _unit(_convolved(mixed, last, taps, conv, row, rows, mixed_stride, keys + at, there, channels, K))
        tl.store(scalars + row * width + 2 * VALUE_HEADS + head, tl.sum(q * k, 1), mask=row < rows)
        if BY_CHANNEL:
            own = gates + row[:, None] * (VALUE_HEADS + keys) + VALUE_HEADS + at
            step = softplus(tl.load(own, mask=there, other=0.0) + tl.load(dt_bias + at, mask=there, other=0.0))
            decay = tl.exp(-tl.load(rate + head)[:, None] * step)
            tl.store(decays + row[:, None] * keys + at, decay, mask=there)
            q *= decay
        tl.store(to + at, q, mask=there)
        tl.store(to + keys + at, k, mask=there)
    else:
        item = (part - of_keys) * TOGETHER + near
        row, head = (item // VALUE_HEADS).to(tl.int64), item % VALUE_HEADS
        known = row < rows
        there = known[:, None] & (d < V)
        at = 2 * keys + head[:, None] * V + d
        v = _convolved(mixed, last, taps, conv, row, rows, mixed_stride, at, there, channels, K)
        tl.store(made + row[:, None] * channels + at, v, mask=there)
        of_row = gates + row * (VALUE_HEADS + (keys if BY_CHANNEL else VALUE_HEADS)) + head
        told, b = scalars + row * width + head, tl.load(of_row, mask=known, other=0.0)
        tl.store(told + VALUE_HEADS, 1.0 / (1.0 + tl.exp(-b)), mask=known)
        if not BY_CHANNEL:
            a = tl.load(of_row + VALUE_HEADS, mask=known, other=0.0) + tl.load(dt_bias + head)
            tl.store(told, tl.exp(-tl.load(rate + head) * softplus(a)), mask=known)


@triton.jit
def _convolved(mixed, last, taps, conv, row, rows, mixed_stride, at, there, channels: tl.constexpr, K: tl.constexpr):
    """silu of the convolution of channels `at`: fp32, 0 where not `there`."""
    nothing, row = tl.zeros(at.shape, tl.float32), row[:, None]
    known = row < rows
    x = convolved(mixed, last, taps, conv, nothing, row, known, mixed_stride, at, there, channels, K, False)
    return activated(x, "silu")


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def recur(
    made, scalars, decays, mixed, last, matrices, segments, groups, mixed_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """COLUMNS of a value head's matrices [slots, Hv, D, V] through the segments groups[n] .. groups[n + 1] - 1, one
    after the other; what a row reads of them takes the place of its value in `made`. segments int32 [n, 4]: as
    kernels.gated_delta has them. No other program of the group reads or writes these columns, nor these CHANNELS of
    last [slots, K - 1, C]; no other group has a slot that one of its segments writes."""
    group, part = tl.program_id(0), tl.program_id(1)
    blocks: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    channels: tl.constexpr = 2 * KEY_HEADS * D + VALUE_HEADS * V
    head, d, column = part // blocks, tl.arange(0, P), part % blocks * COLUMNS + tl.arange(0, COLUMNS)
    here = (d < D)[:, None] & (column < V)[None, :]
    at = (head * D + d[:, None]) * V + column[None, :]
    size: tl.constexpr = VALUE_HEADS * D * V
    for number in range(tl.load(groups + group), tl.load(groups + group + 1)):
        segment = segments + number * 4
        begin, end = tl.load(segment).to(tl.int64), tl.load(segment + 1).to(tl.int64)
        source, target = tl.load(segment + 2).to(tl.int64), tl.load(segment + 3).to(tl.int64)
        keep_last(mixed, last, mixed_stride, begin, end, source, target, part, channels, K, CHANNELS, False)
        begun = here & (at < tl.where(source >= 0, size, 0))
        matrix = tl.load(matrices + source * size + at, mask=begun, other=0.0)
        q, k, v, decay, beta, qk = _inputs(
            made, scalars, decays, begin, end, head, d, column, KEY_HEADS, VALUE_HEADS, D, V, BY_CHANNEL
        )
        for row in range(begin, end):
            next_q, next_k, next_v, next_decay, next_beta, next_qk = _inputs(
                made, scalars, decays, row + 1, end, head, d, column, KEY_HEADS, VALUE_HEADS, D, V, BY_CHANNEL
            )
            # Of the state before the row both, so that neither sum waits for the other.
            if BY_CHANNEL:
                read = k * decay
                by_k, by_q = tl.sum(matrix * read[:, None], 0), tl.sum(matrix * q[:, None], 0)
                delta = (v - by_k) * beta
                out, kept = tl.fma(delta, qk, by_q), matrix * decay[:, None]
            else:
                by_k, by_q = tl.sum(matrix * k[:, None], 0), tl.sum(matrix * q[:, None], 0)
                delta = tl.fma(-by_k, decay, v) * beta
                out, kept = tl.fma(delta, qk, by_q * decay), matrix * decay
            value = made + row * channels + 2 * KEY_HEADS * D + head * V
            tl.store(value + column, out, mask=column < V)
            matrix = tl.fma(k[:, None], delta[None, :], kept)
            q, k, v, decay, beta, qk = next_q, next_k, next_v, next_decay, next_beta, next_qk
        tl.store(matrices + target * size + at, matrix, mask=here)
        tl.debug_barrier()  # the next segment may begin with this state


@triton.jit
def _inputs(
    made, scalars, decays, row, end, head, d, column,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """q, k [P], v [COLUMNS], decay, or [P] of them, beta and q . k of a row; zeros from the end on."""
    keys: tl.constexpr = KEY_HEADS * D
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    there = row < end
    in_keys, in_values = d < tl.where(there, D, 0), column < tl.where(there, V, 0)
    from_row, told = made + row * (2 * keys + VALUE_HEADS * V), scalars + row * (2 * VALUE_HEADS + KEY_HEADS)
    q = tl.load(from_row + key_head * D + d, mask=in_keys, other=0.0)
    k = tl.load(from_row + keys + key_head * D + d, mask=in_keys, other=0.0)
    v = tl.load(from_row + 2 * keys + head * V + column, mask=in_values, other=0.0)
    beta = tl.load(told + VALUE_HEADS + head, mask=there, other=0.0)
    if BY_CHANNEL:
        decay = tl.load(decays + row * keys + key_head * D + d, mask=in_keys, other=0.0)
    else:
        decay = tl.load(told + head, mask=there, other=0.0)
    return q, k, v, decay, beta, tl.load(told + 2 * VALUE_HEADS + key_head, mask=there, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def gate(
    made, mixed, weight, out, rows, mixed_stride, eps,
    VALUE_HEADS: tl.constexpr, KEYS: tl.constexpr, V: tl.constexpr, P: tl.constexpr, TOGETHER: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """TOGETHER value heads of rows of what recur leaves, normed, times weight [V] and the silu of mixed's last Hv V
    columns, or their sigmoid: out [T, Hv, V]. KEYS: Hk D; KIND: silu, sigmoid."""
    item, d = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER), tl.arange(0, P)[None, :]
    row, head = (item // VALUE_HEADS).to(tl.int64)[:, None], (item % VALUE_HEADS)[:, None]
    there = (row < rows) & (d < V)
    at = head * V + d
    channels: tl.constexpr = 2 * KEYS + VALUE_HEADS * V
    x = tl.load(made + row * channels + 2 * KEYS + at, mask=there, other=0.0)
    z = tl.load(mixed + row * mixed_stride + channels + at, mask=there, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None] * tl.load(weight + d, mask=d < V, other=0.0)
    tl.store(out + row * (VALUE_HEADS * V) + at, (x * activated(z, KIND)).to(out.dtype.element_ty), mask=there)
