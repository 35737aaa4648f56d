"""Attention over chunks on a Hopper GPU, in Gluon: the tasks of `attention_kernels.walk`, with the same bits.

One warp copies chunks into a ring of shared memory (TMA), ahead of the warp groups that compute; barriers say which
stage is full and which is free (FlashAttention-3, arXiv 2407.08608). See attention_kernels for the order of sums,
names and shapes. 16-bit types, D 64 or 128, all query heads of a KV head in one task; no bias, no soft cap.

A ring is (k_ring [S, D, 64], v_ring [S, 64, D], k_full, v_full, free [S]); a state is (m [64], z [64], acc [64, D]).
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name until Triton 3.6


@gluon.constexpr_function
def _lanes(width):
    """How a warp group holds a product [64, width]: every row in one quarter of a warp."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 16])


@gluon.constexpr_function
def _rows_of(dim):
    """How a warp group holds rows [64, dim] on their way from or to memory."""
    return gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [4, 1], [1, 0])


@gluon.jit
def _weights(m, m2):
    """(m, keep, take, empty) of a merge: how much is taken of either side, and whether the second one holds nothing."""
    new = gl.maximum(m, m2)
    base = gl.where(new == float("-inf"), 0.0, new)
    return new, gl.exp2(m - base), gl.exp2(m2 - base), m2 == float("-inf")


@gluon.jit
def _merge(one, two, D: gl.constexpr):
    """See attention_kernels._merge."""
    m, z, acc = one
    m2, z2, acc2 = two
    new, keep, take, empty = _weights(m, m2)
    WIDE: gl.constexpr = gl.SliceLayout(1, _lanes(D))
    keep_wide = gl.convert_layout(keep, WIDE)[:, None].broadcast_to(acc.shape)
    take_wide = gl.convert_layout(take, WIDE)[:, None]
    merged = gl.fma(acc, keep_wide, acc2 * take_wide)
    return (
        new,
        gl.where(empty, z, gl.fma(z, keep, z2 * take)),
        gl.where(gl.convert_layout(empty, WIDE)[:, None], acc, merged),
    )


@gluon.jit
def _softmax(scores, m, z, key, position, window, factor, MASKED: gl.constexpr, WINDOW: gl.constexpr):
    """(p [64, 64], m, z, keep): of one chunk's scores, and how much of what came before is kept."""
    if MASKED:
        keys = key + gl.arange(0, 64, layout=gl.SliceLayout(0, scores.type.layout))
        seen = keys[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (keys[None, :] > position[:, None] - window)
        scores = gl.where(seen, scores, float("-inf"))
    new = gl.maximum(m, gl.max(scores, 1) * factor)
    base = gl.where(new == float("-inf"), 0.0, new)
    keep = gl.exp2(m - base)
    unit = gl.full(scores.shape, 1.0, gl.float32, scores.type.layout)
    p = gl.exp2(gl.fma(scores, unit * factor, (-base)[:, None].broadcast_to(scores.shape)))
    return p, new, gl.fma(z, keep, gl.sum(p, 1)), keep


@gluon.jit
def _rescaled(acc, keep, D: gl.constexpr):
    return acc * gl.convert_layout(keep, gl.SliceLayout(1, _lanes(D)))[:, None]


@gluon.jit
def _operand(p, dtype: gl.constexpr, D: gl.constexpr):
    """p [64, 64] rounded, in the registers from which a product takes it."""
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, _lanes(D), 2))


@gluon.jit
def _scores(rows, k_ring, stage):
    """Scores [64, 64] under way."""
    return warpgroup_mma(
        rows, k_ring.index(stage), gl.zeros([64, 64], gl.float32, _lanes(64)), use_acc=False, is_async=True
    )


@gluon.jit
def _forget_unwritten(values, there, D: gl.constexpr):
    """Values [64, D] from the `there`-th on become 0: nobody has written them yet, and 0 times NaN is NaN."""
    if there < 64:
        j = gl.arange(0, 64, layout=gl.SliceLayout(1, _rows_of(D)))
        v = values.load(_rows_of(D))
        values.store(gl.where((j < there)[:, None], v, 0.0))
        fence_async_shared()


@gluon.jit
def _load_rows(q, begin, end, kv_head, q_stride, first_lane, GROUP: gl.constexpr, D: gl.constexpr):
    """q [64, D] of the lanes from first_lane on."""
    lane = first_lane + gl.arange(0, 64, layout=gl.SliceLayout(1, _rows_of(D)))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, _rows_of(D)))
    row, head = begin + lane // GROUP, kv_head * GROUP + lane % GROUP
    at = q + row.to(gl.int64)[:, None] * q_stride + (head * D)[:, None] + d[None, :]
    return gl.load(at, mask=(row < end)[:, None], other=0.0)


