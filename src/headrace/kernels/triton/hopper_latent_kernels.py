"""Attention over chunks whose keys are their values (latent attention, MLA) on a Hopper GPU, in Gluon: the tasks of
latent_kernels.walk, with bits of their own.

Both warp groups of a program have all 64 lanes of a task: each makes the scores of half of a chunk's keys and sums up
half of the values' columns, so that a chunk's scores are made once. Probabilities go from one to the other through
shared memory, as in FlashMLA (DeepSeek, 2025). Chunks are copied by the GPU itself (TMA), one ahead of the one that is
computed, also from task to task. Inside a span a lane keeps a running maximum as in attention_kernels, for 64 keys at a
time; what a warp group has of a row's sum of probabilities is added to what the other one has.

D, a head's size, is P + R; 16-bit types. A ring is (p_ring [2, 64, P], r_ring [2, 64, R], full [2]); a state is
(m [64], z [64], acc [64, P], acc_rest [64, R]).
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headrace.kernels.triton.hopper_kernels import _softmax, _weights, async_load

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name until Triton 3.6


@gluon.constexpr_function
def _product(width):
    """How the warp groups hold a product [64, width]: half of its columns each."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, width // 2, 16])


@gluon.constexpr_function
def _rows_of(width):
    """How they hold rows [64, width] on their way from memory."""
    across = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [8, 1], [1, 0])


@gluon.constexpr_function
def _swizzled():
    return gl.NVMMASharedLayout(128, 16, 2)


@gluon.jit
def _copy(v_desc, r_desc, slot, ring, stage, P: gl.constexpr):
    """A chunk on its way into the ring."""
    p_ring, r_ring, full = ring
    mbarrier.expect(full.index(stage), v_desc.block_type.nbytes + r_desc.block_type.nbytes)
    async_load(v_desc, [slot * 64, 0], full.index(stage), p_ring.index(stage))
    async_load(r_desc, [slot * 64, P], full.index(stage), r_ring.index(stage))


@gluon.jit
def _forget_unwritten(values, there, W: gl.constexpr):
    """Keys from the `there`-th on become 0: nobody has written them yet, and 0 times NaN is NaN."""
    j = gl.arange(0, 64, layout=gl.SliceLayout(1, _rows_of(64)))
    for column in gl.static_range(0, W, 64):  # few at a time: registers hold the sums
        some = values.slice(column, 64, dim=1)
        some.store(gl.where((j < there)[:, None], some.load(_rows_of(64)), 0.0))


@gluon.jit
def _load_rows(q, begin, end, part, q_stride, first, HEADS: gl.constexpr, PART: gl.constexpr, D: gl.constexpr,
               W: gl.constexpr):  # fmt: skip
    """Columns `first` and on [64, W] of the queries of all lanes."""
    lane = gl.arange(0, 64, layout=gl.SliceLayout(1, _rows_of(W)))
    d = first + gl.arange(0, W, layout=gl.SliceLayout(0, _rows_of(W)))
    row, head = begin + lane // PART, part * PART + lane % PART
    at = q + row.to(gl.int64)[:, None] * q_stride + (head * D)[:, None] + d[None, :]
    return gl.load(at, mask=((row < end) & (head < HEADS))[:, None], other=0.0)


@gluon.jit
def _columns(lane_at, first, W: gl.constexpr):
    """Places of columns `first` and on [64, W] of what begins at lane_at [64] for each lane."""
    return (
        gl.convert_layout(lane_at, gl.SliceLayout(1, _product(W)))[:, None]
        + (first + gl.arange(0, W, layout=gl.SliceLayout(0, _product(W))))[None, :]
    )


