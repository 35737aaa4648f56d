"""Draws of tokens on a GPU, in Triton, without sorting (columns and the greatest of each row: sample_kernels).

R: rows of the choice, V: vocabulary, P: blocks of a row. A program takes one block of one row, so that one row fills
the GPU, and a row's sums have one order whatever rows ride along.

A draw looks for a place in the row's descending order: of the top_k-th token, of the token at which top_p is reached,
of the token drawn. A logit's *key* is an integer of 32 bits in the logits' order. Each pass splits the keys that are
still in question by their next four bits, sums the weights e^((x - max) / temperature) of each of the 16 parts in fp64,
and goes on with the part that the place is in: after eight passes one key is left (a radix selection by weight).
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.sample_kernels import (
    DOUBT,
    FINDINGS,
    MIN_P,
    PARAMETERS,
    STRAY,
    SURE,
    TEMPERATURE,
    TOKEN,
    TOP,
    TOP_K,
    TOP_P,
    WATCH,
    changes_of,
    is_allowed,
    key_of,
    row_logits,
)

LIMITS = tl.constexpr(3)
"""Columns of `limits` fp64 [R, 3]: the weight that top_p is a share of; the weight that the draw is from; the random
number in [0, 1)."""

STATE = tl.constexpr(6)
KEY, HIGHER, NUMBER, WEIGHT, EQUALS, DIGIT = (tl.constexpr(i) for i in range(6))
"""Columns of `states` fp64 [R, 6]: the bits of the key found so far; weight and number of the tokens above it; mean
weight and number of those that have it; its last four bits."""

BY_TOP_K, BY_TOP_P, DRAW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
PLACES = tl.constexpr(16)
"""Parts that a pass splits keys into."""
MARGIN = tl.constexpr(2.0**-33)
"""Of the whole weight. A place closer than this to another token is left to the host: what 2^19 weights come to, added
up one by one in fp64 as the host does, is off by 2^-34 at most."""
NEAR = tl.constexpr(2.0**-40)
"""As MARGIN, of one weight: exponentials are within some units of 2^-52."""


@triton.jit
def _digit(key, shift):
    return ((key >> shift) & 15).to(tl.int32)


@triton.jit
def _weight(x, top, inverse):
    """inverse: 1 / temperature. The host divides; what that rounds otherwise is far below MARGIN and NEAR."""
    return tl.exp((x.to(tl.float64) - top) * inverse)


@triton.jit
def _add_up(weight, digit, inside, masses, counts):
    """Adds the weights of the elements with each digit, and their number, to masses and counts [16, PIECE]: these are
    summed over PIECE at the end, not for each piece."""
    place = tl.arange(0, PLACES)[:, None]
    taken = (digit[None, :] == place) & inside[None, :]
    return masses + tl.where(taken, weight[None, :], 0.0), counts + taken.to(tl.int32)


@triton.jit
def _keep(bins, row, block, blocks, masses, counts):
    """bins fp64 [R, P, 2, 16]."""
    out = bins + (row * blocks + block) * 2 * PLACES + tl.arange(0, PLACES)
    tl.store(out, tl.sum(masses, 1))
    tl.store(out + PLACES, tl.sum(counts, 1).to(tl.float64))


@triton.jit
def weigh(
    logits, stride, masks, words, asked, found, bins, kept, width, blocks,
    CHANGED: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The first pass, over all keys: bins. kept fp64 [R, P, 2]: the weight of what min_p keeps, and the number of
    tokens too close to call."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    ask = asked + row * PARAMETERS
    temperature, min_p = tl.load(ask + TEMPERATURE), tl.load(ask + MIN_P)
    if temperature == 0:
        return
    top, inverse = tl.load(found + row * FINDINGS + TOP), 1.0 / temperature
    masses, counts = tl.zeros((PLACES, PIECE), tl.float64), tl.zeros((PLACES, PIECE), tl.int32)
    weight_kept, close = tl.zeros((PIECE,), tl.float64), tl.zeros((PIECE,), tl.float64)
    for piece in range(0, BLOCK, PIECE):
        at = block * BLOCK + piece + tl.arange(0, PIECE)
        _raw, x = row_logits(logits, stride, masks, words, ask, at, width, CHANGED)
        weight = _weight(x, top, inverse)
        masses, counts = _add_up(weight, _digit(key_of(x), 28), at < width, masses, counts)
        weight_kept += tl.where(weight >= min_p, weight, 0.0)
        near = (tl.abs(weight - min_p) <= NEAR * min_p) & (x.to(tl.float64) != top)
        close += tl.where(min_p > 0, near.to(tl.float64), 0.0)
    _keep(bins, row, block, blocks, masses, counts)
    tl.store(kept + (row * blocks + block) * 2, tl.sum(weight_kept, 0))
    tl.store(kept + (row * blocks + block) * 2 + 1, tl.sum(close, 0))


@triton.jit
def limit(asked, counters, bins, kept, found, limits, blocks, BLOCKS: tl.constexpr):
    """The row's weight, what min_p leaves of it, and the random number."""
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    ask = asked + row * PARAMETERS
    if tl.load(ask + TEMPERATURE) == 0:
        return
    masses, _ = _sums(bins, row, blocks, BLOCKS)
    total = tl.sum(masses, 0)
    of = kept + (row * blocks + block) * 2
    left, close = tl.load(of, mask=block < blocks, other=0.0), tl.load(of + 1, mask=block < blocks, other=0.0)
    whole = tl.where(tl.load(ask + MIN_P) > 0, tl.sum(left, 0), total)
    tl.store(limits + row * LIMITS, total)
    tl.store(limits + row * LIMITS + 1, whole)
    tl.store(limits + row * LIMITS + 2, _uniform(counters + row * PARAMETERS))
    tl.store(found + row * FINDINGS + DOUBT, tl.sum(close, 0))