@gluon.jit
def _make_ring(k_desc, v_desc, READERS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, D, 64], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 64, D], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=READERS)
    return k_ring, v_ring, k_full, v_full, free


@gluon.jit
def _copy_keys(k_desc, number, ring, stage, D: gl.constexpr):
    """Keys of one KV head of a chunk, its `number` counted over all slots, on their way into the ring."""
    k_ring, _, k_full, _, _ = ring
    mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
    async_load(k_desc, [number * D, 0], k_full.index(stage), k_ring.index(stage))


@gluon.jit
def _copy_values(v_desc, number, ring, stage):
    _, v_ring, _, v_full, _ = ring
    mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
    async_load(v_desc, [number * 64, 0], v_full.index(stage), v_ring.index(stage))


@gluon.jit
def _flash_copy(
    k_desc, v_desc, items, first, count, kv_head, ring, KV_HEADS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr
):
    """Copies the chunks of a task. The values of one are freed with the keys of the next, and come with those after."""
    _, _, _, _, free = ring
    slot = gl.load(items + 4 * first)
    number_before = 0  # no other name's value: Triton would take it for one that the loop leaves as it is
    for i in range(0, count + 1):
        stage, before = i % STAGES, (i + STAGES - 1) % STAGES
        number = slot * KV_HEADS + kv_head
        slot = gl.load(items + 4 * (first + gl.minimum(i + 1, count - 1)))
        mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
        if i < count:
            _copy_keys(k_desc, number, ring, stage, D)
        if i > 0:
            _copy_values(v_desc, number_before, ring, before)
        number_before = number


