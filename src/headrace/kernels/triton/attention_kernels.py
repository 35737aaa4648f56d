"""Attention over chunks on a GPU, in Triton: how one task walks its chunks, and how the spans of a row are merged.

L: lanes of a task, D: head size, P: D rounded up to a power of two, V: columns of the values that are summed up at a
time, 64: keys of a chunk, K: keys that are taken together, a chunk's or, of large heads, half of them. A lane is one
(row, query head). Scores are in units of log 2.

A lane's bits depend on its own query and the keys it sees alone, whichever task it is in. Inside a span it keeps a
running maximum, as online softmax does (arXiv 1805.02867): a chunk rescales what the lane holds, and its product is
added to that by the tensor core. A chunk that a lane does not see rescales by 1 and adds zeros. Spans are merged from
left to right by three operations whose rounding is spelled out.
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _merge(m, z, acc, m2, z2, acc2):
    """(m, z, acc) [L], [L], [L, V] merged with what comes after it, unnormalised. What is empty has m = -inf, and is
    left out whatever else it holds: 0 times the NaN of another sequence is NaN."""
    new = tl.maximum(m, m2)
    base = tl.where(new == float("-inf"), 0.0, new)
    keep, take = tl.exp2(m - base), tl.exp2(m2 - base)
    empty = m2 == float("-inf")
    z = tl.where(empty, z, tl.fma(z, keep, z2 * take))
    return new, z, tl.where(empty[:, None], acc, tl.fma(acc, keep[:, None], acc2 * take[:, None]))


@triton.jit
def _finish(m, z, acc, sinks, head, taken, SINKS: tl.constexpr):
    """The attention [L, V] of a finished state. sinks fp32 [HEADS]: see kernels.records.Mask."""
    if SINKS:
        sink = tl.load(sinks + head, mask=taken, other=0.0)
        z = tl.where(z > 0.0, z + tl.exp2(tl.fma(sink, tl.full(sink.shape, LOG2_E, tl.float32), -m)), z)
    return acc / tl.where(z == 0.0, 1.0, z)[:, None]


@triton.jit
def _load_chunk(
    k, v, slot, kv_head, j, column, there,
    KV_HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Keys number j [K] of one KV head of a chunk, [P, K], and these columns [V] of their values [K, V]. ALL: every
    value has been written; otherwise those that are not `there` [K] become 0."""
    d = tl.arange(0, P)
    chunk = (slot.to(tl.int64) * KV_HEADS + kv_head) * (64 * D)
    k_pairs = k + chunk + (d[:, None] * 64 + j[None, :])
    v_pairs = v + chunk + (j[:, None] * D + column[None, :])
    if D == P:
        chunk_k = tl.load(k_pairs)
        chunk_v = tl.load(v_pairs) if ALL else tl.load(v_pairs, mask=there[:, None], other=0.0)
    else:
        chunk_k = tl.load(k_pairs, mask=(d < D)[:, None], other=0.0)
        chunk_v = tl.load(v_pairs, mask=there[:, None] & (column < D)[None, :], other=0.0)
    return chunk_k, chunk_v


@triton.jit
def _capped_biased(scores, keys, head, bias, factor, cap, bias_len, BIAS: tl.constexpr, CAP: tl.constexpr):
    """Scores [L, K] with soft caps and bias, if there are any: then times the factor."""
    unit = tl.full(scores.shape, 1.0, tl.float32)
    if CAP:
        # cap * tanh(x) = cap - 2 * cap / (1 + exp(2 x)); the factor holds what makes exp2 of it.
        scores = tl.fma(1.0 / (1.0 + tl.exp2(scores * factor)), unit * (-2.0 * cap), unit * cap)
    if BIAS:
        near = bias + head[:, None] * bias_len + tl.minimum(keys, bias_len - 1)[None, :]
        here = tl.load(near) * LOG2_E
        scores = tl.fma(scores, unit if CAP else unit * factor, here)
    return scores


@triton.jit
def _softmax(m, z, scores, scale):
    """m, z after a chunk; keep [L]: what its rescaling leaves of the sums before; p [L, K]: probabilities."""
    new = tl.maximum(m, tl.max(scores, 1) * scale)
    base = tl.where(new == float("-inf"), 0.0, new)
    keep = tl.exp2(m - base)
    p = tl.exp2(tl.fma(scores, tl.full(scores.shape, 1.0, tl.float32) * scale, -base[:, None]))
    return new, tl.fma(z, keep, tl.sum(p, 1)), keep, p


