"""Products with weights that are codes under scales, or with those of experts, in Triton.

T: rows, K: inputs, N: outputs, G: inputs under one scale, E: experts. Weights are the left operand: a tile of theirs is
made of its codes in registers, in the type computed in, and goes to the tensor cores from there; rows are the right
one, so that a few of them take a small instruction. An output is one chain of sums over all inputs, in their order.
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _value(words, magic, shift: tl.constexpr, CODES: tl.constexpr, MASK: tl.constexpr):
    """fp32 of the codes that lie in words int32 from bit `shift` on. Whole numbers are as they are, from -8 or -128 on
    for int4 and int8."""
    if CODES == "e2m1":  # a sign, two bits of exponent, one of mantissa: fp32 has 126 more, and is exact below 1 too
        code = (words >> shift) & MASK
        return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif CODES == "e4m3":
        code = (words >> shift) & MASK
        return (((code & 128) << 24) | ((code & 127) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        # Where it lies, a code is part of the whole number that 2^23 in fp32, whose bits `magic` has, holds in its last
        # bits: one shift serves a word, and every operation is exact. An instruction has room for one constant: hence
        # the argument.
        PLACE: tl.constexpr = shift % 16
        near = words if shift < 16 else words >> 16
        whole = ((near & (MASK << PLACE)) | magic).to(tl.float32, bitcast=True)
        UNIT: tl.constexpr = 1.0 / (1 << PLACE)
        LEAST: tl.constexpr = 8 if CODES == "int4" else 128 if CODES == "int8" else 0
        unit = tl.full(words.shape, UNIT, tl.float32)
        return tl.fma(whole, unit, tl.full(words.shape, -8388608.0 * UNIT - LEAST, tl.float32))


@triton.jit
def _scaled(words, magic, shift: tl.constexpr, scale, offset, like, CODES: tl.constexpr, MASK: tl.constexpr,
            GROUP: tl.constexpr, OFFSETS: tl.constexpr):  # fmt: skip
    """Weights in the type of `like`: scale * code + offset."""
    value = _value(words, magic, shift, CODES, MASK)
    if OFFSETS:
        value = tl.fma(value, scale.broadcast_to(value.shape), offset.broadcast_to(value.shape))
    elif GROUP:
        value = value * scale
    return value.to(like)


@triton.jit
def _tile(words, magic, scale, offset, like: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
          OFFSETS: tl.constexpr):  # fmt: skip
    """Words int32 [N, W] -> weights [N, W * 32 / BITS]: see weights.GpuQuantized for where codes lie. A thread has the
    codes of its words where a tensor core wants them: nothing moves."""
    M: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    if BITS == 8:
        a = tl.join(
            tl.join(
                _scaled(words, magic, 0, scale, offset, like, CODES, 255, GROUP, OFFSETS),
                _scaled(words, magic, 8, scale, offset, like, CODES, 255, GROUP, OFFSETS),
            ),
            tl.join(
                _scaled(words, magic, 16, scale, offset, like, CODES, 255, GROUP, OFFSETS),
                _scaled(words, magic, 24, scale, offset, like, CODES, 255, GROUP, OFFSETS),
            ),
        )
        return a.reshape(M, W // 4, 4, 2, 2).permute(0, 1, 4, 2, 3).reshape(M, 4 * W)
    else:
        low = tl.join(
            tl.join(
                _scaled(words, magic, 0, scale, offset, like, CODES, 15, GROUP, OFFSETS),
                _scaled(words, magic, 4, scale, offset, like, CODES, 15, GROUP, OFFSETS),
            ),
            tl.join(
                _scaled(words, magic, 8, scale, offset, like, CODES, 15, GROUP, OFFSETS),
                _scaled(words, magic, 12, scale, offset, like, CODES, 15, GROUP, OFFSETS),
            ),
        )
        high = tl.join(
            tl.join(
                _scaled(words, magic, 16, scale, offset, like, CODES, 15, GROUP, OFFSETS),
                _scaled(words, magic, 20, scale, offset, like, CODES, 15, GROUP, OFFSETS),
            ),
            tl.join(
                _scaled(words, magic, 24, scale, offset, like, CODES, 15, GROUP, OFFSETS),
                _scaled(words, magic, 28, scale, offset, like, CODES, 15, GROUP, OFFSETS),
            ),
        )
        return tl.join(low, high).reshape(M, W // 4, 4, 2, 2, 2).permute(0, 1, 5, 4, 2, 3).reshape(M, 8 * W)


@triton.jit
def _tile_of_expert(begin, tile, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """The expert whose rows the tile has, its first row, and the row behind that expert's last; no rows: the same."""
    e = tl.arange(0, EXPERTS)
    starts = tl.load(begin + e, mask=e < experts, other=0)
    counts = tl.load(begin + e + 1, mask=e < experts, other=0) - starts
    tiles = (counts + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(e < expert, tiles, 0), 0)
    mine = e == expert
    start = tl.sum(tl.where(mine, starts, 0), 0)
    return expert, start + (tile - before) * ROWS, start + tl.sum(tl.where(mine, counts, 0), 0)


