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
def _value(codes, CODES: tl.constexpr):
    """What codes stand for, fp32; plain weights as they are. See weights.GpuQuantized."""
    if CODES == "plain":
        value = codes
    elif CODES == "e4m3":  # the exponent of fp16 is 8 more; not every GPU has a type for it
        wide = codes.to(tl.int16)
        value = (((wide & 128) << 8) | ((wide & 127) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif CODES == "int8":
        value = codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif CODES == "int4":
        value = codes.to(tl.float32) - 8.0
    elif CODES == "e2m1":  # a sign, two bits of exponent, one of mantissa: below 1 there are 0 and 1/2
        size = codes & 7
        odd = (codes & 1).to(tl.float32) * 0.5
        value = tl.where(size < 2, odd, (1.0 + odd) * (1 << (size >> 1)).to(tl.float32) * 0.5)
        value = tl.where(codes > 7, -value, value)
    else:
        value = codes.to(tl.float32)
    return value


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


@triton.jit(do_not_specialize=["rows"])
def product(
    x, weight, scales, offsets, bias, out, table, begin, order, rows, inputs, outputs, x_stride, stride, out_stride,
    experts, chosen,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, CODES: tl.constexpr, PLANES: tl.constexpr,
    GROUP: tl.constexpr, OFFSETS: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr, EXPERTS: tl.constexpr,
    SENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x [T, K] times a weight [N, K] transposed, plus bias [N]: out [T, N]. Rows are x_stride and out_stride apart.

    weight uint8, rows `stride` apart: see weights.GpuQuantized, as for scales, offsets fp32 [K / G, N]. GROUP 0: one
    scale for all inputs, [N], which the sum is multiplied by. PLANES: codes in a byte. WHOLE: K needs no mask.
    EXPERTS: E rounded up, 0 for none. Then row r belongs to expert e where begin[e] <= r < begin[e + 1], int32 [E + 1],
    and table int64 [E, 4] has where weight, scales, offsets and bias of each lie. SENT: row r of out is of row
    order[r] // chosen of x.
    """
    tile, last = tl.program_id(0), rows
    first = tile * ROWS
    if EXPERTS:
        expert, first, last = _tile_of_expert(begin, tile, experts, EXPERTS, ROWS)
        if expert >= experts:
            return
        table += expert * 4
        weight = tl.multiple_of(tl.load(table).to(weight.dtype), 16)
        scales = tl.multiple_of(tl.load(table + 1).to(scales.dtype), 16)
        offsets = tl.multiple_of(tl.load(table + 2).to(offsets.dtype), 16)
        bias = tl.multiple_of(tl.load(table + 3).to(bias.dtype), 16)
    row, j = first + tl.arange(0, ROWS), tl.arange(0, STEP)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    read = tl.minimum(column, outputs - 1)
    taken = row < last
    source = tl.load(order + row, mask=taken, other=0) // chosen if SENT else row
    from_w = weight + read.to(tl.int64)[:, None] * stride + j[None, :]
    from_x = x + source.to(tl.int64)[None, :] * x_stride + j[:, None]
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    for unit in range(0, tl.cdiv(inputs, STEP * PLANES)):
        if CODES == "plain" and not WHOLE:
            packed = tl.load(from_w + unit * STEP, mask=(unit * STEP + j < inputs)[None, :], other=0.0)
        else:
            packed = tl.load(from_w + unit * STEP)
        for plane in tl.static_range(PLANES):
            at = (unit * PLANES + plane) * STEP
            codes = packed
            if PLANES == 2:
                codes = (packed >> 4) if plane else (packed & 15)
            w = _value(codes, CODES)
            if GROUP:
                group = (at // GROUP) * outputs
                scale = tl.load(scales + group + read)[:, None]
                if OFFSETS:
                    offset = tl.load(offsets + group + read)[:, None]
                    w = tl.fma(w, scale.broadcast_to(w.shape), offset.broadcast_to(w.shape))
                else:
                    w = w * scale
            if WHOLE:
                part = tl.load(from_x + at, mask=taken[None, :], other=0.0)
            else:
                part = tl.load(from_x + at, mask=taken[None, :] & (at + j < inputs)[:, None], other=0.0)
            acc = tl.dot(w.to(part.dtype), part, acc, input_precision=PRECISION)
    if GROUP == 0 and CODES != "plain":
        acc = acc * tl.load(scales + read)[:, None]
    if BIAS:
        acc += tl.load(bias + read).to(tl.float32)[:, None]
    to = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(to, tl.trans(acc).to(out.dtype.element_ty), mask=taken[:, None] & (column < outputs)[None, :])


@triton.jit
def route(logits, expert, share, experts, CHOSEN: tl.constexpr, P: tl.constexpr, C: tl.constexpr, SHARED: tl.constexpr):
    """The CHOSEN greatest of the softmax of a row's logits fp32 [T, E], of equal ones the first: expert int32
    [T, CHOSEN], share fp32 [T, CHOSEN], divided by their sum if SHARED. P, C: E and CHOSEN rounded up."""
    row, e, c = tl.program_id(0).to(tl.int64), tl.arange(0, P), tl.arange(0, C)
    x = tl.load(logits + row * experts + e, mask=e < experts, other=float("-inf"))
    p = tl.exp(x - tl.max(x, 0))
    whole = tl.sum(p, 0)
    p = tl.where(e < experts, p / whole, -1.0)
    places, shares, total = tl.zeros((C,), tl.int32), tl.zeros((C,), tl.float32), 0.0
    for place in range(CHOSEN):
        best = tl.max(p, 0)
        at = tl.min(tl.where(p == best, e, experts - 1), 0)
        places, shares = tl.where(c == place, at, places), tl.where(c == place, best, shares)
        total += best
        p = tl.where(e == at, -1.0, p)
    if SHARED:
        shares = shares / total
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
