"""Products of rounded rows on a GPU (rounded_kernels): w8a8 and fp8_rowwise, as kernels.rounded_rows defines them.

T: rows, K: inputs, K': K up to whole steps, N: outputs, M: pairs of a row and an expert. Each GPU is asked before its
first product: tiles that have other numbers than the definition (FP8: than the smallest tile) are left alone.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from headrace.config import Quantization
from headrace.kernels import rounded_rows
from headrace.kernels.formats import Coded
from headrace.kernels.quantized import Rounded
from headrace.kernels.rounded_rows import LARGEST, LEAST, Codes

log = logging.getLogger(__name__)

KINDS: dict[str, Codes] = {"w8a8": "int8", "fp8_rowwise": "e4m3"}
"""By kernels.formats' names."""
TYPES: dict[Codes, torch.dtype] = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
FP8_SINCE = (8, 9)
"""Compute capability of the first GPUs that multiply e4m3."""
STEP = 128
"""Inputs of a step of a tile: a line of memory."""
BLOCK = 8192
"""Inputs of a row that are rounded at once, at most."""
ENOUGH = 0.6
"""Tiles for each multiprocessor."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes, and how: `columns` outputs of `rows` rows."""

    columns: int
    rows: int
    warps: int
    stages: int


USUAL = (Tile(128, 128, 8, 4), Tile(64, 64, 4, 5), Tile(64, 32, 4, 6), Tile(64, 16, 4, 6))
TILES: dict[Codes, tuple[Tile, ...]] = {"int8": (Tile(128, 256, 8, 3), *USUAL, Tile(32, 16, 4, 6)), "e4m3": USUAL}
"""The largest first. Of e4m3 all take Hopper's instruction for warp groups: the older one adds up otherwise."""
BOUND = 2.0**-9
"""Of the smallest tile's sums of e4m3, as a share of the sum of the factors' sizes: far below what codes in a wrong
order would make of it, far above what tensor cores leave out."""


