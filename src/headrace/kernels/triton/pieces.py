"""Attention in pieces on a GPU: states that go from call to call, or from rank to rank. See kernels.state.

R: rows, Hq: query heads, D: head size. A state's block is a span of 512 keys; m counts in units of log 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.device import current
from headrace.kernels import state as algebra
from headrace.kernels.records import Mask, Pool
from headrace.kernels.state import AttnState, Partial, RunningState, StateRows, choose
from headrace.kernels.triton import piece_kernels
from headrace.kernels.triton.arena import Arena, TaskSizes
from headrace.kernels.triton.attention import TileWork, bounds
from headrace.kernels.triton.heads import Heads
from headrace.kernels.triton.launching import direct
from headrace.kernels.triton.limits import check
from headrace.kernels.triton.piece_schedule import pieces
from headrace.kernels.triton.tile_schedule import Bounds, Int64, TileSchedule
from headrace.kernels.triton.walk_options import heads_of

LOG_2 = math.log(2.0)


def empty_running(rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> RunningState:
    """The state of rows that have met no chunk."""
    return algebra.empty_running(rows, heads, head_dim, LOG_2, current().place)


def partial(q: Tensor, pool: Pool, mask: Mask, state: RunningState | None = None) -> RunningState:
    """Merges the mask's chunks for q [R, Hq, D] on from `state` (None: from nothing): a new state."""
    rows, heads, dim = q.shape
    check(q.dtype, dim, pool.once)
    if state is not None:
        state.expect(tuple(q.shape), LOG_2)
    each = heads_of((heads, pool.k.shape[1], dim), pool.once, q.device)
    limits = bounds(each, q.device, pool.k.dtype, plain=mask.bias is None and mask.cap is None)
    for sent in mask.keep(("pieces", mask.window, limits, q.device), lambda: _sent(mask, limits, q.device)):
        state = _merged(sent, each, q, pool, mask, state)
    return algebra.empty_running(rows, heads, dim, LOG_2, q.device) if state is None else state


class _Sent(NamedTuple):
    """A piece's tasks on the device, and the first and the last span of each row there, int32 [2, R]."""

    schedule: TileSchedule
    arena: Arena
    reach: Tensor


def _sent(mask: Mask, limits: Bounds, place: torch.device) -> list[_Sent]:
    found, positions = [], mask.positions.numpy()
    for done, first, last in pieces(mask.items.numpy(), positions, limits):
        arena = Arena(len(positions), {mask.window: TaskSizes.of(done)}, current(), place, pinned=False)
        arena.fill({mask.window: done})
        arena.move(positions, np.empty(0, np.int32))
        arena.send()
        reach = torch.from_numpy(np.stack((first, last))).to(place, non_blocking=True)
        found.append(_Sent(done, arena, reach))
    return found


def _merged(sent: _Sent, heads: Heads, q: Tensor, pool: Pool, mask: Mask, state: RunningState | None) -> RunningState:
    """The state gone on with by a piece."""
    arena, place = sent.arena, q.device
    tasks = arena.tasks[mask.window]
    work = TileWork.of(sent.schedule, tasks, heads)
    spans = (*work.states, tasks.bases.there, *sent.reach)
    if state is None:
        work.states[1].fill_(-torch.inf)  # tasks write those of what their rows see
    else:
        begun = (*_parts(state.block), state.block_of.to(place))
        direct(piece_kernels.begin)[(len(q), heads.heads)](*spans, *begun, **_sizes(q), num_warps=1)
    work.split(q, pool, replace(mask, positions=arena.positions.there), resumes=state is not None)
    return _folded(spans, q, state)


def _folded(spans: tuple[Tensor, ...], q: Tensor, state: RunningState | None) -> RunningState:
    left = RunningState(_room(q), _room(q), torch.empty(len(q), dtype=torch.int32, device=q.device), LOG_2)
    begun = left if state is None else replace(state, block_of=state.block_of.to(q.device))
    direct(piece_kernels.fold)[(len(q), q.shape[1])](
        *spans, *_tensors(begun), *_tensors(left), **_sizes(q), BEGUN=state is not None, num_warps=1
    )
    return left


