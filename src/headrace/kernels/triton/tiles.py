"""Tiles by which products with weights are computed on a GPU, and their launch.

T: rows, K: inputs, N: outputs, I: MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels.triton import product_kernels
from headrace.kernels.triton.attention import processors

TOGETHER = 8
"""Tiles of rows that share columns of weights."""
AHEAD = 16
"""Lines of 128 bytes of each column that a product fetches while the kernel before it ends."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a tile and of a step over K, warps, and buffers for loads under way. blocks: by `product_by_blocks`."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    blocks: bool = False


EXACT = Tile(64, 64, 64, 4, 4)
"""The way that all others are compared with."""


def product(
    tile: Tile, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, kind: str = "", gated: bool = False
) -> None:
    """x [T, K] times weight [N, K] transposed, plus bias [N], into out [T, N], by tiles of one kind. kind: an
    activation of that. gated: of weight and bias [2 I, ...] = (gate, up) both, f(gate) * up into out [T, I]."""
    (rows, inputs), outputs = x.shape, out.shape[1]
    tiles = -(-rows // tile.rows) * -(-outputs // tile.columns)
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
    sizes = {"ROWS": tile.rows, "COLUMNS": tile.columns, "TOGETHER": TOGETHER, "BIAS": bias is not None}
    if tile.blocks:
        blocks = [
            TensorDescriptor.from_tensor(each, [size, tile.step])
            for each, size in ((x, tile.rows), (weight, tile.columns))
        ]
        into = TensorDescriptor.from_tensor(out, [tile.rows, tile.columns // 2])
        product_kernels.product_by_blocks[(min(tiles, processors(x.device)),)](
            *blocks, weight if bias is None else bias, into, rows, inputs, outputs, STEP=tile.step, **sizes, **options
        )
        return
    step = tile.step if x.dtype != torch.float32 else 32
    ahead = AHEAD if overlaps(x.device) else 0
    if ahead:
        options["launch_pdl"] = True
    product_kernels.product[(tiles,)](
        x, weight, weight if bias is None else bias, out, rows, inputs, outputs, x.stride(0), STEP=step,
        EVEN=inputs % step == 0, KIND=kind, GATED=gated, AHEAD=ahead, PRECISION="ieee", **sizes, **options,
    )  # fmt: skip


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may begin before the one in front of it has ended (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def takes_blocks(x: Tensor, weight: Tensor, out: Tensor) -> bool:
    """Whether `product_by_blocks` takes these: 16 bits each, rows that begin at multiples of 16 bytes, and a GPU that
    copies blocks by itself (elsewhere they are loaded one at a time)."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (9, 0):
        return False
    alike = x.dtype == weight.dtype == out.dtype and x.element_size() == 2
    tensors = (x, weight, out)
    return alike and all(x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.stride(1) == 1 for x in tensors)