class GpuRounded:
    """A weight [N, K] that rows are rounded for. codes: int8 or e4m3 [N, K'], zeros behind K; scales: fp32 [N]."""

    __slots__ = ("codes", "kind", "scales", "shape")
    gated = False

    def __init__(self, coded: Coded, device: torch.device) -> None:
        self.shape, self.kind = coded.shape, KINDS[coded.format.name]
        codes = torch.nn.functional.pad(coded.codes.to(device), (0, -self.shape[1] % STEP))
        self.codes = codes.contiguous().view(TYPES[self.kind])
        self.scales = coded.scales.view(-1).to(device).contiguous()

    @property
    def nbytes(self) -> int:
        """Memory of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class Grouping:
    """Where the rows of a product go that several experts share: see weight_kernels.product."""

    table: Tensor
    begin: Tensor
    order: Tensor
    chosen: int
    experts: int
    sent: bool


def pack(coded: Coded, device: torch.device) -> GpuRounded:
    """A weight in a GPU's memory, which is asked here for its tiles: while a step is recorded it cannot be. Raises
    ValueError if the GPU rounds or multiplies otherwise than the definition, or has no products of FP8."""
    agreeing(device, KINDS[coded.format.name])
    return GpuRounded(coded, device)


def product(x: Tensor, weight: GpuRounded, bias: Tensor | None, out: Tensor) -> None:
    """x [T, K] times weight [N, K] transposed, plus bias [N], into out [T, N]."""
    _launch(tile_for(len(x), weight, x.device), x, weight, bias, out, None)


def product_of_experts(x: Tensor, weight: GpuRounded, bias: Tensor | None, out: Tensor, grouping: Grouping) -> None:
    """Of each pair of a row and an expert (experts.GpuExperts) the product with the expert's weight, into out [M, N].
    weight, bias: the first expert's."""
    each = -(-len(out) // grouping.experts)
    _launch(tile_for(each, weight, x.device, grouping.experts), x, weight, bias, out, grouping)


def tile_for(rows: int, weight: GpuRounded, device: torch.device, products: int = 1) -> Tile:
    """The largest that wastes few rows, and of which there are enough for the multiprocessors."""
    from headrace.kernels.triton.attention import processors

    fit, outputs = agreeing(device, weight.kind), weight.shape[0]
    most, enough = 2 * max(rows, fit[-1].rows), ENOUGH * processors(device)

    def count(tile: Tile) -> int:
        return products * -(-rows // tile.rows) * -(-outputs // tile.columns)

    return next((tile for tile in fit if tile.rows < most and count(tile) >= enough), fit[-1])


def round_rows(x: Tensor, kind: Codes = "int8") -> tuple[Tensor, Tensor]:
    """Rows [T, K] as codes [T, K'] under scales fp32 [T]."""
    from headrace.kernels.triton import rounded_kernels
    from headrace.kernels.triton.launching import direct

    (rows, inputs), padded = x.shape, -(-x.shape[1] // STEP) * STEP
    codes = torch.empty(rows, padded, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, device=x.device)
    block = min(BLOCK, 1 << (padded - 1).bit_length())
    direct(rounded_kernels.round_rows)[(rows,)](
        x, codes, scales, inputs, padded, x.stride(0), LARGEST=LARGEST[kind], LEAST=LEAST, E4M3=kind == "e4m3",
        BLOCK=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return codes.view(TYPES[kind]), scales


def _launch(
    tile: Tile, x: Tensor, weight: GpuRounded, bias: Tensor | None, out: Tensor, grouping: Grouping | None
) -> None:
    from headrace.kernels.triton import rounded_kernels
    from headrace.kernels.triton.launching import direct

    codes, scales = round_rows(x, weight.kind)
    rows, outputs = out.shape
    tiles, experts, sent, chosen = -(-rows // tile.rows), 0, False, 1
    table, begin, order = codes, codes, codes
    if grouping is not None:
        table, begin, order = grouping.table, grouping.begin, grouping.order
        experts, sent, chosen = grouping.experts, grouping.sent, grouping.chosen
        tiles = rows // tile.rows + min(experts, rows)
    direct(rounded_kernels.product)[(tiles, -(-outputs // tile.columns))](
        codes, scales, weight.codes, weight.scales, scales if bias is None else bias, out, table, begin, order,
        rows, codes.shape[1], outputs, out.stride(0), experts, chosen,
        ROWS=tile.rows, COLUMNS=tile.columns, STEP=STEP, BIAS=bias is not None,
        EXPERTS=1 << (experts - 1).bit_length() if experts else 0, SENT=sent,
        E4M3=weight.kind == "e4m3", num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@cache
def agreeing(device: torch.device, kind: Codes) -> tuple[Tile, ...]:
    """The tiles that fit a GPU and have the numbers of the definition there; of e4m3 those of the smallest tile, which
    are near the definition. In Triton's interpreter all do. Raises ValueError if none has."""
    if device.type != "cuda":
        return TILES[kind]
    scheme: Quantization = "w8a8" if kind == "int8" else "fp8_rowwise"
    if kind == "e4m3" and (has := torch.cuda.get_device_capability(device)) < FP8_SINCE:
        raise ValueError(
            f"quantization fp8_rowwise: products of FP8 need compute capability 8.9 (Ada, Hopper), this GPU has "
            f"{has[0]}.{has[1]}; use w8a8"
        )
    generator = torch.Generator(device).manual_seed(1)
    x, numbers = (torch.randn(rows, 1024, generator=generator, device=device).bfloat16() for rows in (300, 256))
    x[3], x[5] = 0, x[5] * 1e-36
    found = agreeing_on(x, GpuRounded(Rounded(numbers, scheme), device))
    if not found:
        raise ValueError(f"quantization {scheme}: this GPU has other numbers than it defines; use int8")
    return found


def agreeing_on(x: Tensor, weight: GpuRounded) -> tuple[Tile, ...]:
    """The tiles that have the right product of x [T, K] and a weight."""
    tiles, codes = TILES[weight.kind], weight.codes[:, : weight.shape[1]]
    rows, scales = round_rows(x, weight.kind)
    want, by = rounded_rows.round_rows(x, weight.kind)
    if not torch.equal(rows[:, : x.shape[1]].view(torch.int8), want.view(torch.int8)) or not torch.equal(scales, by):
        log.warning("rows are rounded otherwise on this GPU than defined")
        return ()
    truth = rounded_rows.product(x, codes, weight.scales, weight.kind)
    if weight.kind == "e4m3":
        sizes = rounded_rows.product(x.abs(), codes.float().abs().to(codes.dtype), weight.scales, weight.kind)
        smallest = torch.full_like(truth, torch.nan)
        _launch(tiles[-1], x, weight, None, smallest, None)
        if not ((smallest - truth).abs() <= BOUND * sizes).all():
            log.warning("products of FP8 are not what they are defined to be on this GPU")
            return ()
        truth = smallest
    return tuple(tile for tile in tiles if _agrees(tile, x, weight, truth))


def _agrees(tile: Tile, x: Tensor, weight: GpuRounded, truth: Tensor) -> bool:
    from triton.runtime.errors import OutOfResources

    out = torch.full_like(truth, torch.nan)
    try:
        _launch(tile, x, weight, None, out, None)
    except OutOfResources as error:
        log.info("%s of %s is too large for this GPU: %s", tile, weight.kind, error)
        return False
    same = torch.equal(out, truth)
    if not same:
        log.warning("%s of %s has other numbers on this GPU, and is left alone", tile, weight.kind)
    return same