@triton.jit
def _uniform(of):
    """Philox 4x64, as numpy has it: it counts up before each number."""
    seed, index = tl.load(of).to(tl.uint64, bitcast=True), tl.load(of + 1).to(tl.uint64)
    position, again = tl.load(of + 2).to(tl.uint64), tl.load(of + 3).to(tl.uint64)
    none = index * 0
    bits, _1, _2, _3 = tl.philox_impl(position + 1, none, again, none, seed, index)
    return (bits >> 11).to(tl.float64) * 2.0**-53


@triton.jit
def _sums(bins, row, blocks, BLOCKS: tl.constexpr):
    """Weight and number of each digit, over the blocks of a row."""
    block, place = tl.arange(0, BLOCKS)[:, None], tl.arange(0, PLACES)[None, :]
    of = bins + (row * blocks + block) * 2 * PLACES + place
    masses = tl.sum(tl.load(of, mask=block < blocks, other=0.0), 0)
    return masses, tl.sum(tl.load(of + PLACES, mask=block < blocks, other=0.0), 0)


@triton.jit
def _target(ask, limits, row, STAGE: tl.constexpr):
    """The number or the weight down to the place looked for."""
    if STAGE == BY_TOP_K:
        target = tl.load(ask + TOP_K)
    elif STAGE == BY_TOP_P:
        target = tl.load(ask + TOP_P) * tl.load(limits + row * LIMITS)
    else:
        target = tl.load(limits + row * LIMITS + 2) * tl.load(limits + row * LIMITS + 1)
    return target


@triton.jit
def _idle(ask, width, STAGE: tl.constexpr):
    """Whether the row has no such place to find."""
    idle = tl.load(ask + TEMPERATURE) == 0
    if STAGE == BY_TOP_K:
        k = tl.load(ask + TOP_K)
        idle = idle | (k <= 0) | (k >= width)
    elif STAGE == BY_TOP_P:
        idle = idle | (tl.load(ask + TOP_P) >= 1)
    return idle


@triton.jit
def descend(
    asked, limits, bins, states, width, blocks, BLOCKS: tl.constexpr, FIRST: tl.constexpr, STAGE: tl.constexpr
):  # fmt: skip
    """The part of the keys in question that the place looked for is in: four bits more of its key."""
    row = tl.program_id(0).to(tl.int64)
    ask, state = asked + row * PARAMETERS, states + row * STATE
    if _idle(ask, width, STAGE):
        return
    target, place = _target(ask, limits, row, STAGE), tl.arange(0, PLACES)
    masses, counts = _sums(bins, row, blocks, BLOCKS)
    key, above, number = tl.zeros((), tl.float64), tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    if not FIRST:
        key, above, number = tl.load(state + KEY), tl.load(state + HIGHER), tl.load(state + NUMBER)
    if STAGE == BY_TOP_K:
        amount, before = counts, number
    else:
        amount, before = masses, above
    reached = before + tl.sum(tl.where(place[None, :] > place[:, None], amount[None, :], 0.0), 1) + amount
    digit = tl.max(tl.where((amount > 0) & (reached >= target), place, -1), 0)
    # Rounding may leave the end of the row below a target that is as good as its whole weight.
    digit = tl.where(digit < 0, tl.min(tl.where(amount > 0, place, PLACES - 1), 0), digit)
    equals = tl.sum(tl.where(place == digit, counts, 0.0), 0)
    tl.store(state + KEY, key * PLACES + digit)
    tl.store(state + HIGHER, above + tl.sum(tl.where(place > digit, masses, 0.0), 0))
    tl.store(state + NUMBER, number + tl.sum(tl.where(place > digit, counts, 0.0), 0))
    tl.store(state + WEIGHT, tl.sum(tl.where(place == digit, masses, 0.0), 0) / equals)
    tl.store(state + EQUALS, equals)
    tl.store(state + DIGIT, digit.to(tl.float64))