@triton.jit
def first_seen(position, window, WINDOW: tl.constexpr):
    """Where the keys begin that a row sees: WINDOW 1, of the last `window`; 2, of its own block of so many."""
    if WINDOW == 2:
        return position - position % window
    else:
        return position - window + 1


@triton.jit
def _walk_chunks(
    rows, m, z, acc, total_m, total_z, total, k, v, k_scale, v_scale, items, begin, end, kv_head, column, head, taken,
    position, last, bias, factor, cap, bias_len, window,
    KV_HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr,
    MASKED: tl.constexpr, SPANS: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The state of a span (m, z, acc), and the total of those before it, after items begin .. end-1, K keys at a time.

    MASKED: some lane may not see all of a chunk. SPANS: they may lie in several spans. Of int8 k and v the scales
    multiply scores, and probabilities before they are rounded.
    """
    INT8: tl.constexpr = k.dtype.element_ty == tl.int8
    PARTS: tl.constexpr = 64 // K
    # One item ahead: the chunk's address is known before its turn to be loaded.
    some = begin < end
    slot_next = tl.load(items + 4 * begin, mask=some, other=0)
    key_next = tl.load(items + 4 * begin + 1, mask=some, other=0)
    for i in range(begin * PARTS, end * PARTS):
        first = i % PARTS * K
        slot, key, j = slot_next, key_next + first, first + tl.arange(0, K)
        keys = key_next + j
        following = items + 4 * tl.minimum((i + 1) // PARTS, end - 1)
        chunk_k, chunk_v = _load_chunk(k, v, slot, kv_head, j, column, keys <= last, KV_HEADS, D, P, not MASKED)
        if SPANS:  # noqa: SIM102 (this one is decided when the kernel is compiled)
            # Before the product of the scores: a branch behind it would make the products wait for one another.
            if key % SPAN == 0:
                total_m, total_z, total = _merge(total_m, total_z, total, m, z, acc)
                m = tl.full(m.shape, float("-inf"), tl.float32)
        slot_next, key_next = tl.load(following), tl.load(following + 1)
        scores = tl.dot(rows, chunk_k.to(rows.dtype), input_precision=PRECISION)
        if INT8:
            scales = (slot.to(tl.int64) * KV_HEADS + kv_head) * 64 + j
            scores = scores * tl.load(k_scale + scales)[None, :]
        scores = _capped_biased(scores, keys, head, bias, factor, cap, bias_len, BIAS, CAP)
        scale = 1.0 if CAP or BIAS else factor
        if MASKED:
            seen = keys[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (keys[None, :] >= first_seen(position, window, WINDOW)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        m, z, keep, p = _softmax(m, z, scores, scale)
        if INT8:
            p = p * tl.load(v_scale + scales)[None, :]
            if MASKED:  # the scale of a key that a lane does not see may be anything
                p = tl.where(seen, p, 0.0)
        acc = tl.dot(p.to(rows.dtype), chunk_v.to(rows.dtype), acc * keep[:, None], input_precision=PRECISION)
    return m, z, acc, total_m, total_z, total


@triton.jit
def _walk_spans(
    rows, m, z, acc, k, v, k_scale, v_scale, items, first, count, key, kv_head, column, head, taken, position, last,
    bias, factor, cap, bias_len, window,
    KV_HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr,
    WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The merged state (m, z, acc) of all spans of `count` items, the first of which begins at this key. m, z, acc:
    empty."""
    # Rows of one sequence and chunks that follow one another: all lanes see the middle ones whole.
    least = tl.min(tl.where(taken, position, 0x7FFFFFFF), 0)
    low = tl.minimum(tl.maximum(first_seen(last, window, WINDOW) - key + 63, 0) // 64, count) if WINDOW else 0
    high = tl.minimum(tl.maximum((least + 1 - key) // 64, low), count)
    total_m, total_z, total = m, z, acc
    if WINDOW:
        m, z, acc, total_m, total_z, total = _walk_chunks(
            rows, m, z, acc, total_m, total_z, total, k, v, k_scale, v_scale, items, first, first + low, kv_head,
            column, head, taken, position, last, bias, factor, cap, bias_len, window,
            KV_HEADS, D, P, K, SPAN, True, True, WINDOW, BIAS, CAP, PRECISION,
        )  # fmt: skip
    m, z, acc, total_m, total_z, total = _walk_chunks(
        rows, m, z, acc, total_m, total_z, total, k, v, k_scale, v_scale, items, first + low, first + high, kv_head,
        column, head, taken, position, last, bias, factor, cap, bias_len, window,
        KV_HEADS, D, P, K, SPAN, False, True, WINDOW, BIAS, CAP, PRECISION,
    )  # fmt: skip
    m, z, acc, total_m, total_z, total = _walk_chunks(
        rows, m, z, acc, total_m, total_z, total, k, v, k_scale, v_scale, items, first + high, first + count,
        kv_head, column, head, taken, position, last, bias, factor, cap, bias_len, window,
        KV_HEADS, D, P, K, SPAN, True, True, WINDOW, BIAS, CAP, PRECISION,
    )  # fmt: skip
    return _merge(total_m, total_z, total, m, z, acc)


@triton.jit
def _walk_span(
    rows, m, z, k, v, k_scale, v_scale, items, first, count, kv_head, columns, head, taken, position, last, bias,
    factor, cap, bias_len, window, acc_of, m_of, z_of, state, kept,
    KV_HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, V: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr,
    SPAN: tl.constexpr, RESUME: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Leaves the states of lanes `kept` behind `count` items of one span, at `state` of acc_of, m_of and z_of."""
    if RESUME:
        m = tl.load(m_of + state, mask=kept, other=float("-inf"))
        z = tl.load(z_of + state, mask=kept, other=0.0)
    # Every pass has the same m and z.
    for turn in range(0, P // V):
        column = turn * V + columns
        there = kept[:, None] & (column < D)[None, :]
        acc = tl.zeros((LANES, V), tl.float32)
        if RESUME:
            acc = tl.load(acc_of + state[:, None] * D + column[None, :], mask=there, other=0.0)
        new_m, new_z, acc, _, _, _ = _walk_chunks(
            rows, m, z, acc, m, z, acc, k, v, k_scale, v_scale, items, first, first + count, kv_head, column, head,
            taken, position, last, bias, factor, cap, bias_len, window,
            KV_HEADS, D, P, K, SPAN, True, False, WINDOW, BIAS, CAP, PRECISION,
        )  # fmt: skip
        if turn == P // V - 1:
            tl.store(m_of + state, new_m, mask=kept)
            tl.store(z_of + state, new_z, mask=kept)
        tl.store(acc_of + state[:, None] * D + column[None, :], acc, mask=there)


@triton.jit
def walk(
    q, k, v, k_scale, v_scale, items, tasks, count, positions, bases, bias, sinks, acc_of, m_of, z_of, out, factor,
    cap, q_stride, bias_len, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr, V: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr, SPAN: tl.constexpr, SPLIT: tl.constexpr,
    RESUME: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Tasks of one KV head or of PART of its query heads: every num_programs(0)-th of count[0] if SPLIT, otherwise task
    program_id(0), if there are so many. The columns of the values are shared by P // V programs, next to one another on
    axis 1; if SPLIT, one program takes them in as many passes. See TileSchedule for tasks, items and bases.

    q [R, HEADS, D], rows q_stride apart; k [slots, KV_HEADS, D, 64], v [slots, KV_HEADS, 64, D], of int8 k_scale and
    v_scale fp32 [slots, KV_HEADS, 64]; positions int32 [R]; bias fp32 [HEADS, bias_len]; sinks fp32 [HEADS]. SPLIT:
    leaves acc_of [states, HEADS, D], m_of and z_of [states, HEADS], going on from them if RESUME. Otherwise: out
    [R, HEADS, D]. factor: of the scores, in units of log 2. With CAP it is multiplied by 2 / cap, and cap
    is in units of log 2.
    """
    if SPLIT:
        for number in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
            _walk_task(
                q, k, v, k_scale, v_scale, items, tasks + 4 * number, positions, bases, bias, sinks, acc_of, m_of,
                z_of, out, factor, cap, q_stride, bias_len, window, HEADS, KV_HEADS, PART, PARTS, D, P, V, K, LANES,
                SPAN, True, RESUME, WINDOW, BIAS, CAP, SINKS, PRECISION,
            )  # fmt: skip
    elif tl.program_id(0) < tl.load(count):
        _walk_task(
            q, k, v, k_scale, v_scale, items, tasks + 4 * tl.program_id(0), positions, bases, bias, sinks, acc_of,
            m_of, z_of, out, factor, cap, q_stride, bias_len, window,
            HEADS, KV_HEADS, PART, PARTS, D, P, V, K, LANES, SPAN, False, False, WINDOW, BIAS, CAP, SINKS, PRECISION,
        )  # fmt: skip


@triton.jit
def _walk_task(
    q, k, v, k_scale, v_scale, items, task, positions, bases, bias, sinks, acc_of, m_of, z_of, out, factor, cap,
    q_stride, bias_len, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr, V: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr, SPAN: tl.constexpr, SPLIT: tl.constexpr,
    RESUME: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = 1 if SPLIT else P // V
    program, columns = tl.program_id(1) // COLUMNS, tl.program_id(1) % COLUMNS * V + tl.arange(0, V)
    kv_head, part = program // PARTS, program % PARTS
    begin, end, first, count = tl.load(task), tl.load(task + 1), tl.load(task + 2), tl.load(task + 3)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    lane, d = tl.arange(0, LANES), tl.arange(0, P)
    row, in_group = begin + lane // PART, part * PART + lane % PART
    taken = (row < end) & (in_group < GROUP)
    # Lanes without a head take one that there is.
    head = kv_head * GROUP + (in_group if GROUP % PART == 0 else tl.minimum(in_group, GROUP - 1))
    position = tl.load(positions + row, mask=taken, other=-1)
    last = tl.max(position, 0)  # behind lies what nobody has written yet
    rows = tl.load(
        q + row.to(tl.int64)[:, None] * q_stride + (head * D)[:, None] + d[None, :],
        mask=taken[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    key = tl.load(items + 4 * first + 1, mask=count > 0, other=0)
    m, z = tl.full((LANES,), float("-inf"), tl.float32), tl.zeros((LANES,), tl.float32)
    if SPLIT:
        kept = taken & (position >= key // SPAN * SPAN)  # rows before the span have no state there
        state = (tl.load(bases + row, mask=kept, other=0).to(tl.int64) + key // SPAN) * HEADS + head
        _walk_span(
            rows, m, z, k, v, k_scale, v_scale, items, first, count, kv_head, columns, head, taken, position, last,
            bias, factor, cap, bias_len, window, acc_of, m_of, z_of, state, kept,
            KV_HEADS, D, P, V, K, LANES, SPAN, RESUME, WINDOW, BIAS, CAP, PRECISION,
        )  # fmt: skip
    else:
        acc = tl.zeros((LANES, V), tl.float32)
        m, z, acc = _walk_spans(
            rows, m, z, acc, k, v, k_scale, v_scale, items, first, count, key, kv_head, columns, head, taken, position,
            last, bias, factor, cap, bias_len, window, KV_HEADS, D, P, K, SPAN, WINDOW, BIAS, CAP, PRECISION,
        )  # fmt: skip
        result = _finish(m, z, acc, sinks, head, taken, SINKS)
        place = (row.to(tl.int64) * HEADS + head)[:, None] * D + columns[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=taken[:, None] & (columns < D)[None, :])


@triton.jit
def merge_spans(
    acc_of, m_of, z_of, positions, bases, merged, count, sinks, out, window,
    HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, SPAN: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The states of a row's spans, from left to right, for head program_id(1): out [R, HEADS, D] of every
    num_programs(0)-th of the count[0] rows in `merged`. See walk."""
    one, d = tl.arange(0, 1), tl.arange(0, P)
    head, fits = tl.program_id(1) + one, (d < D)[None, :]
    for number in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        row = tl.load(merged + number).to(tl.int64)
        base, position = tl.load(bases + row).to(tl.int64), tl.load(positions + row)
        m = tl.full((1,), float("-inf"), tl.float32)
        z = tl.zeros((1,), tl.float32)
        acc = tl.zeros((1, P), tl.float32)
        first = tl.maximum(first_seen(position, window, WINDOW), 0) // SPAN if WINDOW else 0
        end = position // SPAN + 1
        # Several spans' states are on their way while one is merged.
        for span in tl.range(first, end, num_stages=8):
            state = (base + span) * HEADS + head
            m2, z2 = tl.load(m_of + state), tl.load(z_of + state)
            acc2 = tl.load(acc_of + state[:, None] * D + d[None, :], mask=fits, other=0.0)
            m, z, acc = _merge(m, z, acc, m2, z2, acc2)
        result = _finish(m, z, acc, sinks, head, head < HEADS, SINKS)
        tl.store(out + (row * HEADS + head)[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=fits)


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
