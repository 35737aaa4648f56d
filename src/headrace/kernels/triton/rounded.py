"""Products of rows rounded to int8 on a GPU (rounded_kernels): w8a8, the numbers of kernels.rounded_rows.

T: rows, K: inputs, K': K up to whole steps, N: outputs, E: experts. Each GPU is asked before its first product: tiles
that have other numbers than the definition are left alone.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.kernels import rounded_rows
from headrace.kernels.formats import Coded
from headrace.kernels.quantized import Rounded

if TYPE_CHECKING:
    from headrace.kernels.triton.experts import GpuRoutes

log = logging.getLogger(__name__)

STEP = 128
"""Inputs of a step of a tile: a line of memory."""
BLOCK = 4096
"""Inputs of a row that are rounded at once."""
ENOUGH = 0.6
"""Tiles for each multiprocessor."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes, and how: `columns` outputs of `rows` rows."""

    columns: int
    rows: int
    warps: int
    stages: int


TILES = (
    Tile(128, 256, 8, 3), Tile(128, 128, 8, 4), Tile(64, 64, 4, 5), Tile(64, 32, 4, 6), Tile(64, 16, 4, 6),
    Tile(32, 16, 4, 6),
)  # fmt: skip
"""The largest first."""


class GpuRounded:
    """A weight [N, K] that rows are rounded for. codes: int8 [N, K'], zeros behind K; scales: fp32 [N]."""

    __slots__ = ("codes", "scales", "shape")
    gated = False

    def __init__(self, coded: Coded, device: torch.device) -> None:
        self.shape = coded.shape
        codes = torch.nn.functional.pad(coded.codes.to(device), (0, -self.shape[1] % STEP))
        self.codes, self.scales = codes.contiguous(), coded.scales.view(-1).to(device).contiguous()

    @property
    def nbytes(self) -> int:
        """Memory of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class Grouping:
    """Where the rows of a product go that several experts share. table: see weight_kernels.product."""

    table: Tensor
    routes: GpuRoutes
    experts: int
    sent: bool


def pack(coded: Coded, device: torch.device) -> GpuRounded:
    """A weight in a GPU's memory, which is asked here for its tiles: while a step is recorded it cannot be. Raises
    ValueError if the GPU rounds or multiplies otherwise than the definition."""
    agreeing(device)
    return GpuRounded(coded, device)


def product(x: Tensor, weight: GpuRounded, bias: Tensor | None, out: Tensor) -> None:
    """x [T, K] times weight [N, K] transposed, plus bias [N], into out [T, N]."""
    _launch(tile_for(len(x), len(weight.codes), x.device), x, weight, bias, out, None)


def product_of_experts(x: Tensor, weight: GpuRounded, bias: Tensor | None, out: Tensor, grouping: Grouping) -> None:
    """Of each pair of a row and an expert (experts.GpuExperts) the product with the expert's weight, into out [M, N].
    weight, bias: the first expert's."""
    each = -(-len(out) // grouping.experts)
    _launch(tile_for(each, len(weight.codes), x.device, grouping.experts), x, weight, bias, out, grouping)


def tile_for(rows: int, outputs: int, device: torch.device, products: int = 1) -> Tile:
    """The largest that wastes few rows, and of which there are enough for the multiprocessors."""
    from headrace.kernels.triton.attention import processors

    fit = agreeing(device)
    most, enough = 2 * max(rows, fit[-1].rows), ENOUGH * processors(device)

    def count(tile: Tile) -> int:
        return products * -(-rows // tile.rows) * -(-outputs // tile.columns)

    return next((tile for tile in fit if tile.rows < most and count(tile) >= enough), fit[-1])


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [T, K] as codes int8 [T, K'] under scales fp32 [T]."""
    from headrace.kernels.triton import rounded_kernels

    (rows, inputs), padded = x.shape, -(-x.shape[1] // STEP) * STEP
    codes = torch.empty(rows, padded, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, device=x.device)
    block = min(BLOCK, 1 << (padded - 1).bit_length())
    rounded_kernels.round_rows[(rows,)](
        x, codes, scales, inputs, padded, x.stride(0), LARGEST=rounded_rows.LARGEST, LEAST=rounded_rows.LEAST,
        BLOCK=block, num_warps=max(1, block // 512),
    )  # fmt: skip
    return codes, scales


def _launch(
    tile: Tile, x: Tensor, weight: GpuRounded, bias: Tensor | None, out: Tensor, grouping: Grouping | None
) -> None:
    from headrace.kernels.triton import rounded_kernels

    codes, scales = round_rows(x)
    rows, outputs = out.shape
    tiles, experts, sent, chosen = -(-rows // tile.rows), 0, False, 1
    table, begin, order = codes, codes, codes
    if grouping is not None:
        routes, experts, sent = grouping.routes, grouping.experts, grouping.sent
        table, begin, order, chosen = grouping.table, routes.begin, routes.order, routes.expert.shape[1]
        tiles = rows // tile.rows + min(experts, rows)
    rounded_kernels.product[(tiles, -(-outputs // tile.columns))](
        codes, scales, weight.codes, weight.scales, scales if bias is None else bias, out, table, begin, order,
        rows, codes.shape[1], outputs, out.stride(0), experts, chosen,
        ROWS=tile.rows, COLUMNS=tile.columns, STEP=STEP, BIAS=bias is not None,
        EXPERTS=1 << (experts - 1).bit_length() if experts else 0, SENT=sent,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@cache
def agreeing(device: torch.device) -> tuple[Tile, ...]:
    """The tiles that fit a GPU and have the numbers of the definition there. In Triton's interpreter all do. Raises
    ValueError if none has."""
    if device.type != "cuda":
        return TILES
    generator = torch.Generator(device).manual_seed(1)
    x, numbers = (torch.randn(rows, 1024, generator=generator, device=device).bfloat16() for rows in (300, 256))
    x[3], x[5] = 0, x[5] * 1e-36
    coded = Rounded(numbers, "w8a8")
    weight, truth = GpuRounded(coded, device), rounded_rows.product(x, coded.codes, coded.scales.view(-1))
    found = tuple(tile for tile in TILES if _agrees(tile, x, weight, truth))
    if not found:
        raise ValueError("quantization w8a8: this GPU rounds rows or multiplies them otherwise than defined; use int8")
    return found


def _agrees(tile: Tile, x: Tensor, weight: GpuRounded, truth: Tensor) -> bool:
    from triton.runtime.errors import OutOfResources

    out = torch.empty_like(truth)
    try:
        _launch(tile, x, weight, None, out, None)
    except OutOfResources as error:
        log.info("%s of w8a8 is too large for this GPU: %s", tile, error)
        return False
    same = torch.equal(out, truth)
    if not same:
        log.warning("%s of w8a8 has other numbers than defined on this GPU, and is left alone", tile)
    return same
