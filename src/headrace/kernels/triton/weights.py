"""Weights that are codes under scales in a GPU's memory, and products with them (weight_kernels).

T: rows, K: inputs, N: outputs, G: inputs under one scale. Imports no triton until a product is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from headrace.kernels.formats import Coded
from headrace.kernels.quantized import Rounded
from headrace.kernels.triton import rounded

log = logging.getLogger(__name__)

Codes = Literal["int8", "int4", "uint4", "e2m1", "e4m3", "plain"]
"""What a byte, or half of one, stands for; plain: weights are numbers."""
KINDS: dict[str, Codes] = {
    "int8": "int8", "bytes": "int8", "uint5": "int8", "int6": "int8", "int4": "int4", "uint4": "uint4", "e2m1": "e2m1",
    "e4m3": "e4m3", "uint2": "uint4", "int3": "int8", "iq4": "int8", "iq3_s": "int8", "iq3_xxs": "int8", "iq2": "int8",
    "iq1": "int8",
}  # fmt: skip
"""Of kernels.formats.CODES: codes of three, five and six bits take a byte, and so do numbers of a table, as whole ones.
`rounded` has those that rows are rounded for."""
HALF_BYTES = ("int4", "uint4", "e2m1")
STEP, STEPS = 64, 2
"""Inputs of one product of a tile at most, and such products by which codes and segments are whole."""
LEAST_STEP = 16
"""Of a tensor core's product."""
ONE_GROUP = 1 << 30
MAGIC = 0x4B000000
"""Bits of 2^23 in fp32, whose last 23 bits hold whole numbers."""
COLUMNS, PROGRAMS = 64, 640
"""Outputs of a program that few rows have, and how many of these keep a GPU busy."""
LEAST_SEGMENT, MOST_SEGMENTS = 512, 8
"""Inputs of a segment at least, and segments at most."""
FEW = 256
"""Rows at most whose segments are summed up by programs of their own."""


def step_of(group: int) -> int:
    """Inputs that a tile has of a format whose scales are for `group` inputs."""
    return min(STEP, group & -group)


def obstacle(parts: Sequence[Tensor | Coded], expert: bool = False) -> str | None:
    """Why the products do not take a weight in these parts, one of several experts or alone; None where they do."""
    coded = [part for part in parts if isinstance(part, Coded)]
    for part in coded:
        if part.format.codes.name == "nf4":
            return "NF4"  # whose numbers are not whole in any unit that a byte has room for
        groups = part.scales.shape[1] if part.subs is None else part.subs.shape[1]
        group = part.shape[1] // groups
        if groups > 1 and step_of(group) < LEAST_STEP:
            return f"{part.format.name} in groups of {group} inputs"
    if not expert or not coded:
        return None
    if len(coded) < len(parts) or not all(coded[0].alike(part) for part in coded):
        return "experts in several formats"
    return None if coded[0].order is None else "experts whose inputs are in an order of their own"