@gluon.jit
def _flash_steps(
    begin, end, many, p, keep, state, total, key0, position, factor, rows, ring,
    D: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Chunks begin .. end-1 of a task of `many`: the scores of each are computed beside the rescaling, and its softmax
    beside the product of the values of the one before."""
    k_ring, v_ring, k_full, v_full, free = ring
    m, z, acc = state
    for i in range(begin, end):
        before, after = i - 1, i + 1
        scores_ = _scores(rows, k_ring, i % STAGES)
        acc = _rescaled(acc, keep, D)
        mbarrier.wait(v_full.index(before % STAGES), (before // STAGES) & 1)
        acc_ = warpgroup_mma(p, v_ring.index(before % STAGES), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores_])
        key = key0 + 64 * i
        fresh = key % SPAN == 0
        old_m, old_z = m, z
        m = gl.where(fresh, float("-inf"), m)
        fine, m, z, keep = _softmax(scores, m, z, key, position, 0, factor, MASKED, False)
        p = _operand(fine, p.dtype, D)
        # Here, because the assembler moves a softmax behind the next wait for a product unless a branch lies between.
        mbarrier.wait(k_full.index(after % STAGES), (after // STAGES) & 1, pred=after < many)
        acc = warpgroup_mma_wait(0, deps=[acc_])
        mbarrier.arrive(free.index(i % STAGES))
        if fresh:
            total = _merge(total, (old_m, old_z, acc), D)
    return p, keep, (m, z, acc), total


@gluon.jit
def _flash_lanes(
    out, positions, sinks, begin, end, key0, count, kv_head, factor, rows, ring, FIRST_LANE: gl.constexpr,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr,
    SINKS: gl.constexpr,
):  # fmt: skip
    """A task for 64 of its lanes, by one warp group."""
    k_ring, v_ring, k_full, v_full, free = ring
    GROUP: gl.constexpr = HEADS // KV_HEADS
    row = begin + (FIRST_LANE + gl.arange(0, 64, layout=gl.SliceLayout(1, _lanes(64)))) // GROUP
    taken = row < end
    # Lanes without a row see everything: a group that stopped before the other would keep the ring from being freed.
    position = gl.load(positions + row, mask=taken, other=1 << 30)
    many = gl.minimum(count, (gl.max(position, 0) - key0) // 64 + 1)
    full = gl.minimum(gl.maximum((gl.min(position, 0) - key0 + 1) // 64, 1), many)
    m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, _lanes(64)))
    z = gl.zeros([64], gl.float32, gl.SliceLayout(1, _lanes(64)))
    acc = gl.zeros([64, D], gl.float32, _lanes(D))
    total = (m, z, acc)

    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma_wait(0, deps=[_scores(rows, k_ring, 0)])
    mbarrier.wait(k_full.index(1 % STAGES), 0, pred=many > 1)
    p, m, z, keep = _softmax(scores, m, z, key0, position, 0, factor, True, False)
    mbarrier.arrive(free.index(0))
    p = _operand(p, out.dtype.element_ty, D)
    p, keep, state, total = _flash_steps(
        1, full, many, p, keep, (m, z, acc), total, key0, position, factor, rows, ring, D, SPAN, STAGES, False
    )
    p, keep, state, total = _flash_steps(
        full, many, many, p, keep, state, total, key0, position, factor, rows, ring, D, SPAN, STAGES, True
    )
    m, z, acc = state
    before = many - 1
    mbarrier.wait(v_full.index(before % STAGES), (before // STAGES) & 1)
    values = v_ring.index(before % STAGES)
    _forget_unwritten(values, gl.load(positions + end - 1) + 1 - (key0 + 64 * before), D)
    acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, values, _rescaled(acc, keep, D), is_async=True)])
    m, z, acc = _merge(total, (m, z, acc), D)
    if SINKS:
        lane = FIRST_LANE + gl.arange(0, 64, layout=gl.SliceLayout(1, _lanes(64)))
        sink = gl.load(sinks + kv_head * GROUP + lane % GROUP)
        log2_e = gl.full(sink.shape, 1.4426950408889634, gl.float32, gl.SliceLayout(1, _lanes(64)))
        z = gl.where(z > 0.0, z + gl.exp2(gl.fma(sink, log2_e, -m)), z)
    result = acc / gl.convert_layout(gl.where(z == 0.0, 1.0, z), gl.SliceLayout(1, _lanes(D)))[:, None]
    result = gl.convert_layout(result.to(out.dtype.element_ty), _rows_of(D))
    lane = FIRST_LANE + gl.arange(0, 64, layout=gl.SliceLayout(1, _rows_of(D)))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, _rows_of(D)))
    row, head = begin + lane // GROUP, kv_head * GROUP + lane % GROUP
    at = out + (row.to(gl.int64) * HEADS + head)[:, None] * D + d[None, :]
    gl.store(at, result, mask=(row < end)[:, None])


@gluon.jit
def flash(
    q, k_desc, v_desc, items, tasks, count, positions, sinks, out, factor, q_stride,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr,
    SINKS: gl.constexpr,
):  # fmt: skip
    """Task program_id(0) of count[0], of KV head program_id(1), by two warp groups of 64 lanes each. q [R, HEADS, D],
    rows q_stride apart; k_desc: blocks [D, 64] of the keys of all slots and KV heads, v_desc: blocks [64, D]; out
    [R, HEADS, D]."""
    if gl.program_id(0) >= gl.load(count):
        return
    task = tasks + 4 * gl.program_id(0)
    kv_head = gl.program_id(1)
    begin, end, first, many = gl.load(task), gl.load(task + 1), gl.load(task + 2), gl.load(task + 3)
    key0 = gl.load(items + 4 * first + 1)
    GROUP: gl.constexpr = HEADS // KV_HEADS
    ring = _make_ring(k_desc, v_desc, 2, D, STAGES)
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = q.dtype.element_ty
    one = gl.allocate_shared_memory(dtype, [64, D], ROWS, _load_rows(q, begin, end, kv_head, q_stride, 0, GROUP, D))
    two = gl.allocate_shared_memory(dtype, [64, D], ROWS, _load_rows(q, begin, end, kv_head, q_stride, 64, GROUP, D))
    fence_async_shared()
    gl.warp_specialize([
        (_flash_lanes, (out, positions, sinks, begin, end, key0, many, kv_head, factor, one, ring, 0, HEADS, KV_HEADS,
                        D, SPAN, STAGES, SINKS)),
        (_flash_lanes, (out, positions, sinks, begin, end, key0, many, kv_head, factor, two, ring, 64, HEADS, KV_HEADS,
                        D, SPAN, STAGES, SINKS)),
        (_flash_copy, (k_desc, v_desc, items, first, many, kv_head, ring, KV_HEADS, D, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def _split_copy(
    k_desc, v_desc, items, tasks, count, kv_head, ring,
    KV_HEADS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies the chunks of every num_programs(0)-th task, one task after another."""
    _, _, _, _, free = ring
    copied = 0
    for number in range(gl.program_id(0), count, gl.num_programs(0)):
        first, many = gl.load(tasks + 4 * number + 2), gl.load(tasks + 4 * number + 3)
        for i in range(first, first + many):
            chunk = gl.load(items + 4 * i) * KV_HEADS + kv_head
            stage = copied % STAGES
            mbarrier.wait(free.index(stage), ((copied // STAGES) & 1) ^ 1)
            _copy_keys(k_desc, chunk, ring, stage, D)
            _copy_values(v_desc, chunk, ring, stage)
            copied += 1


@gluon.jit
def _split_lanes(
    q, items, tasks, count, positions, bases, acc_of, m_of, z_of, factor, q_stride, window, kv_head, rows, ring,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr,
    RESUME: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Every num_programs(0)-th task, by one warp group."""
    k_ring, v_ring, k_full, v_full, free = ring
    GROUP: gl.constexpr = HEADS // KV_HEADS
    WIDE: gl.constexpr = gl.SliceLayout(1, _lanes(D))
    lane = gl.arange(0, 64, layout=gl.SliceLayout(1, _lanes(64)))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, _lanes(D)))
    taken_chunks = 0
    for number in range(gl.program_id(0), count, gl.num_programs(0)):
        task = tasks + 4 * number
        begin, end, first, many = gl.load(task), gl.load(task + 1), gl.load(task + 2), gl.load(task + 3)
        rows.store(_load_rows(q, begin, end, kv_head, q_stride, 0, GROUP, D))
        fence_async_shared()
        row = begin + lane // GROUP
        taken = row < end
        position = gl.load(positions + row, mask=taken, other=-1)
        written = gl.max(position, 0) + 1
        key0 = gl.load(items + 4 * first + 1)
        kept = taken & (position >= key0 // SPAN * SPAN)  # rows before the span have no state there
        state = gl.load(bases + row, mask=kept, other=0).to(gl.int64) + key0 // SPAN
        state = state * HEADS + kv_head * GROUP + lane % GROUP
        acc_at = acc_of + (gl.convert_layout(state, WIDE) * D)[:, None] + d[None, :]
        all_of = gl.convert_layout(kept, WIDE)[:, None]
        m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, _lanes(64)))
        z = gl.zeros([64], gl.float32, gl.SliceLayout(1, _lanes(64)))
        acc = gl.zeros([64, D], gl.float32, _lanes(D))
        if RESUME:
            m = gl.load(m_of + state, mask=kept, other=float("-inf"))
            z = gl.load(z_of + state, mask=kept, other=0.0)
            acc = gl.load(acc_at, mask=all_of, other=0.0)
        for i in range(0, many):
            stage, phase = taken_chunks % STAGES, (taken_chunks // STAGES) & 1
            key = key0 + 64 * i
            mbarrier.wait(k_full.index(stage), phase)
            scores = warpgroup_mma_wait(0, deps=[_scores(rows, k_ring, stage)])
            p, m, z, keep = _softmax(scores, m, z, key, position, window, factor, True, WINDOW)
            p, acc = _operand(p, q.dtype.element_ty, D), _rescaled(acc, keep, D)
            mbarrier.wait(v_full.index(stage), phase)
            values = v_ring.index(stage)
            _forget_unwritten(values, written - key, D)
            acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, values, acc, is_async=True)])
            mbarrier.arrive(free.index(stage))
            taken_chunks += 1
        gl.store(m_of + state, m, mask=kept)
        gl.store(z_of + state, z, mask=kept)
        gl.store(acc_at, acc, mask=all_of)


@gluon.jit
def split(
    q, k_desc, v_desc, items, tasks, count, positions, bases, acc_of, m_of, z_of, factor, q_stride, window,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr,
    RESUME: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Every num_programs(0)-th of count[0] tasks of one span, of KV head program_id(1). See attention_kernels.walk."""
    kv_head = gl.program_id(1)
    many = gl.load(count)
    ring = _make_ring(k_desc, v_desc, 1, D, STAGES)
    rows = gl.allocate_shared_memory(q.dtype.element_ty, [64, D], gl.NVMMASharedLayout(128, 16, 2))
    fence_async_shared()
    gl.warp_specialize([
        (_split_lanes, (q, items, tasks, many, positions, bases, acc_of, m_of, z_of, factor, q_stride, window, kv_head,
                        rows, ring, HEADS, KV_HEADS, D, SPAN, STAGES, RESUME, WINDOW)),
        (_split_copy, (k_desc, v_desc, items, tasks, many, kv_head, ring, KV_HEADS, D, STAGES)),
    ], [1], [24])  # fmt: skip
