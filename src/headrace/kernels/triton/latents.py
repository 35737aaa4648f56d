"""What lies between projections and attention where attention is latent, on a GPU (latent_row_kernels).

T: rows, Hq: query heads, D = rotated + rank: size of the one KV head. A row has the same bits whatever other rows ride
along. `heads` [Hq (plain + value), rank] has of each head U [plain, rank], then W [value, rank] (models.latent).
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headrace.kernels.layer_shape import Latent
from headrace.kernels.triton import latent_row_kernels
from headrace.kernels.triton.launching import direct

log = logging.getLogger(__name__)

TOGETHER = 1024
"""Numbers of the heads that one program rotates."""
Of = Literal["keys", "values"]


class HeadTile(NamedTuple):
    """Rows and outputs of a tile, and inputs of one product."""

    rows: int
    columns: int
    step: int


EXACT, FEW = HeadTile(64, 64, 64), HeadTile(16, 64, 64)
"""The tile that the other one, for fewer rows, is compared with."""


def queries(heads: Tensor, matrix: Tensor, spec: Latent, cos_sin: Tensor) -> Tensor:
    """heads [T, Hq, rotated + plain], as projected -> [T, Hq, D]: rotated, and multiplied by U. cos_sin fp32
    [T, rotated]."""
    rows, count, query = heads.shape
    turned = query - spec.plain
    out = torch.empty(rows, count, turned + spec.rank, dtype=heads.dtype, device=heads.device)
    if not rows:
        return out
    padded = _rounded(turned)
    together = max(1, min(_rounded(count), TOGETHER // padded))
    direct(latent_row_kernels.turn_queries)[(rows, -(-count // together))](
        heads, cos_sin, out, heads.stride(0), cos_sin.stride(0), HEADS=count, QUERY=query, D=out.shape[2],
        TURNED=turned, P=padded, TOGETHER=together, num_warps=4,
    )  # fmt: skip
    _multiply(heads[..., turned:], matrix, "keys", out[..., turned:])
    return out


def keys(projected: Tensor, norm: Tensor, spec: Latent, cos_sin: Tensor) -> Tensor:
    """projected [T, D] -> [T, 1, D], which is values as well: rotated, and the latent normed. cos_sin fp32
    [T, rotated]."""
    rows, dim = projected.shape
    out = torch.empty(rows, 1, dim, dtype=projected.dtype, device=projected.device)
    if rows:
        turned = dim - spec.rank
        direct(latent_row_kernels.make_keys)[(rows,)](
            projected, norm, cos_sin, out, projected.stride(0), cos_sin.stride(0), spec.norm_eps,
            RANK=spec.rank, TURNED=turned, P=_rounded(spec.rank), R=_rounded(turned), num_warps=4,
        )  # fmt: skip
    return out


def values(attended: Tensor, matrix: Tensor, spec: Latent) -> Tensor:
    """attended [T, Hq, D] -> [T, Hq, value]: its latents multiplied by W."""
    rows, count, dim = attended.shape
    out = torch.empty(rows, count, spec.value, dtype=attended.dtype, device=attended.device)
    if rows:
        _multiply(attended[..., dim - spec.rank :], matrix, "values", out)
    return out


def _multiply(x: Tensor, matrix: Tensor, of: Of, out: Tensor) -> None:
    few = len(x) <= FEW.rows and agrees(FEW, x.dtype, x.device)
    multiply(FEW if few else EXACT, x, matrix, of, out)


def multiply(tile: HeadTile, x: Tensor, matrix: Tensor, of: Of, out: Tensor) -> None:
    """Each head of x [T, Hq, K], whose numbers are contiguous, times its own part of `matrix` into out [T, Hq, N], by
    such tiles. keys: U, of K = plain and N = rank; values: W, of K = rank and N = value."""
    (rows, count, inputs), outputs = x.shape, out.shape[2]
    of_head, width = len(matrix) // count, matrix.stride(0)
    part, w_out, w_in = (matrix, 1, width) if of == "keys" else (matrix[of_head - outputs :], width, 1)
    grid = (-(-rows // tile.rows), -(-outputs // tile.columns), count)
    direct(latent_row_kernels.multiply_heads)[grid](
        x, part, out, rows, x.stride(0), x.stride(1), of_head * width, w_out, w_in, out.stride(0), out.stride(1),
        INPUTS=inputs, OUTPUTS=outputs, ROWS=tile.rows, COLUMNS=tile.columns,
        STEP=tile.step if x.element_size() == 2 else tile.step // 2, PRECISION="ieee", num_warps=4, num_stages=3,
    )  # fmt: skip


@cache
def agrees(tile: HeadTile, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether such tiles have the bits of EXACT on this device, which is asked. In Triton's interpreter they do."""
    return device.type != "cuda" or compared(tile, dtype, device)


def compared(tile: HeadTile, dtype: torch.dtype, device: torch.device) -> bool:
    """`agrees`, asked now, of two heads as DeepSeek's are."""
    count, rank, plain, value, generator = 2, 512, 128, 128, torch.Generator(device).manual_seed(1)
    x, matrix = (
        torch.randn(*shape, generator=generator, device=device).to(dtype)
        for shape in ((64, count, rank), (count * (plain + value), rank))
    )
    shapes: tuple[tuple[Of, int, int], ...] = ("keys", plain, rank), ("values", rank, value)
    for of, inputs, outputs in shapes:
        ours, exact = (torch.empty(64, count, outputs, dtype=dtype, device=device) for _ in range(2))
        multiply(EXACT, x[..., :inputs], matrix, of, exact)
        multiply(tile, x[..., :inputs], matrix, of, ours)
        if not torch.equal(ours, exact):
            log.warning("%s gives other bits on this GPU for %s of latents, and is left alone", tile, of)
            return False
    return True


def _rounded(count: int) -> int:
    """The power of two at or above it."""
    return 1 << (count - 1).bit_length()
