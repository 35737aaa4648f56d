"""Row-wise operations of the decoder on a GPU whose sums are ours: a row has the same bits at every number of rows.

T: rows, K: inputs, N: outputs. What is elementwise is left to torch, and so is its layer norm, which takes a row at a
time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.triton import row_kernels
from headrace.kernels.triton.attention import processors

ROWS = 64
"""Of a tensor core's product: fewer would be another instruction, with other sums."""
SEGMENT = 1024
"""Inputs that are added up together before they are added to the rest: part of the order, as ROWS is."""
LARGEST_ROW = 1 << 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, wide: bool) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N] in x's type, or fp32 if `wide`."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty(rows, outputs, dtype=torch.float32 if wide else x.dtype, device=x.device)
    if not rows:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    many = rows > 4 * ROWS
    columns, segments = 128 if many else 64, -(-inputs // SEGMENT)
    grid = (-(-rows // ROWS), -(-outputs // columns))
    split = segments > 1 and grid[0] * grid[1] < 2 * processors(x.device)
    into = torch.empty(segments, rows, outputs, device=x.device) if split else out
    plain = x.dtype == torch.float32
    row_kernels.product[(*grid, segments if split else 1)](
        x, weight, weight if bias is None else bias, into, rows, inputs, outputs, x.stride(0),
        ROWS=ROWS, COLUMNS=columns, STEP=32 if plain else 64, SEGMENT=SEGMENT, SPLIT=split, BIAS=bias is not None,
        PRECISION="ieee", num_warps=4, num_stages=2 if plain else 4,
    )  # fmt: skip
    if split:
        elements, width = rows * outputs, 1024
        row_kernels.add_segments[(-(-elements // width),)](
            into, weight if bias is None else bias, out, elements, outputs, segments, WIDTH=width, BIAS=bias is not None
        )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in fp32: [..., H], contiguous. ValueError for too wide rows."""
    width = x.shape[-1]
    if width > LARGEST_ROW:
        raise ValueError(f"rows of at most {LARGEST_ROW} elements are normed on a GPU, got {width}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    parts = x if x.dim() == 3 else x.reshape(-1, 1, width)
    rows, heads, _ = parts.shape
    if parts.stride(2) != 1 or (heads > 1 and parts.stride(1) != width):
        parts = parts.contiguous()
    row_kernels.rms_norm[(rows, heads)](
        parts, weight, out, width, eps, parts.stride(0), heads, P=max(16, 1 << (width - 1).bit_length()), num_warps=4
    )
    return out
