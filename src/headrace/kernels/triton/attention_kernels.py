"""Attention over chunks on a GPU, in Triton: how one task walks its chunks, and how the spans of a row are merged.

L: lanes of a task, D: head size, P: D rounded up to a power of two, 64: keys of a chunk. A lane is one (row, query
head). A lane's bits depend on nothing but its own query and the keys it sees: every task has the same number of lanes,
whether they are taken or not, probabilities are rounded relative to their own chunk's maximum (docs/architecture.md), a
chunk that a lane does not see changes nothing, and every merge is the same three operations, whose rounding is spelled
out.
Scores are in units of log 2.
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _merge(m, z, acc, m2, z2, acc2):
    """(m, z, acc) [L], [L], [L, P] merged with what comes after it, unnormalised. What is empty has m = -inf, and is
    left out whatever else it holds: 0 times the NaN of another sequence is NaN."""
    new = tl.maximum(m, m2)
    base = tl.where(new == float("-inf"), 0.0, new)
    keep, take = tl.exp2(m - base), tl.exp2(m2 - base)
    empty = m2 == float("-inf")
    z = tl.where(empty, z, tl.fma(z, keep, z2 * take))
    return new, z, tl.where(empty[:, None], acc, tl.fma(acc, keep[:, None], acc2 * take[:, None]))


@triton.jit
def _probabilities(scores, seen, factor):
    """p [L, 64] relative to each lane's greatest seen score, and that score [L], both scores times `factor`."""
    scores = tl.where(seen, scores, float("-inf"))
    top = tl.max(scores, 1) * factor
    base = tl.where(top == float("-inf"), 0.0, top)
    return tl.exp2(tl.fma(scores, tl.full(scores.shape, 1.0, tl.float32) * factor, -base[:, None])), top