@gluon.jit
def _halves(x):
    """Columns [64, W / 2] of each half of every warp group's share of x [64, W], without moving any."""
    W: gl.constexpr = x.shape[1]
    one, two = x.reshape([64, 2, 2, W // 4]).permute([0, 1, 3, 2]).split()
    return one.reshape([64, W // 2]), two.reshape([64, W // 2])


@gluon.jit
def _beside(x, like):
    """x [64], one number for each lane, beside columns."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None].broadcast_to(like.shape)


@gluon.jit
def _merged(total, acc, keep, take, empty):
    """See attention_kernels._merge."""
    both = gl.fma(total, _beside(keep, total), acc * _beside(take, acc))
    return gl.where(_beside(empty, acc), total, both)


@gluon.jit
def _fold_columns(at, acc, keep, take, empty, begun):
    """Sums of a state, merged with those `at`; in parts, since registers hold the rest."""
    if acc.shape[1] > 64:
        one, two = _halves(acc)
        at_one, at_two = _halves(at)
        _fold_columns(at_one, one, keep, take, empty, begun)
        _fold_columns(at_two, two, keep, take, empty, begun)
    else:
        gl.store(at, _merged(gl.load(at, mask=begun, other=0.0), acc, keep, take, empty))


@gluon.jit
def _fold(total_m, total_z, state, totals, begun, P: gl.constexpr, R: gl.constexpr):
    """(m, z) of what precedes a state merged with it, and its sums, at totals [64] for each lane; begun: they hold
    some already."""
    m, z, acc, acc_rest = state
    new, keep, take, empty = _weights(total_m, m)
    _fold_columns(_columns(totals, 0, P), acc, keep, take, empty, begun)
    _fold_columns(_columns(totals, P, R), acc_rest, keep, take, empty, begun)
    return new, gl.where(empty, total_z, gl.fma(total_z, keep, z * take))


@gluon.jit
def _finish_columns(at, into, acc, keep, take, empty, z, begun, kept):
    if acc.shape[1] > 64:
        one, two = _halves(acc)
        at_one, at_two = _halves(at)
        into_one, into_two = _halves(into)
        _finish_columns(at_one, into_one, one, keep, take, empty, z, begun, kept)
        _finish_columns(at_two, into_two, two, keep, take, empty, z, begun, kept)
    else:
        made = _merged(gl.load(at, mask=begun, other=0.0), acc, keep, take, empty) / _beside(z, acc)
        gl.store(into, made.to(into.dtype.element_ty), mask=_beside(kept, acc))


@gluon.jit
def _finish(total_m, total_z, state, totals, begun, into, kept, P: gl.constexpr, R: gl.constexpr):
    """What comes of all spans, at `into` [64] for each lane that is `kept`."""
    m, z, acc, acc_rest = state
    _, keep, take, empty = _weights(total_m, m)
    z = gl.where(empty, total_z, gl.fma(total_z, keep, z * take))
    z = gl.where(z == 0.0, 1.0, z)
    _finish_columns(_columns(totals, 0, P), _columns(into, 0, P), acc, keep, take, empty, z, begun, kept)
    _finish_columns(_columns(totals, P, R), _columns(into, P, R), acc_rest, keep, take, empty, z, begun, kept)


@gluon.jit
def _attend(rows, rest, shared, values, values_rest, there, state, key, position, factor, P: gl.constexpr,
            R: gl.constexpr):  # fmt: skip
    """The state after a chunk, of which the first `there` keys have been written. rows [64, P], rest [64, R]: of
    queries; shared [64, 64]: where probabilities are left for both groups."""
    m, z, acc, acc_rest = state
    if there < 64:
        _forget_unwritten(values, there, P)
        _forget_unwritten(values_rest, there, R)
        fence_async_shared()
        barrier()
    zeros = gl.zeros([64, 64], gl.float32, _product(64))
    scores = warpgroup_mma(rows, values.permute([1, 0]), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma(rest, values_rest.permute([1, 0]), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    p, m, z, keep = _softmax(scores, m, z, key, position, 0, factor, True, False)
    shared.store(p.to(shared.dtype))
    fence_async_shared()
    acc, acc_rest = acc * _beside(keep, acc), acc_rest * _beside(keep, acc_rest)
    acc_ = warpgroup_mma(shared, values, acc, is_async=True)
    rest_ = warpgroup_mma(shared, values_rest, acc_rest, is_async=True)
    acc, acc_rest = warpgroup_mma_wait(0, deps=[acc_, rest_])
    return m, z, acc, acc_rest


@gluon.jit
def _resumed(acc_of, m_of, z_of, state, kept, P: gl.constexpr, R: gl.constexpr):
    """The states of lanes that are `kept`, which lie at `state` [64]."""
    m = gl.load(m_of + state, mask=kept, other=float("-inf"))
    z = gl.load(z_of + state, mask=kept, other=0.0)
    at, at_rest = _columns(acc_of + state * (P + R), 0, P), _columns(acc_of + state * (P + R), P, R)
    acc = gl.load(at, mask=_beside(kept, at), other=0.0)
    return m, z, acc, gl.load(at_rest, mask=_beside(kept, at_rest), other=0.0)


@gluon.jit
def _leave(acc_of, m_of, z_of, state, kept, left, P: gl.constexpr, R: gl.constexpr):
    m, z, acc, acc_rest = left
    gl.store(m_of + state, m, mask=kept)
    gl.store(z_of + state, z, mask=kept)
    gl.store(_columns(acc_of + state * (P + R), 0, P), acc, mask=_beside(kept, acc))
    gl.store(_columns(acc_of + state * (P + R), P, R), acc_rest, mask=_beside(kept, acc_rest))


@gluon.jit
def _walk_task(
    q, v_desc, r_desc, items, task, after, follows, copied, positions, bases, acc_of, m_of, z_of, totals, out, factor,
    q_stride, part, rows, rest, shared, ring, HEADS: gl.constexpr, PART: gl.constexpr, P: gl.constexpr,
    R: gl.constexpr, SPAN: gl.constexpr, SPLIT: gl.constexpr, RESUME: gl.constexpr,
):  # fmt: skip
    """A task whose first chunk is chunk number `copied` of the program, on its way; that number of the one behind it,
    which is on its way then if a task `follows`, from item `after` on."""
    LANES: gl.constexpr = gl.SliceLayout(1, _product(64))
    p_ring, r_ring, full = ring
    begin, end, first, many = gl.load(task), gl.load(task + 1), gl.load(task + 2), gl.load(task + 3)
    # One item ahead: the chunk's address is known before its turn to be copied.
    slot = gl.load(items + 4 * gl.where(many > 1, first + 1, after))
    key0 = gl.load(items + 4 * first + 1)
    rows.store(_load_rows(q, begin, end, part, q_stride, 0, HEADS, PART, P + R, P))
    rest.store(_load_rows(q, begin, end, part, q_stride, P, HEADS, PART, P + R, R))
    fence_async_shared()
    lane = gl.arange(0, 64, layout=LANES)
    row, head = begin + lane // PART, part * PART + lane % PART
    taken = (row < end) & (head < HEADS)
    position = gl.load(positions + row, mask=taken, other=-1)
    written = gl.max(position, 0) + 1
    none, nothing = gl.full([64], float("-inf"), gl.float32, LANES), gl.zeros([64], gl.float32, LANES)
    state = none, nothing, gl.zeros([64, P], gl.float32, _product(P)), gl.zeros([64, R], gl.float32, _product(R))
    if SPLIT:
        kept = taken & (position >= key0 // SPAN * SPAN)  # rows before the span have no state there
        at = (gl.load(bases + row, mask=kept, other=0).to(gl.int64) + key0 // SPAN) * HEADS + head
        if RESUME:
            state = _resumed(acc_of, m_of, z_of, at, kept, P, R)
    total_m, total_z, begun = none, nothing, False
    for i in range(0, many):
        stage, key = copied % 2, key0 + 64 * i
        if not SPLIT:  # noqa: SIM102 (this one is decided when the kernel is compiled)
            if (i > 0) & (key % SPAN == 0):
                total_m, total_z = _fold(total_m, total_z, state, totals, begun, P, R)
                state, begun = (none, state[1], state[2], state[3]), True
        mbarrier.wait(full.index(stage), (copied // 2) & 1)
        if (i + 1 < many) | follows:
            _copy(v_desc, r_desc, slot, ring, 1 - stage, P)
        slot = gl.load(items + 4 * gl.where(i + 2 < many, first + i + 2, after))
        state = _attend(
            rows, rest, shared, p_ring.index(stage), r_ring.index(stage), written - key, state, key, position, factor,
            P, R,
        )  # fmt: skip
        copied += 1
    if SPLIT:
        _leave(acc_of, m_of, z_of, at, kept, state, P, R)
    else:
        into = out + (row.to(gl.int64) * HEADS + head) * (P + R)
        _finish(total_m, total_z, state, totals, begun, into, taken, P, R)
    return copied


@gluon.jit
def walk_latents(
    q, v_desc, r_desc, items, tasks, count, positions, bases, acc_of, m_of, z_of, totals, out, factor, q_stride,
    HEADS: gl.constexpr, PART: gl.constexpr, P: gl.constexpr, R: gl.constexpr, SPAN: gl.constexpr,
    SPLIT: gl.constexpr, RESUME: gl.constexpr,
):  # fmt: skip
    """Every num_programs(0)-th of count[0] tasks, of PART query heads, number program_id(1). v_desc, r_desc: blocks of
    P and of R columns of all chunks' values. See latent_kernels.walk; totals fp32 [programs, 64, D]: of flash tasks."""
    many, part, step = gl.load(count), gl.program_id(1), gl.num_programs(0)
    if gl.program_id(0) >= many:
        return
    dtype: gl.constexpr = q.dtype.element_ty
    p_ring = gl.allocate_shared_memory(dtype, [2, 64, P], _swizzled())
    r_ring = gl.allocate_shared_memory(dtype, [2, 64, R], _swizzled())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    rows = gl.allocate_shared_memory(dtype, [64, P], _swizzled())
    rest = gl.allocate_shared_memory(dtype, [64, R], _swizzled())
    shared = gl.allocate_shared_memory(dtype, [64, 64], _swizzled())
    mbarrier.init(full.index(0), count=1)
    mbarrier.init(full.index(1), count=1)
    fence_async_shared()
    program = gl.program_id(0) * gl.num_programs(1) + part
    totals += (program.to(gl.int64) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _product(64)))) * (P + R)
    ring, copied = (p_ring, r_ring, full), 0
    _copy(v_desc, r_desc, gl.load(items + 4 * gl.load(tasks + 4 * gl.program_id(0) + 2)), ring, 0, P)
    for number in range(gl.program_id(0), many, step):
        after = gl.load(tasks + 4 * gl.minimum(number + step, many - 1) + 2)
        copied = _walk_task(
            q, v_desc, r_desc, items, tasks + 4 * number, after, number + step < many, copied, positions, bases,
            acc_of, m_of, z_of, totals, out, factor, q_stride, part, rows, rest, shared, ring, HEADS, PART, P, R, SPAN,
            SPLIT, RESUME,
        )  # fmt: skip
