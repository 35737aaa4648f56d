"""Attention over chunks whose keys are their values (latent attention, MLA) on a GPU, in Triton: how one task walks
its chunks.

The order of sums, tasks and states are those of attention_kernels. A chunk is read once: its values, turned round, are
the keys. D, the head's size, is P + R: P, a power of two, and the rest, neither of which a tile would hold without the
other being padded to twice its size. L: lanes of a task; K: keys that are taken together; V, W: columns of the P and of
the R that are summed up at a time.
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.attention_kernels import _merge, _softmax


@triton.jit
def _part(from_chunk, j, column, there, D: tl.constexpr, WHOLE: tl.constexpr, ALL: tl.constexpr):
    """Columns of keys number j [K] of a chunk. WHOLE: there are so many columns; ALL: every key has been written;
    otherwise those that are not `there` [K] become 0."""
    pairs = from_chunk + (j[:, None] * D + column[None, :])
    if WHOLE and ALL:
        return tl.load(pairs)
    elif WHOLE:
        return tl.load(pairs, mask=there[:, None], other=0.0)
    else:
        return tl.load(pairs, mask=there[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def _walk_chunks(
    rows, rest, m, z, acc, acc_rest, total_m, total_z, total, total_rest, v, items, begin, end, turn, position, last,
    factor,
    D: tl.constexpr, P: tl.constexpr, R: tl.constexpr, V: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr,
    MASKED: tl.constexpr, SPANS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state of a span (m, z, acc [L, V], acc_rest [L, W]) and the total of those before it, after items begin ..
    end-1, for the turn-th columns. rows [L, P], rest [L, R]: of queries. See attention_kernels._walk_chunks."""
    PARTS: tl.constexpr = 64 // K
    W: tl.constexpr = R * V // P
    d, r = tl.arange(0, P), P + tl.arange(0, R)
    # One item ahead: the chunk's address is known before its turn to be loaded.
    some = begin < end
    slot_next = tl.load(items + 4 * begin, mask=some, other=0)
    key_next = tl.load(items + 4 * begin + 1, mask=some, other=0)
    for i in range(begin * PARTS, end * PARTS):
        first = i % PARTS * K
        slot, key, j = slot_next, key_next + first, first + tl.arange(0, K)
        keys = key_next + j
        following = items + 4 * tl.minimum((i + 1) // PARTS, end - 1)
        from_chunk, there = v + slot.to(tl.int64) * (64 * D), keys <= last
        chunk = _part(from_chunk, j, d, there, D, D >= P, not MASKED)
        chunk_rest = _part(from_chunk, j, r, there, D, D == P + R, not MASKED)
        if SPANS:  # noqa: SIM102 (this one is decided when the kernel is compiled)
            # Before the product of the scores: a branch behind it would make the products wait for one another.
            if key % SPAN == 0:
                _, _, total_rest = _merge(total_m, total_z, total_rest, m, z, acc_rest)
                total_m, total_z, total = _merge(total_m, total_z, total, m, z, acc)
                m = tl.full(m.shape, float("-inf"), tl.float32)
        slot_next, key_next = tl.load(following), tl.load(following + 1)
        scores = tl.dot(rows, tl.trans(chunk), input_precision=PRECISION)
        scores = tl.dot(rest, tl.trans(chunk_rest), scores, input_precision=PRECISION)
        if MASKED:
            scores = tl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
        m, z, keep, p = _softmax(m, z, scores, factor)
        p = p.to(rows.dtype)
        if V < P:
            chunk = _part(from_chunk, j, turn * V + tl.arange(0, V), there, D, D >= P, not MASKED)
            chunk_rest = _part(from_chunk, j, P + turn * W + tl.arange(0, W), there, D, D == P + R, not MASKED)
        acc = tl.dot(p, chunk, acc * keep[:, None], input_precision=PRECISION)
        acc_rest = tl.dot(p, chunk_rest, acc_rest * keep[:, None], input_precision=PRECISION)
    return m, z, acc, acc_rest, total_m, total_z, total, total_rest


@triton.jit
def _finished(acc, z):
    return acc / tl.where(z == 0.0, 1.0, z)[:, None]


@triton.jit
def _walk_spans(
    rows, rest, m, z, acc, acc_rest, v, items, first, count, key, turn, taken, position, last, factor,
    D: tl.constexpr, P: tl.constexpr, R: tl.constexpr, V: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What comes of all spans of `count` items, the first of which begins at this key. m, z, acc, acc_rest: empty."""
    # Rows of one sequence and chunks that follow one another: all lanes see the first ones whole.
    least = tl.min(tl.where(taken, position, 0x7FFFFFFF), 0)
    high = tl.minimum(tl.maximum((least + 1 - key) // 64, 0), count)
    total_m, total_z, total, total_rest = m, z, acc, acc_rest
    m, z, acc, acc_rest, total_m, total_z, total, total_rest = _walk_chunks(
        rows, rest, m, z, acc, acc_rest, total_m, total_z, total, total_rest, v, items, first, first + high, turn,
        position, last, factor, D, P, R, V, K, SPAN, False, True, PRECISION,
    )  # fmt: skip
    m, z, acc, acc_rest, total_m, total_z, total, total_rest = _walk_chunks(
        rows, rest, m, z, acc, acc_rest, total_m, total_z, total, total_rest, v, items, first + high, first + count,
        turn, position, last, factor, D, P, R, V, K, SPAN, True, True, PRECISION,
    )  # fmt: skip
    _, _, total_rest = _merge(total_m, total_z, total_rest, m, z, acc_rest)
    _, total_z, total = _merge(total_m, total_z, total, m, z, acc)
    return _finished(total, total_z), _finished(total_rest, total_z)


@triton.jit
def _walk_span(
    rows, rest, m, z, v, items, first, count, position, last, factor, acc_of, m_of, z_of, state, kept,
    D: tl.constexpr, P: tl.constexpr, R: tl.constexpr, V: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr,
    SPAN: tl.constexpr, RESUME: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Leaves the states of lanes `kept` behind `count` items of one span, at `state` of acc_of, m_of and z_of."""
    W: tl.constexpr = R * V // P
    if RESUME:
        m = tl.load(m_of + state, mask=kept, other=float("-inf"))
        z = tl.load(z_of + state, mask=kept, other=0.0)
    # Every pass has the same m and z.
    for turn in range(0, P // V):
        column, column_rest = turn * V + tl.arange(0, V), P + turn * W + tl.arange(0, W)
        into, into_rest = (
            acc_of + state[:, None] * D + column[None, :],
            acc_of + state[:, None] * D + column_rest[None, :],
        )
        there, there_rest = kept[:, None] & (column < D)[None, :], kept[:, None] & (column_rest < D)[None, :]
        acc, acc_rest = tl.zeros((LANES, V), tl.float32), tl.zeros((LANES, W), tl.float32)
        if RESUME:
            acc = tl.load(into, mask=there, other=0.0)
            acc_rest = tl.load(into_rest, mask=there_rest, other=0.0)
        new_m, new_z, acc, acc_rest, _, _, _, _ = _walk_chunks(
            rows, rest, m, z, acc, acc_rest, m, z, acc, acc_rest, v, items, first, first + count, turn, position, last,
            factor, D, P, R, V, K, SPAN, True, False, PRECISION,
        )  # fmt: skip
        if turn == P // V - 1:
            tl.store(m_of + state, new_m, mask=kept)
            tl.store(z_of + state, new_z, mask=kept)
        tl.store(into, acc, mask=there)
        tl.store(into_rest, acc_rest, mask=there_rest)


@triton.jit
def walk(
    q, v, items, tasks, count, positions, bases, acc_of, m_of, z_of, out, factor, q_stride,
    HEADS: tl.constexpr, PART: tl.constexpr, D: tl.constexpr, P: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    K: tl.constexpr, LANES: tl.constexpr, SPAN: tl.constexpr, SPLIT: tl.constexpr, RESUME: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """attention_kernels.walk of one KV head whose keys are its values, v [slots, 1, 64, D], without windows, bias, caps
    and sinks. program_id(1): PART of the query heads, and of flash tasks V of the P columns and as large a share of the
    others."""
    if SPLIT:
        for number in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
            _walk_task(
                q, v, items, tasks + 4 * number, positions, bases, acc_of, m_of, z_of, out, factor, q_stride,
                HEADS, PART, D, P, R, V, K, LANES, SPAN, True, RESUME, PRECISION,
            )  # fmt: skip
    elif tl.program_id(0) < tl.load(count):
        _walk_task(
            q, v, items, tasks + 4 * tl.program_id(0), positions, bases, acc_of, m_of, z_of, out, factor, q_stride,
            HEADS, PART, D, P, R, V, K, LANES, SPAN, False, False, PRECISION,
        )  # fmt: skip


@triton.jit
def _walk_task(
    q, v, items, task, positions, bases, acc_of, m_of, z_of, out, factor, q_stride,
    HEADS: tl.constexpr, PART: tl.constexpr, D: tl.constexpr, P: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    K: tl.constexpr, LANES: tl.constexpr, SPAN: tl.constexpr, SPLIT: tl.constexpr, RESUME: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = 1 if SPLIT else P // V
    W: tl.constexpr = R * V // P
    part, turn = tl.program_id(1) // COLUMNS, tl.program_id(1) % COLUMNS
    begin, end, first, count = tl.load(task), tl.load(task + 1), tl.load(task + 2), tl.load(task + 3)
    lane, d, r = tl.arange(0, LANES), tl.arange(0, P), P + tl.arange(0, R)
    row, head = begin + lane // PART, part * PART + lane % PART
    taken = (row < end) & (head < HEADS)
    # Lanes without a head take one that there is.
    head = head if HEADS % PART == 0 else tl.minimum(head, HEADS - 1)
    position = tl.load(positions + row, mask=taken, other=-1)
    last = tl.max(position, 0)  # behind lies what nobody has written yet
    from_rows = q + row.to(tl.int64)[:, None] * q_stride + (head * D)[:, None]
    rows = tl.load(from_rows + d[None, :], mask=taken[:, None] & (d < D)[None, :], other=0.0)
    rest = tl.load(from_rows + r[None, :], mask=taken[:, None] & (r < D)[None, :], other=0.0)
    key = tl.load(items + 4 * first + 1, mask=count > 0, other=0)
    m, z = tl.full((LANES,), float("-inf"), tl.float32), tl.zeros((LANES,), tl.float32)
    if SPLIT:
        kept = taken & (position >= key // SPAN * SPAN)  # rows before the span have no state there
        state = (tl.load(bases + row, mask=kept, other=0).to(tl.int64) + key // SPAN) * HEADS + head
        _walk_span(
            rows, rest, m, z, v, items, first, count, position, last, factor, acc_of, m_of, z_of, state, kept,
            D, P, R, V, K, LANES, SPAN, RESUME, PRECISION,
        )  # fmt: skip
    else:
        acc, acc_rest = tl.zeros((LANES, V), tl.float32), tl.zeros((LANES, W), tl.float32)
        made, made_rest = _walk_spans(
            rows, rest, m, z, acc, acc_rest, v, items, first, count, key, turn, taken, position, last, factor,
            D, P, R, V, K, SPAN, PRECISION,
        )  # fmt: skip
        into = out + (row.to(tl.int64) * HEADS + head)[:, None] * D
        column, column_rest = turn * V + tl.arange(0, V), P + turn * W + tl.arange(0, W)
        tl.store(into + column[None, :], made.to(out.dtype.element_ty), mask=taken[:, None] & (column < D)[None, :])
        there = taken[:, None] & (column_rest < D)[None, :]
        tl.store(into + column_rest[None, :], made_rest.to(out.dtype.element_ty), mask=there)


@triton.jit
def store(v_new, v, slots, offsets, v_stride, D: tl.constexpr, P: tl.constexpr):
    """A row's value of one KV head, rows v_stride apart, into the pool (see walk): key offsets[t] of chunk slots[t];
    none of a negative slot."""
    row = tl.program_id(0).to(tl.int64)
    slot, offset = tl.load(slots + row).to(tl.int64), tl.load(offsets + row)
    if slot < 0:
        return
    d = tl.arange(0, P)
    fits = d < D
    tl.store(v + slot * (64 * D) + offset * D + d, tl.load(v_new + row * v_stride + d, mask=fits), mask=fits)