# One kernel, long as it is: what its parts would hand to one another lives in registers.
@triton.jit
def walk(
    q, k, v, items, tasks, count, positions, bases, bias, acc_of, m_of, z_of, out, factor, q_stride, bias_len, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr, LANES: tl.constexpr, SPAN: tl.constexpr, SPLIT: tl.constexpr, RESUME: tl.constexpr,
    WINDOW: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Every num_programs(0)-th of count[0] tasks, of one KV head or of PART of its query heads. See TileSchedule for
    tasks, items and bases.

    q [R, HEADS, D], rows q_stride apart; k [slots, KV_HEADS, D, 64], v [slots, KV_HEADS, 64, D]; positions int32 [R];
    bias fp32 [HEADS, bias_len]. SPLIT: leaves acc_of [states, HEADS, D], m_of and z_of [states, HEADS], going on from
    them if RESUME. Otherwise: out [R, HEADS, D]. factor: of the scores, in units of log 2.
    """
    for number in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        _walk_task(
            q, k, v, items, tasks + 4 * number, positions, bases, bias, acc_of, m_of, z_of, out, factor, q_stride,
            bias_len, window, HEADS, KV_HEADS, PART, PARTS, D, P, LANES, SPAN, SPLIT, RESUME, WINDOW, BIAS, PRECISION,
        )  # fmt: skip


@triton.jit
def _walk_task(
    q, k, v, items, task, positions, bases, bias, acc_of, m_of, z_of, out, factor, q_stride, bias_len, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr, LANES: tl.constexpr, SPAN: tl.constexpr, SPLIT: tl.constexpr, RESUME: tl.constexpr,
    WINDOW: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kv_head, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    begin, end, first, count = tl.load(task), tl.load(task + 1), tl.load(task + 2), tl.load(task + 3)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    lane, d, j = tl.arange(0, LANES), tl.arange(0, P), tl.arange(0, 64)
    row, in_group = begin + lane // PART, part * PART + lane % PART
    taken = (row < end) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    position = tl.load(positions + row, mask=taken, other=-1)
    fits = d < D
    rows = tl.load(
        q + row.to(tl.int64)[:, None] * q_stride + (head * D)[:, None] + d[None, :],
        mask=taken[:, None] & fits[None, :], other=0.0,
    )  # fmt: skip

    m = tl.full((LANES,), float("-inf"), tl.float32)
    z = tl.zeros((LANES,), tl.float32)
    acc = tl.zeros((LANES, P), tl.float32)
    total_m, total_z, total = m, z, acc
    span = tl.load(items + 4 * first + 1, mask=count > 0, other=0) // SPAN
    state = (tl.load(bases + row, mask=taken, other=0).to(tl.int64) + span) * HEADS + head
    if RESUME:
        m = tl.load(m_of + state, mask=taken, other=float("-inf"))
        z = tl.load(z_of + state, mask=taken, other=0.0)
        acc = tl.load(acc_of + state[:, None] * D + d[None, :], mask=taken[:, None] & fits[None, :], other=0.0)

    for i in range(first, first + count):
        slot, key = tl.load(items + 4 * i).to(tl.int64), tl.load(items + 4 * i + 1)
        low, high = tl.load(items + 4 * i + 2), tl.load(items + 4 * i + 3)
        chunk = (slot * KV_HEADS + kv_head) * (64 * D)
        keys = key + j
        offered = (row >= low) & (row < high)
        there = keys <= tl.max(tl.where(offered, position, -1), 0)  # behind lies what nobody has written yet
        k_pairs = k + chunk + d[:, None] * 64 + j[None, :]
        v_pairs = v + chunk + j[:, None] * D + d[None, :]
        if D == P:
            chunk_k = tl.load(k_pairs)
            chunk_v = tl.load(v_pairs, mask=there[:, None], other=0.0)
        else:
            chunk_k = tl.load(k_pairs, mask=fits[:, None], other=0.0)
            chunk_v = tl.load(v_pairs, mask=there[:, None] & fits[None, :], other=0.0)
        if not SPLIT:  # noqa: SIM102 (this one is decided when the kernel is compiled)
            if key // SPAN != span:
                total_m, total_z, total = _merge(total_m, total_z, total, m, z, acc)
                m = tl.full((LANES,), float("-inf"), tl.float32)
                z = tl.zeros((LANES,), tl.float32)
                acc = tl.zeros((LANES, P), tl.float32)
                span = key // SPAN
        scores = tl.dot(rows, chunk_k, input_precision=PRECISION)
        seen = (keys[None, :] <= position[:, None]) & offered[:, None]
        if WINDOW:
            seen = seen & (keys[None, :] > position[:, None] - window)
        if BIAS:
            near = bias + head[:, None] * bias_len + keys[None, :]
            bias_here = tl.load(near, mask=taken[:, None] & (keys < bias_len)[None, :], other=0.0)
            scores = tl.fma(scores, tl.full(scores.shape, 1.0, tl.float32) * factor, bias_here * 1.4426950408889634)
            p, top = _probabilities(scores, seen, 1.0)
        else:
            p, top = _probabilities(scores, seen, factor)
        values = tl.dot(p.to(chunk_v.dtype), chunk_v, input_precision=PRECISION)
        m, z, acc = _merge(m, z, acc, top, tl.sum(p, 1), values)

    if SPLIT:
        tl.store(m_of + state, m, mask=taken)
        tl.store(z_of + state, z, mask=taken)
        tl.store(acc_of + state[:, None] * D + d[None, :], acc, mask=taken[:, None] & fits[None, :])
    else:
        total_m, total_z, total = _merge(total_m, total_z, total, m, z, acc)
        result = total / tl.where(total_z == 0.0, 1.0, total_z)[:, None]
        at = out + (row.to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=taken[:, None] & fits[None, :])


@triton.jit
def merge_spans(
    acc_of, m_of, z_of, positions, bases, out, window,
    HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, TOGETHER: tl.constexpr, SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """The states of a row's spans, from left to right, for TOGETHER of its heads: out [R, HEADS, D], which rows without
    states leave as it is. See walk."""
    row = tl.program_id(0).to(tl.int64)
    base = tl.load(bases + row).to(tl.int64)
    if base < 0:
        return
    head, d = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER), tl.arange(0, P)
    taken, fits = head < HEADS, d < D
    position = tl.load(positions + row)
    m = tl.full((TOGETHER,), float("-inf"), tl.float32)
    z = tl.zeros((TOGETHER,), tl.float32)
    acc = tl.zeros((TOGETHER, P), tl.float32)
    first = tl.maximum(position - window + 1, 0) // SPAN if WINDOW else 0
    for span in range(first, position // SPAN + 1):
        state = (base + span) * HEADS + head
        m2 = tl.load(m_of + state, mask=taken, other=float("-inf"))
        z2 = tl.load(z_of + state, mask=taken, other=0.0)
        acc2 = tl.load(acc_of + state[:, None] * D + d[None, :], mask=taken[:, None] & fits[None, :], other=0.0)
        m, z, acc = _merge(m, z, acc, m2, z2, acc2)
    result = acc / tl.where(z == 0.0, 1.0, z)[:, None]
    at = out + (row * HEADS + head)[:, None] * D + d[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=taken[:, None] & fits[None, :])


@triton.jit
def store(
    k_new, v_new, k, v, slots, offsets, k_stride, v_stride, KV_HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr
):
    """A row's key and value of one KV head into the pools (see walk): key offsets[t] of chunk slots[t]; none of
    a negative slot."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, offset = tl.load(slots + row).to(tl.int64), tl.load(offsets + row)
    if slot < 0:
        return
    d = tl.arange(0, P)
    fits = d < D
    chunk = (slot * KV_HEADS + head) * (64 * D)
    key = tl.load(k_new + row * k_stride + head * D + d, mask=fits)
    value = tl.load(v_new + row * v_stride + head * D + d, mask=fits)
    tl.store(k + chunk + d * 64 + offset, key, mask=fits)
    tl.store(v + chunk + offset * D + d, value, mask=fits)