@triton.jit(do_not_specialize=["shift"])
def narrow(
    logits, stride, masks, words, asked, found, before, states, after, width, blocks, shift,
    CHANGED: tl.constexpr, STAGE: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """A later pass: splits the keys that `states` leaves in question by the four bits at `shift`, from bins `before`
    into bins `after`."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    ask, state = asked + row * PARAMETERS, states + row * STATE
    if _idle(ask, width, STAGE):
        return
    key, digit = tl.load(state + KEY).to(tl.int64), tl.load(state + DIGIT).to(tl.int32)
    masses, counts = tl.zeros((PLACES, PIECE), tl.float64), tl.zeros((PLACES, PIECE), tl.int32)
    # Late passes find few tokens, in few blocks: the others are not read.
    if tl.load(before + (row * blocks + block) * 2 * PLACES + PLACES + digit) > 0:
        top, inverse = tl.load(found + row * FINDINGS + TOP), 1.0 / tl.load(ask + TEMPERATURE)
        for piece in range(0, BLOCK, PIECE):
            at = block * BLOCK + piece + tl.arange(0, PIECE)
            _raw, x = row_logits(logits, stride, masks, words, ask, at, width, CHANGED)
            keys = key_of(x)
            inside = ((keys >> (shift + 4)) == key) & (at < width)
            if tl.max(inside.to(tl.int32), 0) > 0:
                weight = _weight(x, top, inverse)
                masses, counts = _add_up(weight, _digit(keys, shift), inside, masses, counts)
    _keep(after, row, block, blocks, masses, counts)


@triton.jit
def _unlike(ask, equals, CHANGED: tl.constexpr):
    """Whether tokens of one key may be of different weights: changed logits, fp64, that are the same in fp32."""
    if CHANGED:
        unlike = (equals > 1) & (changes_of(ask) != 0)
    else:
        unlike = equals < 0
    return unlike


@triton.jit
def cut(asked, found, limits, states, width, CHANGED: tl.constexpr, STAGE: tl.constexpr):
    """What top_k or top_p leaves of the row's weight."""
    row = tl.program_id(0).to(tl.int64)
    ask, state, out = asked + row * PARAMETERS, states + row * STATE, limits + row * LIMITS
    if _idle(ask, width, STAGE):
        return
    target, above = _target(ask, limits, row, STAGE), tl.load(state + HIGHER)
    weight, equals = tl.load(state + WEIGHT), tl.load(state + EQUALS)
    doubts = found + row * FINDINGS + DOUBT
    doubt = _unlike(ask, equals, CHANGED)
    if STAGE == BY_TOP_K:
        doubt = doubt | (weight == 0)  # tokens without weight are among the top_k
        left = above + (target - tl.load(state + NUMBER)) * weight
        tl.store(out, left)
    else:
        among = tl.minimum(tl.maximum(tl.ceil((target - above) / weight) - 1, 0.0), equals - 1)
        left = above + (among + 1) * weight
        doubt = doubt | _close(target, left - weight, left, tl.load(out))
    tl.store(doubts, tl.load(doubts) + doubt.to(tl.float64))
    tl.store(out + 1, tl.minimum(tl.load(out + 1), left))


@triton.jit
def _close(target, low, high, total):
    """Whether rounding may have put the target into the wrong token, whose weight is that between low and high."""
    return ~((target - low > MARGIN * total) & (high - target > MARGIN * total))


@triton.jit
def strays_of_blocks(
    logits, stride, masks, words, asked, strays, width, blocks, CHANGED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """strays fp64 [R, P, 3]: of a watched row's block the most likely token that its filters should not keep, as logit
    and id."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    ask = asked + row * PARAMETERS
    watch = tl.load(ask + WATCH).to(tl.int64)
    if watch < 0:
        return
    at = block * BLOCK + tl.arange(0, BLOCK)
    _raw, x = row_logits(logits, stride, masks, words, ask, at, width, CHANGED)
    x = tl.where(is_allowed(masks, words, watch, at, width), float("-inf"), x)
    top = tl.max(x, 0)
    out = strays + (row * blocks + block) * 3
    tl.store(out, top.to(tl.float64))
    tl.store(out + 1, tl.min(tl.where(x == top, at, 2147483647), 0).to(tl.float64))


@triton.jit
def _stray(strays, row, blocks, BLOCKS: tl.constexpr):
    """Logit and id of the most likely one of the row."""
    block = tl.arange(0, BLOCKS)
    of = strays + (row * blocks + block) * 3
    logits = tl.load(of, mask=block < blocks, other=float("-inf"))
    logit = tl.max(logits, 0)
    ids = tl.load(of + 1, mask=block < blocks, other=2147483647.0)
    return logit, tl.min(tl.where(logits == logit, ids, 2147483647.0), 0)


@triton.jit
def weigh_before_stray(
    logits, stride, masks, words, asked, found, strays, width, blocks,
    CHANGED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The weight of a block's tokens that come before the stray one."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    ask = asked + row * PARAMETERS
    if tl.load(ask + WATCH) < 0:
        return
    logit, token = _stray(strays, row, blocks, BLOCKS)
    at = block * BLOCK + tl.arange(0, BLOCK)
    _raw, x = row_logits(logits, stride, masks, words, ask, at, width, CHANGED)
    before = (x.to(tl.float64) > logit) | ((x.to(tl.float64) == logit) & (at < token))
    weight = _weight(x, tl.load(found + row * FINDINGS + TOP), 1.0 / tl.load(ask + TEMPERATURE))
    tl.store(strays + (row * blocks + block) * 3 + 2, tl.sum(tl.where(before, weight, 0.0), 0))


@triton.jit
def judge_stray(asked, found, limits, strays, blocks, BLOCKS: tl.constexpr):
    """Whether the filters keep the stray token: the weight of those before it is then less than what they keep by its
    own weight, and else not less."""
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    ask, out = asked + row * PARAMETERS, found + row * FINDINGS
    if tl.load(ask + WATCH) < 0:
        return
    logit, _token = _stray(strays, row, blocks, BLOCKS)
    before = tl.sum(tl.load(strays + (row * blocks + block) * 3 + 2, mask=block < blocks, other=0.0), 0)
    weight = _weight(logit, tl.load(out + TOP), 1.0 / tl.load(ask + TEMPERATURE))
    missing = tl.load(limits + row * LIMITS + 1) - before
    close = tl.abs(missing - weight / 2) <= 2 * MARGIN * tl.load(limits + row * LIMITS)
    tl.store(out + STRAY, ((missing > weight / 2) & (weight > 0)).to(tl.float64))
    tl.store(out + DOUBT, tl.load(out + DOUBT) + (close & (weight > 0)).to(tl.float64))


@triton.jit
def pick(
    logits, stride, masks, words, asked, tokens, found, limits, bins, states, width, blocks,
    CHANGED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token at the place drawn: of those with the key found there, the right one by id."""
    row, numbers = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    ask, state, out = asked + row * PARAMETERS, states + row * STATE, found + row * FINDINGS
    if tl.load(ask + TEMPERATURE) == 0:
        return
    target, above = _target(ask, limits, row, DRAW), tl.load(state + HIGHER)
    weight, equals = tl.load(state + WEIGHT), tl.load(state + EQUALS)
    key, digit = tl.load(state + KEY).to(tl.int64), tl.load(state + DIGIT).to(tl.int32)
    among = tl.minimum(tl.maximum(tl.floor((target - above) / weight), 0.0), equals - 1)
    low = above + among * weight
    doubt = _unlike(ask, equals, CHANGED)
    doubt = doubt | _close(target, low, low + weight, tl.load(limits + row * LIMITS))
    of = bins + (row * blocks + numbers) * 2 * PLACES + PLACES + digit
    counts = tl.load(of, mask=numbers < blocks, other=0.0)
    until = tl.cumsum(counts, 0)
    block = tl.minimum(tl.sum((until <= among).to(tl.int32), 0), blocks - 1)
    among -= tl.sum(tl.where(numbers < block, counts, 0.0), 0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    _raw, x = row_logits(logits, stride, masks, words, ask, at, width, CHANGED)
    equal = ((key_of(x) == key) & (at < width)).to(tl.int32)
    ours = (equal == 1) & (tl.cumsum(equal, 0) == among.to(tl.int32) + 1)
    token = tl.min(tl.where(ours, at, width), 0)
    sure = (tl.load(out + SURE) > 0) & (tl.load(out + DOUBT) == 0) & ~doubt & (weight > 0) & (token < width)
    token = tl.minimum(token, width - 1)
    tl.store(tokens + row, token.to(tl.int32))
    tl.store(out + TOKEN, token.to(tl.float64))
    tl.store(out + SURE, sure.to(tl.float64))
