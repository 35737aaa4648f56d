"""Products with weights on a GPU: a row has the same bits at every number of rows.

T: rows, K: inputs, N: outputs, I: MLP width. Tiles for few rows keep many reads of weights under way; many rows go by
cuBLAS where it gives the same bits, and by large tiles elsewhere. What does is told by `agreement`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from headrace.kernels.triton import rows as gpu_rows
from headrace.kernels.triton.agreement import BATCH, agrees, cublas_batches
from headrace.kernels.triton.attention import processors
from headrace.kernels.triton.tiles import EXACT, Tile, product, takes_blocks

PLAIN = (Tile(16, 32, 256, 4, 4), Tile(32, 32, 128, 4, 5), Tile(64, 32, 128, 4, 5))
FEW = (Tile(16, 64, 256, 4, 4, "few"), Tile(32, 64, 128, 4, 6, "few"), Tile(64, 64, 128, 4, 5, "few"), *PLAIN)
GATED_PLAIN = (Tile(16, 32, 128, 4, 4), Tile(32, 32, 128, 4, 5), Tile(64, 32, 64, 4, 5))
GATED = (Tile(16, 64, 128, 4, 5, "few"), Tile(32, 64, 128, 4, 5, "few"), Tile(64, 64, 64, 4, 6, "few"), *GATED_PLAIN)
"""Of up to so many rows, for products and for gates with what they let through; `few` where blocks can be copied."""
NARROW = (Tile(16, 16, 256, 1, 8, "few"), Tile(32, 16, 256, 1, 6, "few"))
"""Before these, for weights of so few outputs that each such tile has a multiprocessor for itself: four times as many
read at once, each with 56 KiB or more under way."""
MANY = (
    Tile(128, 256, 64, 8, 3, "many"),
    Tile(128, 128, 64, 4, 4, "many"),
    Tile(64, 128, 64, 4, 6, "many"),
    Tile(128, 128, 64, 8, 3),
    EXACT,
)
"""Of more rows of 16 bits, the largest first: those of which there are enough for the multiprocessors are taken."""
ENOUGH = 0.6
"""Tiles for each multiprocessor."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, wide: bool) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N] in x's type, or fp32 if `wide`."""
    out = torch.empty(len(x), len(weight), dtype=torch.float32 if wide else x.dtype, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, done = len(x), 0
    if rows > FEW[-1].rows and bias is None and not wide:
        for count in _in_batches(rows, cublas_batches(x, weight)):
            whole = count == rows
            part, into = (x, out) if whole else (x[done : done + count], out[done : done + count])
            torch.mm(part, weight.t(), out=into)
            done += count
    if done < rows:
        rest, into = (x[done:], out[done:]) if done else (x, out)
        product(_tile(rest, weight, into), rest, weight, bias, into)
    return out


@lru_cache(1 << 12)
def _in_batches(rows: int, batches: tuple[int, ...]) -> list[int]:
    """Numbers of rows that cuBLAS multiplies, one after another, of so many. A rest of few rows reads all weights
    again: small batches are taken for the last rows only."""
    found, left = list[int](), rows
    while fitting := [count for count in batches if BATCH <= count <= left or count == left]:
        found.append(fitting[-1])
        left -= fitting[-1]
    return found


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str) -> Tensor:
    """f(gate) * up for x [T, K] times weight [2 I, K] transposed, plus bias [2 I], = (gate, up): [T, I]. To the bits of
    `linear` and rows.gated, in one launch where rows are few. gate: as in ops.gated_linear."""
    out = _activated(GATED, x, weight, bias, gate, gated=True)
    return gpu_rows.gated(linear(x, weight, bias, wide=False), gate) if out is None else out


def activated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """f of `linear`: [T, N]. To the bits of that and rows.activate, in one launch where rows are few. kind: relu, gelu
    or gelu_tanh."""
    out = _activated(FEW, x, weight, bias, kind, gated=False)
    return gpu_rows.activate(linear(x, weight, bias, wide=False), kind) if out is None else out


def _activated(
    tiles: tuple[Tile, ...], x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, gated: bool
) -> Tensor | None:
    """The product with its activation; None for no rows, or more than the tiles take."""
    x = x if x.stride(1) == 1 else x.contiguous()
    tile = _of_few(tiles, x, weight, kind, gated) if len(x) else None
    if tile is None:
        return None
    out = torch.empty(len(x), len(weight) // (1 + gated), dtype=x.dtype, device=x.device)
    product(tile, x, weight, bias, out, kind, gated)
    return out


def prepare(weight: Tensor) -> Tensor:
    """The weight, once the ways that decoding takes without activations, and cuBLAS, have been compared. Others are as
    a step first takes them, which is computed before it is recorded."""
    for tile in (*NARROW, *FEW[: -len(PLAIN)]) if takes_blocks(weight) else PLAIN:
        agrees(tile, weight.dtype, weight.device)
    cublas_batches(torch.empty(0, weight.shape[1], dtype=weight.dtype, device=weight.device), weight)
    return weight


def _of_few(tiles: tuple[Tile, ...], x: Tensor, weight: Tensor, kind: str = "", gated: bool = False) -> Tile | None:
    """The tiles for these rows, if they are few."""
    if len(x) > tiles[-1].rows:
        return None
    rows, blocks = len(x), takes_blocks(x, weight)
    narrow = -(-len(weight) // (1 + gated) // NARROW[0].columns) <= processors(x.device)
    for tile in (*NARROW, *tiles) if narrow else tiles:
        fits = rows <= tile.rows and (blocks or tile.way == "plain")
        if fits and agrees(tile, x.dtype, x.device, kind, gated):
            return tile
    return None


def _tile(x: Tensor, weight: Tensor, out: Tensor) -> Tile:
    """The tiles for these rows."""
    few = _of_few(FEW, x, weight)
    if few is not None or x.element_size() != 2:
        return few or EXACT
    wanted, blocks = ENOUGH * processors(x.device), takes_blocks(x, weight, out)
    for tile in MANY:
        count = -(-len(x) // tile.rows) * -(-len(weight) // tile.columns)
        if count >= wanted and (blocks or tile.way == "plain") and agrees(tile, x.dtype, x.device):
            return tile
    return EXACT
