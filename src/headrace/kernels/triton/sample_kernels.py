"""The choice of tokens on a GPU, in Triton: the greatest of each row, and what is told of it (draws: draw_kernels).

R: rows of the choice, V: vocabulary, P: blocks of a row. A program takes one block of one row, so that one row fills
the GPU, and a row's sums have one order whatever rows ride along.
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl

PARAMETERS = tl.constexpr(14)
SOURCE, MASK, WATCH, TEMPERATURE, TOP_K, TOP_P, MIN_P, REPORTS, LISTED = (tl.constexpr(i) for i in range(9))
"""Columns of `asked` fp64 [R, 9], rows PARAMETERS apart: the row of logits; the row of `masks`, -1 for none; one whose
tokens alone the filters should keep, -1 for none; 0 for greedy; 0 for all; 1 for all; 0 for all; 1 for the log
probability and the rank, 1 + n for those of the n most likely tokens, too; how many tokens are listed, whose logits and
ranks are told. Behind them lie `counters` int64 [R, 5]: what a draw's random number depends on (seed, index of the
sequence, number of tokens before, and 1 for the second number of that place, see engine.sampler.uniform), and the
address of the row's changed logits, fp64, that the token is chosen from; 0 for none."""
CHANGES = tl.constexpr(13)
"""Column of that address."""

FINDINGS = tl.constexpr(9)
TOKEN, SURE, GREATEST, NORM, LOGIT, ABOVE, TOP, DOUBT, STRAY = (tl.constexpr(i) for i in range(9))
"""Columns of `found` fp64 [R, 9]: the token; whether it is surely the one that the host's sampler chooses; the greatest
logit, NaN if one is; the logarithm of the sum of e^logit; the token's logit; how many are above it; the greatest logit
that the mask allows; how many limits of filters are too close to call; whether the filters of a row that is watched
keep a token that they should not."""

LEADERS = tl.constexpr(32)
"""Room for the most likely tokens of a row: their keys and ids in one integer (leader_of)."""


@triton.jit
def row_logits(logits, stride, masks, words, ask, at, width, CHANGED: tl.constexpr):
    """The row's logits at these places, and as the choice sees them: changed, -inf for tokens that the row's mask
    forbids. CHANGED: whether some row's are."""
    source, number = tl.load(ask + SOURCE).to(tl.int64), tl.load(ask + MASK).to(tl.int64)
    raw = tl.load(logits + source * stride + at, mask=at < width, other=float("-inf"))
    x = raw
    if CHANGED:
        address = changes_of(ask)
        ours = at < tl.where(address == 0, 0, width)
        x = tl.where(ours, tl.load(address.to(tl.pointer_type(tl.float64)) + at, mask=ours, other=0.0), raw)
    return raw, tl.where(is_allowed(masks, words, number, at, width), x, float("-inf"))


@triton.jit
def changes_of(ask):
    """The address of the row's changed logits."""
    return tl.load(ask + CHANGES).to(tl.int64, bitcast=True)


