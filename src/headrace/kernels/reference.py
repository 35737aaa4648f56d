"""The slow truth: attention over chunks in plain torch, in the canonical merge order of docs/attention.md.

r: rows of an item, Hq: query heads, G: query heads per KV head, Hk: KV heads, D: head size, 64: keys of a chunk.
Runs on any machine and in any dtype; every kernel is tested against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.config.attention import first_seen
from headrace.kernels.backend import Capabilities, PiecewiseBackend, PreparedStep
from headrace.kernels.indexer import block_scores, gather, index_scores
from headrace.kernels.records import Layout, Mask, Pool, StepInputs
from headrace.kernels.state import (
    AttnState,
    Partial,
    RunningState,
    StateRows,
    choose,
    empty_partial,
    merge_blocks,
    merge_partials,
    merge_states,
    normalise,
    part_of,
)
from headrace.kernels.state import empty_running as state_of_none
from headrace.types import BLOCK_CHUNKS, CHUNK

__all__ = [
    "append", "attend", "block_scores", "capabilities", "described", "empty_running", "finish", "gather",
    "index_scores", "layout", "merge_blocks", "merge_into", "merge_states", "missing", "partial", "prepare",
    "states_of",
]  # fmt: skip
"""What a backend has (kernels.backend)."""

capabilities = Capabilities(
    name="reference",
    kernels="the reference",
    spoken_of="it",
    int8=True,
    capped=True,
    pieces=True,
    sparse=True,
    automatic=True,
)

ROW_TILE = 16
"""Rows are padded to a multiple of this: torch adds up fewer rows in another order."""


def missing() -> str | None:
    return None


def described(device: torch.device) -> str:
    return "asked for"


def layout(dtype: torch.dtype, dim: int) -> Layout:
    return "plain"


def visible(positions: Tensor, key_start: int, window: int | None) -> Tensor:
    """Which of 64 keys from key_start on the rows at `positions` [r] see: bool [r, 64]."""
    keys = torch.arange(key_start, key_start + CHUNK, device=positions.device)
    seen = keys[None] <= positions[:, None]
    if window is not None:
        seen &= keys[None] >= first_seen(positions, window)[:, None]
    return seen


def chunk_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    bias: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    cap: float | None = None,
) -> Partial:
    """Attention of q [r, Hq, D] over one chunk: k [Hk, D, 64], v [Hk, 64, D], seen [r, 64], bias [Hq, 64] -> Partial.

    cap: see kernels.records.Mask.

    Probabilities are rounded to q's dtype relative to the chunk's own maximum, so that a chunk contributes the same
    whatever came before it (docs/architecture.md, rule 3). scales [Hk, 64] each: those of int8 keys, which multiply the
    scores, and of int8 values, which multiply the probabilities before they are rounded.
    """
    rows, heads, dim = q.shape
    kv_heads = k.shape[0]
    pad = -rows % ROW_TILE
    tile = torch.nn.functional.pad(q.float(), (0, 0, 0, 0, 0, pad)).reshape(rows + pad, kv_heads, -1, dim)
    tile = tile.permute(1, 0, 2, 3).reshape(kv_heads, -1, dim)
    scores = _rows(torch.bmm(tile, k.float()), rows, heads)
    if scales is not None:
        scores = scores * scales[0].repeat_interleave(heads // kv_heads, 0)
    scores = scores * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    m = scores.amax(-1)
    p = torch.exp(scores - torch.where(m == -torch.inf, 0.0, m)[..., None])
    total = p.sum(-1)
    if scales is not None:  # the scale of a key that a row does not see may be anything
        p = torch.where(seen[:, None], p * scales[1].repeat_interleave(heads // kv_heads, 0), 0.0)
    p = torch.nn.functional.pad(p.to(q.dtype).float(), (0, 0, 0, 0, 0, pad)).reshape(rows + pad, kv_heads, -1, CHUNK)
    # What no row sees may be garbage of a slot's former owner, and 0 times NaN is NaN.
    values = v.float().masked_fill(~seen.any(0)[:, None], 0.0)
    acc = torch.bmm(p.permute(1, 0, 2, 3).reshape(kv_heads, -1, CHUNK), values)
    return Partial(_rows(acc, rows, heads), m, total)


def _rows(tile: Tensor, rows: int, heads: int) -> Tensor:
    """[Hk, padded rows * G, X] back to [rows, Hq, X]."""
    kv_heads, _, width = tile.shape
    return (
        tile.reshape(kv_heads, -1, heads // kv_heads, width)[:, :rows].permute(1, 0, 2, 3).reshape(rows, heads, width)
    )


class RunningRows:
    """Running states of all rows of a step: chunks are merged into a block, full blocks into the total."""

    def __init__(self, start: RunningState) -> None:
        """Goes on from `start`, which stays as it is."""
        self.total, self.block, self.block_of = _copy(start.total), _copy(start.block), start.block_of.clone()

    def add(self, begin: int, end: int, key_start: int, chunk: Partial) -> None:
        """Merges one chunk's Partial into rows begin .. end-1."""
        rows = slice(begin, end)
        block = key_start // (CHUNK * BLOCK_CHUNKS)
        if bool((self.block_of[rows] != block).any()):
            self._close(rows, self.block_of[rows] != block)
            self.block_of[rows] = block
        _store(self.block, rows, merge_partials(_load(self.block, rows), chunk))

    def _close(self, rows: slice, which: Tensor) -> None:
        """Merges the finished blocks of the rows in `which` into their totals and begins new ones."""
        total, block = _load(self.total, rows), _load(self.block, rows)
        _store(self.total, rows, choose(which, merge_partials(total, block), total))
        _store(self.block, rows, choose(which, empty_partial(*block.acc.shape), block))

    def state(self) -> RunningState:
        return RunningState(self.total, self.block, self.block_of)


