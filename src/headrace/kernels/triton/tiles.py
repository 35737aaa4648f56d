"""Tiles by which products with weights are computed on a GPU, and their launch.

T: rows, K: inputs, N: outputs, I: MLP width.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from headrace.kernels.triton import product_kernels
from headrace.kernels.triton.attention import processors
from headrace.kernels.triton.launch_entries import Blocks, block_form
from headrace.kernels.triton.launching import direct

TOGETHER = 8
"""Tiles of rows that share columns of weights."""
AHEAD = 16
"""Lines of 128 bytes of each column that a product fetches while the kernel before it ends."""


class Tile(NamedTuple):
    """Sizes of a tile and of a step over K, warps, and buffers for loads under way. way: its kernel, of which `few` and
    `many` copy blocks (takes_blocks)."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    way: Literal["plain", "few", "many"] = "plain"


EXACT = Tile(64, 64, 64, 4, 4)
"""The way that all others are compared with."""


def product(
    tile: Tile, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, kind: str = "", gated: bool = False
) -> None:
    """x [T, K] times weight [N, K] transposed, plus bias [N], into out [T, N], by tiles of one kind. kind: an
    activation of that. gated: of weight and bias [2 I, ...] = (gate, up) both, f(gate) * up into out [T, I]."""
    (rows, inputs), outputs = x.shape, out.shape[1]
    step = tile.step if x.element_size() == 2 else 32
    sizes = _sizes(tile, step, bias is not None, kind, gated, AHEAD if overlaps(x.device) else 0)
    added, count = weight if bias is None else bias, -(-outputs // tile.columns)
    if tile.way == "plain":
        direct(product_kernels.product)[(-(-rows // tile.rows) * count,)](
            x, weight, added, out, rows, inputs, outputs, x.stride(0), TOGETHER=TOGETHER, EVEN=inputs % step == 0,
            PRECISION="ieee", **sizes,
        )  # fmt: skip
        return
    from_x = Blocks(x, block_form(tile.rows, step))
    from_w = Blocks(weight, block_form(tile.columns, step))
    if tile.way == "few":
        direct(product_kernels.product_of_few)[(count,)](
            from_x, from_w, weight, added, out, rows, inputs, outputs, **sizes
        )
        return
    programs = min(-(-rows // tile.rows) * count, processors(x.device))
    into = Blocks(out, block_form(tile.rows, tile.columns // 2))
    direct(product_kernels.product_by_blocks)[(programs,)](
        from_x, from_w, added, into, rows, inputs, outputs, TOGETHER=TOGETHER, **sizes
    )


@cache
def _sizes(tile: Tile, step: int, biased: bool, kind: str, gated: bool, ahead: int) -> dict[str, Any]:
    """What a tile's kernel is compiled for."""
    sizes: dict[str, Any] = {"ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": step, "BIAS": biased}
    sizes |= {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.way == "many":
        return sizes
    return sizes | {"KIND": kind, "GATED": gated, "AHEAD": ahead} | ({"launch_pdl": True} if ahead else {})


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may begin before the one in front of it has ended (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def takes_blocks(*tensors: Tensor) -> bool:
    """Whether blocks of all of these can be copied: 16 bits an element, rows that begin at multiples of 16 bytes, and a
    GPU that copies blocks by itself (elsewhere they are loaded one at a time)."""
    for x in tensors:
        row, column = x.stride()
        if row % 8 or column != 1 or x.data_ptr() % 16 or x.element_size() != 2:
            return False
    return overlaps(tensors[0].device) or not tensors[0].is_cuda
