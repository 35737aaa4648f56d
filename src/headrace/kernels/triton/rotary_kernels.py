"""Projected heads to queries, keys and values on a GPU, in Triton: norms, rotation, and storing in one launch.

T: rows; Q, KV: query and KV heads, D: head size (P: rounded up to a power of two). k [slots, KV, D, 64], v [slots, KV,
64, D] are pools of chunks.
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["row_heads"])
def rotate_heads(
    heads, cos_sin, q_norm, k_norm, out, k, v, slots, offsets, row_heads, turn_stride, eps, offset,
    Q: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, P: tl.constexpr, TURNED: tl.constexpr, NORM: tl.constexpr,
    STORE: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """TOGETHER of a row's heads [T, Q + 2 KV, D], rows row_heads * D apart: queries and keys normed (NORM, rounded),
    and their first TURNED elements rotated by halves. Queries go to out [T, Q, D], keys and values to the pools as key
    offsets[t] of chunk slots[t], unless that is negative; without STORE queries and keys go to out [T, Q + KV, D]."""
    row = tl.program_id(0).to(tl.int64)
    head, d = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER), tl.arange(0, P)
    fits = d < D
    own: tl.constexpr = Q if STORE else Q + KV
    there = (head < (Q + 2 * KV if STORE else own))[:, None] & fits[None, :]
    # The order of the norm's sum follows from how the loads lie: row_heads must not change that.
    from_row = heads + row * row_heads * D + head[:, None] * D
    plain = tl.load(from_row + d[None, :], mask=there, other=0.0)
    x = plain.to(tl.float32)
    if NORM:
        by_root = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = (x * by_root * _weights(q_norm, k_norm, head, d, fits, offset, Q)).to(plain.dtype).to(tl.float32)
    if TURNED:
        half: tl.constexpr = TURNED // 2
        turned, low = d < TURNED, d < half
        partner = tl.where(low, d + half, d - half)
        y = tl.load(from_row + partner[None, :], mask=there & turned[None, :], other=0.0).to(tl.float32)
        if NORM:
            y = y * by_root * _weights(q_norm, k_norm, head, partner, turned, offset, Q)
            y = y.to(plain.dtype).to(tl.float32)
        turn = cos_sin + row * turn_stride + tl.where(low, d, d - half)
        cos, sin = tl.load(turn, mask=turned, other=1.0), tl.load(turn + half, mask=turned, other=0.0)
        # No compiler decides which product is rounded.
        x = tl.fma(x, cos[None, :], y * tl.where(low, -sin, sin)[None, :])
    made = x.to(plain.dtype)
    tl.store(out + (row * own + head[:, None]) * D + d[None, :], made, mask=there & (head < own)[:, None])
    if STORE:
        slot, at = tl.load(slots + row).to(tl.int64), tl.load(offsets + row)
        key, value = tl.where(slot >= 0, head - Q, -1), tl.where(slot >= 0, head - Q - KV, -1)
        into_k = k + ((slot * KV + key)[:, None] * D + d[None, :]) * 64 + at
        tl.store(into_k, made, mask=there & ((key >= 0) & (key < KV))[:, None])
        into_v = v + ((slot * KV + value)[:, None] * 64 + at) * D + d[None, :]
        tl.store(into_v, plain, mask=there & (value >= 0)[:, None])


@triton.jit
def _weights(q_norm, k_norm, head, d, fits, offset, Q: tl.constexpr):
    """The norm's weights of elements d of queries and keys: [TOGETHER, P]."""
    of_q, of_k = tl.load(q_norm + d, mask=fits, other=0.0), tl.load(k_norm + d, mask=fits, other=0.0)
    return tl.where((head < Q)[:, None], of_q[None, :].to(tl.float32), of_k[None, :].to(tl.float32)) + offset