def _room(q: Tensor) -> Partial:
    """Memory for a Partial of these rows."""
    acc = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    return Partial(acc, *(torch.empty(q.shape[:2], device=q.device) for _ in range(2)))


def _parts(part: Partial) -> tuple[Tensor, Tensor, Tensor]:
    return part.acc, part.m, part.l


def _tensors(state: RunningState) -> tuple[Tensor, ...]:
    return (*_parts(state.total), *_parts(state.block), state.block_of)


def _sizes(like: Tensor) -> dict[str, int]:
    """Of states of rows of heads [R, Hq, D]."""
    _, heads, dim = like.shape
    return {"HEADS": heads, "D": dim, "P": max(16, 1 << (dim - 1).bit_length())}


def finish(state: RunningState, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
    """The attention of what was merged: [R, Hq, D] in `dtype`, zeros for rows that saw no key. sinks [Hq]: see Mask."""
    rows, heads, _ = state.shape
    out = torch.empty(state.shape, dtype=dtype, device=state.total.acc.device)
    if rows:
        parts, flag = (*_parts(state.total), *_parts(state.block)), {"SINKS": sinks is not None}
        direct(piece_kernels.finish)[(rows, heads)](
            *parts, out if sinks is None else sinks, out, **_sizes(state.total.acc), **flag, num_warps=1
        )
    return out


def merge_into(total: Partial, blocks: Sequence[StateRows], unit: float) -> None:
    """Rows of total [R, Hq, D] become the merge of themselves and then each block, in place, by one launch. Raises
    ValueError for another unit."""
    if unit != LOG_2:
        raise ValueError(f"the states count in {unit:.4f} natural logarithms, these kernels in {LOG_2:.4f}")
    rows, heads, _ = total.acc.shape
    if not rows or not blocks:
        return
    table = torch.from_numpy(np.concatenate(_addresses(blocks, rows))).to(total.acc.device, non_blocking=True)
    direct(piece_kernels.merge)[(rows, heads)](
        *_parts(total), table[: rows + 1], table[rows + 1 :], **_sizes(total.acc), num_warps=1
    )


def _addresses(blocks: Sequence[StateRows], rows: int) -> tuple[Int64, Int64]:
    """Where the states of each of so many rows begin in a list, [rows + 1], and that list: addresses of acc, m and l of
    each, in the order of the blocks."""
    counts = np.array([each.end - each.begin for each in blocks])
    at = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    row = np.repeat([each.begin for each in blocks], counts) + at
    parts = [_parts(each.state) for each in blocks]
    first = np.array([[x.data_ptr() for x in each] for each in parts], dtype=np.int64)
    strides = np.array([x.stride(0) * x.element_size() for x in parts[0]], dtype=np.int64)
    listed = np.repeat(first, counts, axis=0) + at[:, None] * strides
    begins = np.searchsorted(np.sort(row), np.arange(rows + 1)).astype(np.int64)
    return begins, listed[np.argsort(row, kind="stable")].reshape(-1)


def merge_blocks(left: RunningState, right: RunningState) -> RunningState:
    """The merge of `left` continued by a block that was merged elsewhere from nothing. Whether right holds a single
    block, and one behind left's, is not looked at: the host would wait for the device."""
    right.expect(left.shape, left.unit)
    joins = right.block_of >= 0
    total = Partial(*(x.clone() for x in _parts(left.total)))
    merge_into(total, [StateRows(0, len(total.acc), left.block)], left.unit)
    block_of = torch.where(joins, right.block_of, left.block_of)
    return RunningState(choose(joins, total, left.total), choose(joins, right.block, left.block), block_of, left.unit)


def states_of(state: RunningState) -> AttnState:
    """The same as a value that merges: fp32, natural logarithms."""
    total = Partial(*(x.clone() for x in _parts(state.total)))
    merge_into(total, [StateRows(0, len(total.acc), state.block)], state.unit)
    return algebra.normalise(replace(total, m=total.m * LOG_2))