def _copy(partial: Partial) -> Partial:
    return Partial(partial.acc.clone(), partial.m.clone(), partial.l.clone())


def _load(partial: Partial, rows: slice) -> Partial:
    return Partial(partial.acc[rows], partial.m[rows], partial.l[rows])


def _store(partial: Partial, rows: slice, value: Partial) -> None:
    partial.acc[rows], partial.m[rows], partial.l[rows] = value.acc, value.m, value.l


def partial(q: Tensor, pool: Pool, mask: Mask, state: RunningState | None = None) -> RunningState:
    """Merges the mask's chunks for q [R, Hq, D] on from `state` (None: from nothing): a new state.

    Each row's chunks come in ascending order, from call to call too. However the items are cut into calls, `finish`
    gives the bits of one `attend`.
    """
    _check_scales(pool)
    if state is not None:
        state.expect(tuple(q.shape), 1.0)
    running = RunningRows(state or state_of_none(*q.shape))
    for slot, key, begin, end in mask.items.tolist():
        seen = visible(mask.positions[begin:end], key, mask.window)
        near = None if mask.bias is None else mask.bias[:, key : key + CHUNK]
        if near is not None and near.shape[-1] < CHUNK:
            near = torch.nn.functional.pad(near, (0, CHUNK - near.shape[-1]))
        scales = None if pool.k_scale is None or pool.v_scale is None else (pool.k_scale[slot], pool.v_scale[slot])
        chunk = chunk_partial(q[begin:end], pool.k[slot], pool.v[slot], seen, mask.scale, near, scales, mask.cap)
        running.add(begin, end, key, chunk)
    return running.state()


def _check_scales(pool: Pool) -> None:
    if [pool.k_scale is None, pool.v_scale is None] != [pool.k.dtype != torch.int8] * 2:
        raise ValueError(f"int8 pools need both k_scale and v_scale, others neither; the pools are {pool.k.dtype}")


def empty_running(rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> RunningState:
    """The state of rows that have met no chunk. `dtype` is the one computed in, which only kernels care about."""
    return state_of_none(rows, heads, head_dim)


def merge_into(total: Partial, blocks: Sequence[StateRows], unit: float) -> None:
    """Rows of total [R, Hq, D] become the merge of themselves and then each block, in place; all count in `unit`."""
    if unit != 1.0:
        raise ValueError(f"the reference merges in natural logarithms, the state counts in {unit:.4f}")
    for begin, end, block in blocks:
        rows = part_of(total, begin, end)
        _store(rows, slice(None), merge_partials(rows, block))


def states_of(state: RunningState) -> AttnState:
    """The attention of what was merged, as a value that merges."""
    state.expect(state.shape, 1.0)
    return normalise(merge_partials(state.total, state.block))


def finish(state: RunningState, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
    """The attention of what was merged: [R, Hq, D] in `dtype`. sinks [Hq]: see kernels.records.Mask."""
    state.expect(state.shape, 1.0)
    merged = merge_partials(state.total, state.block)
    if sinks is not None:
        more = torch.where(merged.l > 0, torch.exp(sinks - merged.m), 0.0)
        merged = Partial(merged.acc, merged.m, merged.l + more)
    return normalise(merged).out.to(dtype)


def attend(q: Tensor, pool: Pool, mask: Mask) -> Tensor:
    """The finished attention of a plan's rows over all of its items: [R, Hq, D] in q's dtype. See `partial`."""
    return finish(partial(q, pool, mask), q.dtype, mask.sinks)


def append(pool: Pool, k_new: Tensor, v_new: Tensor, slots: Tensor, offsets: Tensor) -> None:
    """Writes k_new, v_new [T, Hk, D] into the pool as key offsets[t] of chunk slots[t], int32 [T] each."""
    _check_scales(pool)
    chunk, key = slots.long(), offsets.long()
    if pool.k_scale is not None and pool.v_scale is not None:
        k_new, pool.k_scale[chunk, :, key] = quantise(k_new)
        v_new, pool.v_scale[chunk, :, key] = quantise(v_new)
    pool.k[chunk, :, :, key] = k_new
    pool.v[chunk, :, key] = v_new


def prepare(step: StepInputs) -> PreparedStep | None:
    """None: there is nothing to prepare."""
    return None


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, Hk, D] as int8 [T, Hk, D] times scales fp32 [T, Hk]: symmetric, the greatest |x| of a head being 127.

    Where x is no number, neither is its scale.
    """
    x = x.float()
    scale = x.abs().amax(-1) / 127.0
    steps = (x / scale[..., None]).clamp(-127.0, 127.0).nan_to_num(0.0)
    return torch.where(scale[..., None] > 0, steps, 0.0).round().to(torch.int8), scale


if TYPE_CHECKING:  # it keeps the contract
    from headrace.kernels import reference as this_module

    _: PiecewiseBackend = this_module
