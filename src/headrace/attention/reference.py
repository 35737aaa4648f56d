"""The slow truth: attention over chunks in plain torch, in the canonical fold order of docs/attention.md.

r: rows of an item, Hq: query heads, G: query heads per KV head, Hk: KV heads, D: head size, 64: keys of a chunk.
Runs on any machine and in any dtype; every kernel is tested against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.attention.state import AttnState, Partial, empty_partial, fold, normalise
from headrace.types import BLOCK_CHUNKS, CHUNK

ROW_TILE = 16
"""Rows are padded to a multiple of this: torch adds up fewer rows in another order."""


def visible(positions: Tensor, key_start: int, window: int | None) -> Tensor:
    """Which of 64 keys from key_start on the rows at `positions` [r] see: bool [r, 64]."""
    keys = torch.arange(key_start, key_start + CHUNK, device=positions.device)
    seen = keys[None] <= positions[:, None]
    if window is not None:
        seen &= keys[None] > positions[:, None] - window
    return seen


def chunk_partial(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, bias: Tensor | None = None) -> Partial:
    """Attention of q [r, Hq, D] over one chunk: k [Hk, D, 64], v [Hk, 64, D], seen [r, 64], bias [Hq, 64] -> Partial.

    Probabilities are rounded to v's dtype relative to the chunk's own maximum, so that a chunk contributes the same
    whatever came before it (DESIGN, section 3, rule 3).
    """
    rows, heads, dim = q.shape
    kv_heads = k.shape[0]
    pad = -rows % ROW_TILE
    tile = torch.nn.functional.pad(q.float(), (0, 0, 0, 0, 0, pad)).reshape(rows + pad, kv_heads, -1, dim)
    tile = tile.permute(1, 0, 2, 3).reshape(kv_heads, -1, dim)
    scores = _rows(torch.bmm(tile, k.float()), rows, heads) * scale
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    m = scores.amax(-1)
    p = torch.exp(scores - torch.where(m == -torch.inf, 0.0, m)[..., None])
    total = p.sum(-1)
    p = torch.nn.functional.pad(p.to(v.dtype).float(), (0, 0, 0, 0, 0, pad)).reshape(rows + pad, kv_heads, -1, CHUNK)
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


class Folder:
    """Running states of all rows of a step: chunks are folded into a block, full blocks into the total."""

    def __init__(self, rows: int, heads: int, head_dim: int) -> None:
        self.total = empty_partial(rows, heads, head_dim)
        self.block = empty_partial(rows, heads, head_dim)
        self.block_of = torch.full((rows,), -1)

    def add(self, begin: int, end: int, key_start: int, chunk: Partial) -> None:
        """Folds one chunk's Partial into rows begin .. end-1."""
        rows = slice(begin, end)
        block = key_start // (CHUNK * BLOCK_CHUNKS)
        if bool((self.block_of[rows] != block).any()):
            self._close(rows, self.block_of[rows] != block)
            self.block_of[rows] = block
        _store(self.block, rows, fold(_load(self.block, rows), chunk))

    def _close(self, rows: slice, which: Tensor) -> None:
        """Folds the finished blocks of the rows in `which` into their totals and begins new ones."""
        total, block = _load(self.total, rows), _load(self.block, rows)
        folded = fold(total, block)
        _store(self.total, rows, Partial(*(torch.where(_wide(which, b), a, b) for a, b in _pairs(folded, total))))
        fresh = empty_partial(*block.acc.shape)
        _store(self.block, rows, Partial(*(torch.where(_wide(which, b), a, b) for a, b in _pairs(fresh, block))))

    def state(self) -> AttnState:
        """The finished attention of all rows."""
        return normalise(fold(self.total, self.block))


def _load(partial: Partial, rows: slice) -> Partial:
    return Partial(partial.acc[rows], partial.m[rows], partial.l[rows])


def _store(partial: Partial, rows: slice, value: Partial) -> None:
    for target, source in _pairs(partial, value):
        target[rows] = source


def _pairs(left: Partial, right: Partial) -> list[tuple[Tensor, Tensor]]:
    return [(left.acc, right.acc), (left.m, right.m), (left.l, right.l)]


def _wide(which: Tensor, like: Tensor) -> Tensor:
    return which.reshape(-1, *([1] * (like.dim() - 1)))


def partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    items: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
) -> AttnState:
    """Attention of q [R, Hq, D] over the segment that `items` lists; k [slots, Hk, D, 64], v [slots, Hk, 64, D].

    items int32 [n, 4] and positions int64 [R] as in attention.plan.Plan, each row's chunks in ascending order; bias
    fp32 [Hq, keys] by absolute position. States of disjoint segments merge to their union's (attention.state.merge).
    """
    folder = Folder(*q.shape)
    for slot, key, begin, end in items.tolist():
        seen = visible(positions[begin:end], key, window)
        near = None if bias is None else bias[:, key : key + CHUNK]
        if near is not None and near.shape[-1] < CHUNK:
            near = torch.nn.functional.pad(near, (0, CHUNK - near.shape[-1]))
        folder.add(begin, end, key, chunk_partial(q[begin:end], k[slot], v[slot], seen, scale, near))
    return folder.state()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    items: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The finished attention of a plan's rows over all of its items: [R, Hq, D] in q's dtype. See `partial`."""
    return partial(q, k, v, items, positions, scale=scale, window=window, bias=bias).out.to(q.dtype)


def append(pool_k: Tensor, pool_v: Tensor, k: Tensor, v: Tensor, slots: Tensor, offsets: Tensor) -> None:
    """Writes k, v [T, Hk, D] into the pools as key offsets[t] of chunk slots[t], int32 [T] each."""
    chunk, key = slots.long(), offsets.long()
    pool_k[chunk, :, :, key] = k
    pool_v[chunk, :, key] = v