@triton.jit
def _chain(
    from_x, from_w, scales, offsets, magic, read, taken, first, last, inputs, outputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr, CODES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums [COLUMNS, ROWS] over the inputs of tiles first .. last-1, in one chain. See product."""
    WORD: tl.constexpr = 1 if BITS == 16 else 32 // BITS
    j = tl.arange(0, STEP)
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    for tile in range(first, last):
        for step in tl.static_range(STEPS):
            at = (tile * STEPS + step) * STEP
            there = at + j < inputs
            if WHOLE:
                part = tl.load(from_x + at, mask=taken[None, :], other=0.0)
            else:
                part = tl.load(from_x + at, mask=taken[None, :] & there[:, None], other=0.0)
            if BITS < 16:
                words = tl.load(from_w + at // WORD)
                group = (at // GROUP) * outputs if GROUP else 0
                scale = tl.load(scales + group + read)[:, None] if GROUP else 1.0
                offset = tl.load(offsets + group + read)[:, None] if OFFSETS else 0.0
                w = _tile(words, magic, scale, offset, part.dtype, CODES, BITS, GROUP, OFFSETS)
            elif WHOLE:
                w = tl.load(from_w + at)
            else:
                w = tl.load(from_w + at, mask=there[None, :], other=0.0)
            acc = tl.dot(w, part, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _finished(total, scale, bias, SCALED: tl.constexpr, BIAS: tl.constexpr):
    """total * scale + bias, where there are such."""
    if SCALED and BIAS:
        return tl.fma(total, scale.broadcast_to(total.shape), bias.to(tl.float32).broadcast_to(total.shape))
    elif SCALED:
        return total * scale
    elif BIAS:
        return total + bias.to(tl.float32)
    else:
        return total


@triton.jit
def _of_segments(
    from_x, from_w, scales, offsets, magic, read, taken, tiles, inputs, outputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr, CODES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr, WHOLE: tl.constexpr, SEGMENTS: tl.constexpr,
    APART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sum [COLUMNS, ROWS] over the inputs of a program's segment, or of all segments from left to right."""
    every = tl.cdiv(inputs, STEP * STEPS)
    if APART or SEGMENTS == 1:
        begins = tl.program_id(2) * tiles
        total = _chain(
            from_x, from_w, scales, offsets, magic, read, taken, begins, tl.minimum(begins + tiles, every),
            inputs, outputs, ROWS, COLUMNS, STEP, STEPS, CODES, BITS, GROUP, OFFSETS, WHOLE, PRECISION,
        )  # fmt: skip
    else:
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
        for segment in range(SEGMENTS):
            total += _chain(
                from_x, from_w, scales, offsets, magic, read, taken, segment * tiles,
                tl.minimum((segment + 1) * tiles, every), inputs, outputs,
                ROWS, COLUMNS, STEP, STEPS, CODES, BITS, GROUP, OFFSETS, WHOLE, PRECISION,
            )  # fmt: skip
    return total


@triton.jit(do_not_specialize=["rows", "tiles", "magic"])
def product(
    x, weight, scales, offsets, bias, out, table, begin, order, rows, inputs, outputs, x_stride, stride, out_stride,
    tiles, experts, chosen, magic,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr, CODES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr,
    SEGMENTS: tl.constexpr, APART: tl.constexpr, EXPERTS: tl.constexpr, SENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x [T, K] times a weight [N, K] transposed, plus bias [N]: out [T, N]. Rows are x_stride and out_stride apart.

    weight: words, rows `stride` apart, scales, offsets fp32 [K / G, N]: see weights.GpuQuantized. BITS 16: numbers.
    GROUP 0: one scale for all inputs, [N], which the sum is multiplied by. WHOLE: K needs no mask. magic: see _value.
    A tile has STEPS times STEP inputs: how many is no part of the order of sums. SEGMENTS of `tiles` tiles are summed
    up for themselves, then from left to right. APART: each by a program of its own into out fp32 [SEGMENTS, T, N],
    which add_segments finishes.
    EXPERTS: E rounded up, 0 for none. Then row r belongs to expert e where begin[e] <= r < begin[e + 1], int32 [E + 1],
    and table int64 [E, 4] has where weight, scales, offsets and bias of each lie. SENT: row r of out is of row
    order[r] // chosen of x.
    """
    number, last = tl.program_id(0), rows
    first = number * ROWS
    if EXPERTS:
        expert, first, last = _tile_of_expert(begin, number, experts, EXPERTS, ROWS)
        if expert >= experts:
            return
        table += expert * 4
        weight = tl.multiple_of(tl.load(table).to(weight.dtype), 16)
        scales = tl.multiple_of(tl.load(table + 1).to(scales.dtype), 16)
        offsets = tl.multiple_of(tl.load(table + 2).to(offsets.dtype), 16)
        bias = tl.multiple_of(tl.load(table + 3).to(bias.dtype), 16)
    row, j = first + tl.arange(0, ROWS), tl.arange(0, STEP)
    word = tl.arange(0, STEP if BITS == 16 else STEP * BITS // 32)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    read = tl.minimum(column, outputs - 1)
    taken = row < last
    source = tl.load(order + row, mask=taken, other=0) // chosen if SENT else row
    from_w = weight + read.to(tl.int64)[:, None] * stride + word[None, :]
    from_x = x + source.to(tl.int64)[None, :] * x_stride + j[:, None]
    total = _of_segments(
        from_x, from_w, scales, offsets, magic, read, taken, tiles, inputs, outputs,
        ROWS, COLUMNS, STEP, STEPS, CODES, BITS, GROUP, OFFSETS, WHOLE, SEGMENTS, APART, PRECISION,
    )  # fmt: skip
    to = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    if APART:
        to += tl.program_id(2).to(tl.int64) * rows * out_stride
    else:
        scale = tl.load(scales + read)[:, None] if GROUP == 0 and BITS < 16 else 1.0
        added = tl.load(bias + read)[:, None] if BIAS else 0.0
        total = _finished(total, scale, added, GROUP == 0 and BITS < 16, BIAS)
    tl.store(to, tl.trans(total).to(out.dtype.element_ty), mask=taken[:, None] & (column < outputs)[None, :])


@triton.jit(do_not_specialize=["rows"])
def add_segments(
    parts, scales, bias, out, rows, outputs, out_stride, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """parts fp32 [SEGMENTS, T, N] of product added up from left to right, then finished as there: out [T, N]."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = column < outputs
    total = tl.zeros((WIDTH,), tl.float32)
    for segment in tl.static_range(SEGMENTS):
        total += tl.load(parts + (segment * rows + row) * outputs + column, mask=there, other=0.0)
    scale = tl.load(scales + column, mask=there, other=0.0) if SCALED else 1.0
    added = tl.load(bias + column, mask=there, other=0.0) if BIAS else 0.0
    total = _finished(total, scale, added, SCALED, BIAS)
    tl.store(out + row * out_stride + column, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def first_greatest(x, places, last):
    """The greatest of x, and the first place where it is; `last` where x holds no numbers."""
    best = tl.max(x, 0)
    return best, tl.min(tl.where(x == best, places, last), 0)


@triton.jit
def of_the_best_groups(
    worth, e, size, last, G: tl.constexpr, GROUPS: tl.constexpr, MET: tl.constexpr, SUMMED: tl.constexpr
):
    """worth [P] of experts e, -inf of those outside the MET of GROUPS groups of `size` whose SUMMED best ones are worth
    most together. G: GROUPS rounded up."""
    g = tl.arange(0, G)
    totals = tl.full((G,), float("-inf"), tl.float32)
    for group in range(GROUPS):
        own, total = tl.where(e // size == group, worth, float("-inf")), 0.0
        for _ in range(SUMMED):
            best, at = first_greatest(own, e, last)
            own, total = tl.where(e == at, float("-inf"), own), total + best
        totals = tl.where(g == group, total, totals)
    found = tl.full(worth.shape, float("-inf"), tl.float32)
    for _ in range(MET):
        _best, at = first_greatest(totals, g, GROUPS - 1)
        found = tl.where(e // size == at, worth, found)
        totals = tl.where(g == at, float("-inf"), totals)
    return found


@triton.jit
def route(
    logits,
    correction,
    expert,
    share,
    experts,
    scale,
    CHOSEN: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    SHARED: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr,
    MET: tl.constexpr,
    SUMMED: tl.constexpr,
):
    """The CHOSEN best by the scores of a row's logits fp32 [T, E], of equal ones the first: expert int32 [T, CHOSEN],
    share fp32 [T, CHOSEN], divided by their sum if SHARED. See kernels.experts.route. P, C: E and CHOSEN rounded up."""
    row, e, c = tl.program_id(0).to(tl.int64), tl.arange(0, P), tl.arange(0, C)
    x = tl.load(logits + row * experts + e, mask=e < experts, other=float("-inf"))
    p = 1.0 / (1.0 + tl.exp(-x)) if SIGMOID else tl.exp(x - tl.max(x, 0))
    whole = tl.sum(p, 0)
    if not SIGMOID:
        p = p / whole
    worth = p + tl.load(correction + e, mask=e < experts, other=0.0) if CORRECTED else p
    worth = tl.where(e < experts, worth, float("-inf"))
    if GROUPS > 1:
        worth = of_the_best_groups(worth, e, experts // GROUPS, experts - 1, G, GROUPS, MET, SUMMED)
    places, shares, total = tl.zeros((C,), tl.int32), tl.zeros((C,), tl.float32), 0.0
    for place in range(CHOSEN):
        best, at = first_greatest(worth, e, experts - 1)
        if CORRECTED:
            best = tl.sum(tl.where(e == at, p, 0.0), 0)
        places, shares = tl.where(c == place, at, places), tl.where(c == place, best, shares)
        total += best
        worth = tl.where(e == at, float("-inf"), worth)
    if SHARED:
        shares = shares / (total + 1e-20)
    shares = shares * scale
    shares = tl.where(whole == whole, shares, whole)  # where a logit is NaN, any experts, and shares of NaN
    tl.store(expert + row * CHOSEN + c, places, mask=c < CHOSEN)
    tl.store(share + row * CHOSEN + c, shares, mask=c < CHOSEN)


@triton.jit
def arrange(expert, order, place, begin, pairs, experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Pairs by expert, and of one expert as they come: order, place int32 [M] and begin int32 [E + 1] as in
    experts.GpuRoutes. Each program finds the places of BLOCK pairs by counting; the last one counts for begin."""
    program, near = tl.program_id(0), tl.arange(0, BLOCK)
    if program < tl.num_programs(0) - 1:
        pair = program * BLOCK + near
        mine = tl.load(expert + pair, mask=pair < pairs, other=experts)
        before = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, pairs, BLOCK):
            other = first + near
            theirs = tl.load(expert + other, mask=other < pairs, other=experts)
            same = (theirs[None, :] == mine[:, None]) & (other[None, :] < pair[:, None])
            before += tl.sum(((theirs[None, :] < mine[:, None]) | same).to(tl.int32), 1)
        tl.store(place + pair, before, mask=pair < pairs)
        tl.store(order + before, pair, mask=pair < pairs)
    else:
        e = tl.arange(0, EXPERTS)
        less = tl.zeros((EXPERTS,), tl.int32)
        for first in range(0, pairs, BLOCK):
            other = first + near
            theirs = tl.load(expert + other, mask=other < pairs, other=EXPERTS)
            less += tl.sum((theirs[None, :] < e[:, None]).to(tl.int32), 1)
        tl.store(begin + e, less, mask=e <= experts)


@triton.jit
def combine(y, place, share, out, width, CHOSEN: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of a row's y [T CHOSEN, H], found by place int32 [T, CHOSEN], times its shares fp32 [T, CHOSEN], in their
    order: out [T, H]."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for j in range(CHOSEN):
        at = tl.load(place + row * CHOSEN + j).to(tl.int64)
        made = tl.load(y + at * width + column, mask=there, other=0.0).to(tl.float32)
        by = tl.load(share + row * CHOSEN + j)
        total = tl.fma(made, tl.full((COLUMNS,), 1.0, tl.float32) * by, total)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=there)