@triton.jit
def is_allowed(masks, words, number, at, width):
    word = tl.load(masks + number * words + at // 32, mask=at < tl.where(number < 0, 0, width), other=-1)
    return (word >> (at % 32)) & 1 == 1


@triton.jit
def key_of(x):
    """In [0, 2^32), in the order of x rounded to fp32; 0 and -0 have the same."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648


@triton.jit
def greatest_of_blocks(
    logits, stride, masks, words, asked, peaks, width, blocks, CHANGED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """peaks fp64 [R, P, 4]: of a block the greatest logit, NaN if one is; the sum of e^(logit - that), where it is
    asked for; the greatest that the mask allows, and the first token that has it."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    ask = asked + row * PARAMETERS
    at = block * BLOCK + tl.arange(0, BLOCK)
    raw, x = row_logits(logits, stride, masks, words, ask, at, width, CHANGED)
    broken = tl.max((raw != raw).to(tl.int32), 0)
    greatest, top = tl.max(raw, 0), tl.max(x, 0)
    out = peaks + (row * blocks + block) * 4
    tl.store(out, tl.where(broken == 1, float("nan"), greatest).to(tl.float64))
    tl.store(out + 2, top.to(tl.float64))
    tl.store(out + 3, tl.min(tl.where(x == top, at, 2147483647), 0).to(tl.float64))
    if tl.load(ask + REPORTS) > 0:
        base = tl.where(greatest > float("-inf"), greatest, 0.0).to(tl.float64)
        tl.store(out + 1, tl.sum(tl.exp(raw.to(tl.float64) - base), 0))


@triton.jit
def greatest(asked, peaks, tokens, found, blocks, BLOCKS: tl.constexpr):
    """The blocks' peaks put together: `found` of a greedy row."""
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    ask = asked + row * PARAMETERS
    there, of = block < blocks, peaks + (row * blocks + block) * 4
    raw = tl.load(of, mask=there, other=float("-inf"))
    broken = tl.max((raw != raw).to(tl.int32), 0)
    highest = tl.max(raw, 0)
    allowed = tl.load(of + 2, mask=there, other=float("-inf"))
    top = tl.max(allowed, 0)
    first = tl.load(of + 3, mask=there & (allowed == top), other=2147483647.0)
    token = tl.min(first, 0)
    sure = (broken == 0) & (highest < float("inf")) & (top > float("-inf"))
    token = tl.where(sure, token, 0.0)  # among NaN none is the greatest; a step behind looks up whatever stands here
    out = found + row * FINDINGS
    tl.store(tokens + row, token.to(tl.int32))
    tl.store(out + TOKEN, token)
    tl.store(out + SURE, sure.to(tl.float64))
    tl.store(out + GREATEST, tl.where(broken == 1, float("nan"), highest))
    tl.store(out + ABOVE, 0.0)
    tl.store(out + TOP, top)
    tl.store(out + DOUBT, 0.0)
    tl.store(out + STRAY, 0.0)
    if tl.load(ask + REPORTS) > 0:
        sums = tl.load(of + 1, mask=there, other=0.0)
        tl.store(out + NORM, highest + tl.log(tl.sum(sums * tl.exp(raw - highest), 0)))


@triton.jit
def rank(logits, stride, asked, tokens, found, width, BLOCK: tl.constexpr):
    """The chosen token's logit, and how many are above it."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    ask = asked + row * PARAMETERS
    if tl.load(ask + REPORTS) == 0:
        return
    of = logits + tl.load(ask + SOURCE).to(tl.int64) * stride
    logit = tl.load(of + tl.load(tokens + row))
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(of + at, mask=at < width, other=float("-inf"))
    if block == 0:
        tl.store(found + row * FINDINGS + LOGIT, logit.to(tl.float64))
    # Whole numbers: the order in which they are added does not matter.
    tl.atomic_add(found + row * FINDINGS + ABOVE, tl.sum((x > logit).to(tl.float64), 0))


@triton.jit
def leader_of(x, at):
    """An integer in the order of x, equals by descending id: int64, at least 0."""
    return (key_of(x) << 31) + (2147483647 - at)


@triton.jit
def _leaders(candidates, count, out):
    """Stores the `count` greatest candidates, descending; no two are the same."""
    for number in range(count):
        best = tl.max(candidates, 0)
        tl.store(out + number, best)
        candidates = tl.where(candidates == best, -1, candidates)


@triton.jit(do_not_specialize=["count"])
def leaders_of_blocks(logits, stride, asked, leading, width, blocks, count, BLOCK: tl.constexpr):
    """leading int64 [R, P, LEADERS]: the `count` most likely tokens of each block, by raw logits."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    ask = asked + row * PARAMETERS
    if tl.load(ask + REPORTS) <= 1:
        return
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + tl.load(ask + SOURCE).to(tl.int64) * stride + at, mask=at < width, other=float("-inf"))
    _leaders(tl.where(at < width, leader_of(x, at), -1), count, leading + (row * blocks + block) * LEADERS)


@triton.jit(do_not_specialize=["count"])
def leaders_of_rows(asked, leading, leaders, blocks, count, SIZE: tl.constexpr):
    """leaders int64 [R, LEADERS]: the `count` most likely of the blocks' leading ones. SIZE: at least P * LEADERS."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    ask = asked + row * PARAMETERS
    if tl.load(ask + REPORTS) <= 1:
        return
    there = (place % LEADERS < count) & (place < blocks * LEADERS)
    _leaders(tl.load(leading + row * blocks * LEADERS + place, mask=there, other=-1), count, leaders + row * LEADERS)


@triton.jit(do_not_specialize=["count"])
def listed_logits(logits, stride, asked, listed, ranked, count, SIZE: tl.constexpr):
    """ranked fp64 [R, count, 2]: the logits of each row's tokens of listed int32 [R, count]; none above them yet.
    SIZE: at least count."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    ask = asked + row * PARAMETERS
    there = place < tl.load(ask + LISTED)
    of = logits + tl.load(ask + SOURCE).to(tl.int64) * stride
    x = tl.load(of + tl.load(listed + row * count + place, mask=there, other=0), mask=there, other=0.0)
    out = ranked + (row * count + place) * 2
    tl.store(out, x.to(tl.float64), mask=there)
    tl.store(out + 1, tl.zeros((SIZE,), tl.float64), mask=there)


@triton.jit(do_not_specialize=["count"])
def rank_listed(logits, stride, asked, ranked, width, count, BLOCK: tl.constexpr):
    """ranked: how many logits are above those of the listed tokens."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    ask, at = asked + row * PARAMETERS, block * BLOCK + tl.arange(0, BLOCK)
    of = logits + tl.load(ask + SOURCE).to(tl.int64) * stride
    x = tl.load(of + at, mask=at < width, other=float("-inf")).to(tl.float64)
    for number in range(tl.load(ask + LISTED).to(tl.int32)):
        out = ranked + (row * count + number) * 2
        tl.atomic_add(out + 1, tl.sum((x > tl.load(out)).to(tl.float64), 0))