class GpuQuantized:
    """A weight [N, K] of codes under scales. Raises ValueError for what `obstacle` names.

    codes: words int32 [N, K' bits / 32], K' being K up to whole tiles. Of 16 (8 bits) or 32 inputs (4 bits) word t, 0
    to 3, has from its lowest bits on those of inputs 2t, 2t + 1, 8 + 2t, 9 + 2t, and 16 more of each: what one thread
    hands to a tensor core. Whole numbers lie above 0 (int4: 8 more, int8: 128 more). scales, offsets (or None) fp32
    [K' / G, N]: a weight is scale * code + offset. group: G; 0: scales are [N], of all inputs. order int64 [K]: the
    input that each column is for; None: its own. segments: see segments_of.

    outputs: of the whole weight, where this is a tensor rank's share of it; None: N.
    """

    __slots__ = ("bits", "codes", "group", "kind", "offsets", "order", "scales", "segments", "shape", "step")
    gated = False

    def __init__(self, coded: Coded, device: torch.device, outputs: int | None = None) -> None:
        reason = obstacle([coded])
        if reason is not None:
            raise ValueError(f"a GPU has no product of {reason}")
        self.shape, self.kind = coded.shape, KINDS[coded.format.codes.name]
        self.segments = segments_of(outputs or self.shape[0], self.shape[1])
        scales, offsets = coded.scales_and_offsets()
        groups = scales.shape[1]
        self.step = STEP if groups == 1 else step_of(self.shape[1] // groups)
        self.bits = 4 if self.kind in HALF_BYTES and self.step >= 32 else 8
        self.group = self.shape[1] // groups if groups > 1 else 0 if offsets is None else ONE_GROUP
        self.order = None if coded.order is None else coded.order.to(device, torch.int64)
        codes = coded.codes
        if self.kind == "int8" and coded.format.codes.table:
            table, unit = coded.format.codes.whole()
            codes, scales = table[codes.long()], scales / unit
        self.codes = self._packed(codes.to(device))
        self.scales = self._by_group(scales.to(device))
        self.offsets = None if offsets is None else self._by_group(offsets.to(device))

    @property
    def nbytes(self) -> int:
        """Memory of codes, scales and offsets."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    def _by_group(self, each: Tensor) -> Tensor:
        """Scales or offsets [N, K / G] as the kernel reads them: [K' / G, N]."""
        inputs = self.codes.shape[1] * 32 // self.bits
        more = -(-inputs // self.group) - each.shape[1] if self.group else 0
        return torch.nn.functional.pad(each, (0, max(0, more))).T.contiguous()

    def _packed(self, codes: Tensor) -> Tensor:
        """codes int8 [N, K] as the kernel reads them."""
        above = {"int4": 8, "int8": 128}.get(self.kind, 0)
        each = codes.view(torch.uint8) + above  # wraps around
        each = torch.nn.functional.pad(each, (0, -each.shape[1] % (self.step * STEPS)))
        if self.bits == 8:
            each = each.view(len(each), -1, 2, 4, 2).transpose(2, 3)
        else:
            low, high = each.view(len(each), -1, 2, 2, 4, 2).permute(0, 1, 4, 2, 3, 5).unbind(-1)
            each = low | high << 4
        return each.reshape(len(each), -1).contiguous().view(torch.int32)


class GpuParts:
    """A weight whose outputs come in several formats, one part after another; numbers are [N, K] as they are. segments,
    of all parts alike, and outputs: as in GpuQuantized."""

    __slots__ = ("parts", "segments", "shape")
    gated = False

    def __init__(self, parts: Sequence[GpuQuantized | rounded.GpuRounded | Tensor], outputs: int | None = None) -> None:
        self.parts = list(parts)
        self.shape: tuple[int, int] = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        self.segments = segments_of(outputs or self.shape[0], self.shape[1])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


GpuWeight = GpuQuantized | rounded.GpuRounded | GpuParts


def pack(coded: Coded, device: torch.device, outputs: int | None = None) -> GpuQuantized | rounded.GpuRounded:
    """A weight in a GPU's memory, which is asked here which tiles it may take: while a step is recorded it cannot be.
    outputs: of the whole weight, where this is a tensor rank's share. Raises ValueError where it has an `obstacle`."""
    if coded.format.name in rounded.KINDS:
        return rounded.pack(coded, device)
    agreeing(device, plain=False)
    return GpuQuantized(coded, device, outputs)


def pack_parts(
    parts: Sequence[Tensor | Coded], dtype: torch.dtype, device: torch.device, outputs: int | None = None
) -> Tensor | GpuWeight:
    """A weight whose outputs a file holds in parts, as codes or as numbers, in a GPU's memory: codes as they are,
    numbers in `dtype`. outputs: as in `pack`. Raises ValueError where codes have an `obstacle`."""
    first, *others = parts
    if isinstance(first, Coded) and all(isinstance(other, Coded) and first.alike(other) for other in others):
        rest = [other for other in others if isinstance(other, Coded)]
        return pack(first.joined(rest) if rest else first, device, outputs)
    if any(isinstance(part, Coded) for part in parts):
        agreeing(device, plain=True)
        each = [pack(part, device) if isinstance(part, Coded) else part.to(device, dtype) for part in parts]
        return GpuParts(each, outputs)
    return torch.cat([part for part in parts if isinstance(part, Tensor)]).to(device, dtype)


def operands(
    weight: GpuQuantized | rounded.GpuRounded | Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weight, scales, offsets and bias as the kernel takes them; in the place of what there is none of, another."""
    if isinstance(weight, Tensor):
        return weight, weight, weight, weight if bias is None else bias
    if isinstance(weight, rounded.GpuRounded):
        return weight.codes, weight.scales, weight.scales, weight.scales if bias is None else bias
    scales = weight.scales
    return weight.codes, scales, scales if weight.offsets is None else weight.offsets, scales if bias is None else bias


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes, and how: `columns` outputs of `rows` rows, `steps` products in a turn of its loop."""

    columns: int
    rows: int
    warps: int
    stages: int
    steps: int = STEPS


EXACT = Tile(64, 16, 4, 4)
"""The way that all others are compared with."""
NUMBERS = Tile(64, 16, 4, 2)
"""For rows in fp32."""
TILES = (EXACT, Tile(64, 32, 4, 4), Tile(64, 64, 4, 3), Tile(128, 128, 8, 3, 1), Tile(128, 256, 8, 3, 1))
"""For few rows and for many."""
MANY = 512
"""Rows from which on the largest tiles are taken."""


def tile_for(rows: int, dtype: torch.dtype, device: torch.device, plain: bool, segments: int = 1) -> Tile:
    """By the number of rows, of those that give the same bits on this GPU. plain: weights are numbers."""
    if dtype == torch.float32:
        return NUMBERS
    most = rows if rows >= MANY and segments == 1 else min(rows, 128)
    fit = [tile for tile in agreeing(device, plain) if tile.rows < 2 * most or tile == EXACT]
    return next((tile for tile in fit if tile.rows >= most), fit[-1])


@cache
def agreeing(device: torch.device, plain: bool) -> tuple[Tile, ...]:
    """The tiles that fit a GPU and give the bits of EXACT there: which instruction a tile becomes is found on the GPU
    itself. In Triton's interpreter all do."""
    if device.type != "cuda":
        return TILES
    generator = torch.Generator(device).manual_seed(1)
    x, numbers = (torch.randn(rows, 1024, generator=generator, device=device).bfloat16() for rows in (300, 256))
    weight = numbers if plain else GpuQuantized(Rounded(numbers, "int8"), device)

    def run(tile: Tile) -> Tensor:
        out = torch.empty(300, 256, device=device)
        _launch(tile, x, weight, None, out, 1)
        return out

    return alike(run)


def alike(run: Callable[[Tile], Tensor]) -> tuple[Tile, ...]:
    """The tiles whose results are those of EXACT, without those that the GPU has no room for."""
    from triton.runtime.errors import OutOfResources

    exact, found = run(EXACT), []
    for tile in TILES:
        try:
            same = torch.equal(run(tile), exact)
        except OutOfResources as error:
            log.info("%s is too large for this GPU: %s", tile, error)
            continue
        if same:
            found.append(tile)
        else:
            log.warning("%s gives other bits on this GPU, and is left alone", tile)
    return tuple(found)


def constants(weight: GpuQuantized | Tensor, tile: Tile) -> dict[str, Any]:
    """What weight_kernels.product is compiled for: a weight's form, a tile."""
    if isinstance(weight, Tensor):
        step = STEP
        form: dict[str, Any] = {"CODES": "plain", "BITS": 16, "GROUP": 0, "OFFSETS": False}
    else:
        step, offsets = weight.step, weight.offsets is not None
        form = {"CODES": weight.kind, "BITS": weight.bits, "GROUP": weight.group, "OFFSETS": offsets}
    return form | {
        "ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": step, "STEPS": tile.steps,
        "WHOLE": weight.shape[1] % (step * STEPS) == 0, "PRECISION": "ieee", "num_warps": tile.warps,
        "num_stages": tile.stages,
    }  # fmt: skip


def segments_of(outputs: int, inputs: int) -> int:
    """Parts of its inputs that a weight [N, K] is summed up by, so that few rows keep a whole GPU busy. Of the whole
    weight alone, of which a tensor rank may have a share: the parts are part of the order of sums."""
    return max(1, min(inputs // LEAST_SEGMENT, PROGRAMS * COLUMNS // outputs, MOST_SEGMENTS))


def linear(x: Tensor, weight: GpuWeight, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N] in x's type, or fp32 if `wide`."""
    parts = weight.parts if isinstance(weight, GpuParts) else [weight]
    out = torch.empty(len(x), weight.shape[0], dtype=torch.float32 if wide else x.dtype, device=x.device)
    if not len(x):
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    segments = 1 if isinstance(weight, rounded.GpuRounded) else weight.segments
    first = 0
    for part in parts:
        last = first + part.shape[0]
        _product(x, part, None if bias is None else bias[first:last], out[:, first:last], segments)
        first = last
    return out


def _product(
    x: Tensor, weight: GpuQuantized | rounded.GpuRounded | Tensor, bias: Tensor | None, out: Tensor, segments: int
) -> None:
    if isinstance(weight, rounded.GpuRounded):
        return rounded.product(x, weight, bias, out)
    if isinstance(weight, GpuQuantized) and weight.order is not None:
        x = x[:, weight.order]
    tile = tile_for(len(x), x.dtype, x.device, isinstance(weight, Tensor), segments)
    _launch(tile, x, weight, bias, out, segments)


def _launch(
    tile: Tile, x: Tensor, weight: GpuQuantized | Tensor, bias: Tensor | None, out: Tensor, segments: int
) -> None:
    from headrace.kernels.triton import weight_kernels
    from headrace.kernels.triton.launching import direct

    (rows, inputs), outputs, form = x.shape, weight.shape[0], constants(weight, tile)
    codes, scales, offsets, added = operands(weight, bias)
    tiles = -(-inputs // (form["STEP"] * STEPS * segments)) * (STEPS // tile.steps)
    apart = segments > 1 and rows <= FEW
    into = torch.empty(segments, rows, outputs, device=x.device) if apart else out
    grid = (-(-rows // tile.rows), -(-outputs // tile.columns), segments if apart else 1)
    direct(weight_kernels.product)[grid](
        x, codes, scales, offsets, added, into, out, out, out, rows, inputs, outputs, x.stride(0), codes.stride(0),
        into.stride(-2), tiles, 0, 0, MAGIC,
        **form, BIAS=bias is not None, SEGMENTS=1 if apart else segments, APART=apart, EXPERTS=0, SENT=False,
    )  # fmt: skip
    if apart:
        direct(weight_kernels.add_segments)[(rows, -(-outputs // 1024))](
            into, scales, added, out, rows, outputs, out.stride(0), WIDTH=1024, SEGMENTS=segments,
            SCALED=form["GROUP"] == 0 and form["BITS"] < 16, BIAS=bias is not None,
        )  # fmt: skip
