"""States of attention on a GPU, in Triton: begun, folded span by span, merged and finished.

R: rows, P: D rounded up to a power of two. A program has one row and one of its heads. A state is (acc [R, HEADS, D],
m [R, HEADS], z [R, HEADS]), unnormalised and in units of log 2: see attention_kernels, whose merge this is.
"""

# mypy: ignore-errors
# Triton reads the source of these functions: annotations are its own.

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.attention_kernels import _finish, _merge


@triton.jit
def _at(row, HEADS: tl.constexpr):
    """Number of this program's state among those of rows."""
    return row * HEADS + tl.program_id(1) + tl.arange(0, 1)


@triton.jit
def _load(acc_of, m_of, z_of, at, D: tl.constexpr, P: tl.constexpr):
    """(m [1], z [1], acc [1, P])."""
    d = tl.arange(0, P)[None, :]
    return tl.load(m_of + at), tl.load(z_of + at), tl.load(acc_of + at[:, None] * D + d, mask=d < D, other=0.0)


@triton.jit
def _store(acc_of, m_of, z_of, at, m, z, acc, D: tl.constexpr, P: tl.constexpr):
    d = tl.arange(0, P)[None, :]
    tl.store(m_of + at, m)
    tl.store(z_of + at, z)
    tl.store(acc_of + at[:, None] * D + d, acc, mask=d < D)


@triton.jit
def _empty(P: tl.constexpr):
    return tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32), tl.zeros((1, P), tl.float32)


@triton.jit
def begin(
    acc_of, m_of, z_of, bases, first, last, block_acc, block_m, block_z, block_of,
    HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The states of a row's spans, number bases[row] + span each: EMPTY, but of the span that its block is of, from
    which tasks go on, that."""
    row = tl.program_id(0).to(tl.int64)
    base, span_of_block = tl.load(bases + row).to(tl.int64), tl.load(block_of + row)
    for span in range(tl.load(first + row), tl.load(last + row) + 1):
        m, z, acc = _empty(P)
        if span == span_of_block:
            m, z, acc = _load(block_acc, block_m, block_z, _at(row, HEADS), D, P)
        _store(acc_of, m_of, z_of, _at(base + span, HEADS), m, z, acc, D, P)


@triton.jit
def fold(
    acc_of, m_of, z_of, bases, first, last, total_acc, total_m, total_z, block_acc, block_m, block_z, block_of,
    new_total_acc, new_total_m, new_total_z, new_block_acc, new_block_m, new_block_z, new_block_of,
    HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BEGUN: tl.constexpr,
):  # fmt: skip
    """What a row has merged (BEGUN: total and block; otherwise nothing), gone on with by the states of its spans. A
    span in which it saw no key leaves both as they are; one that goes on from the block takes its place."""
    row = tl.program_id(0).to(tl.int64)
    base, own = tl.load(bases + row).to(tl.int64), _at(row, HEADS)
    at = tl.full((1,), -1, tl.int32)
    m, z, acc = _empty(P)
    block_m_, block_z_, block = _empty(P)
    if BEGUN:
        at += 1 + tl.load(block_of + row)
        m, z, acc = _load(total_acc, total_m, total_z, own, D, P)
        block_m_, block_z_, block = _load(block_acc, block_m, block_z, own, D, P)
    for span in range(tl.load(first + row), tl.load(last + row) + 1):
        m2, z2, acc2 = _load(acc_of, m_of, z_of, _at(base + span, HEADS), D, P)
        seen = m2 != float("-inf")
        ends = seen & (at != span)
        m3, z3, acc3 = _merge(m, z, acc, block_m_, block_z_, block)
        m, z, acc = tl.where(ends, m3, m), tl.where(ends, z3, z), tl.where(ends[:, None], acc3, acc)
        block_m_, block_z_ = tl.where(seen, m2, block_m_), tl.where(seen, z2, block_z_)
        block, at = tl.where(seen[:, None], acc2, block), tl.where(seen, span, at)
    _store(new_total_acc, new_total_m, new_total_z, own, m, z, acc, D, P)
    _store(new_block_acc, new_block_m, new_block_z, own, block_m_, block_z_, block, D, P)
    tl.store(new_block_of + row + tl.arange(0, 1), at)


@triton.jit
def merge(acc_of, m_of, z_of, begins, addresses, HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """A row's state becomes the merge of itself and those of its list, begins[row] .. begins[row + 1] - 1, of which
    addresses int64 [n, 3] tells where acc, m and z lie."""
    row = tl.program_id(0).to(tl.int64)
    own, head = _at(row, HEADS), _at(0, HEADS)
    m, z, acc = _load(acc_of, m_of, z_of, own, D, P)
    for i in range(tl.load(begins + row), tl.load(begins + row + 1)):
        right_acc = tl.load(addresses + 3 * i).to(tl.pointer_type(tl.float32))
        right_m = tl.load(addresses + 3 * i + 1).to(tl.pointer_type(tl.float32))
        right_z = tl.load(addresses + 3 * i + 2).to(tl.pointer_type(tl.float32))
        m2, z2, acc2 = _load(right_acc, right_m, right_z, head, D, P)
        m, z, acc = _merge(m, z, acc, m2, z2, acc2)
    _store(acc_of, m_of, z_of, own, m, z, acc, D, P)


@triton.jit
def finish(
    total_acc, total_m, total_z, block_acc, block_m, block_z, sinks, out,
    HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The attention of total and block: out [R, HEADS, D]."""
    own, d = _at(tl.program_id(0).to(tl.int64), HEADS), tl.arange(0, P)[None, :]
    m, z, acc = _load(total_acc, total_m, total_z, own, D, P)
    m2, z2, acc2 = _load(block_acc, block_m, block_z, own, D, P)
    m, z, acc = _merge(m, z, acc, m2, z2, acc2)
    head = tl.program_id(1) + tl.arange(0, 1)
    result = _finish(m, z, acc, sinks, head, head < HEADS, SINKS)
    tl.store(out + own[:, None] * D + d, result.to(out.dtype.element_ty), mask=d < D)
