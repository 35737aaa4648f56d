"""Weights that are codes under scales in a GPU's memory, and products with them (weight_kernels).

T: rows, K: inputs, N: outputs, G: inputs under one scale. Imports no triton until a product is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from headrace.kernels.formats import Coded

Codes = Literal["int8", "int4", "uint4", "e2m1", "e4m3", "plain"]
"""What a byte, or half of one, stands for; plain: weights are numbers."""
KINDS: dict[str, Codes] = {
    "int8": "int8", "bytes": "int8", "w8a8": "int8", "uint5": "int8", "int6": "int8", "int4": "int4", "uint4": "uint4",
    "e2m1": "e2m1", "e4m3": "e4m3",
}  # fmt: skip
"""Of kernels.formats.CODES: codes of five and six bits take a byte."""
STEP = 64
"""Inputs of a tile at most."""
LEAST_STEP = 16
"""Of a tensor core's product."""
ONE_GROUP = 1 << 30


def step_of(group: int) -> int:
    """Inputs that a tile has of a format whose scales are for `group` inputs."""
    return min(STEP, group & -group)


def obstacle(parts: Sequence[Tensor | Coded], expert: bool = False) -> str | None:
    """Why the products do not take a weight in these parts, one of several experts or alone; None where they do."""
    coded = [part for part in parts if isinstance(part, Coded)]
    for part in coded:
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

    codes uint8 [N, K'], K' being K up to whole tiles, a code a byte; or [N, K' / 2], where a byte of each 2 `step`
    inputs has input j in its low half and input `step` + j in the high one. scales, offsets (or None) fp32 [K' / G, N]:
    a weight is scale * code + offset. group: G; 0: scales are [N], of all inputs. order int64 [K]: the input that each
    column is for; None: its own.
    """

    __slots__ = ("codes", "group", "kind", "offsets", "order", "scales", "shape", "step")
    gated = False

    def __init__(self, coded: Coded, device: torch.device) -> None:
        reason = obstacle([coded])
        if reason is not None:
            raise ValueError(f"a GPU has no product of {reason}")
        self.shape, self.kind = coded.shape, KINDS[coded.format.codes.name]
        scales, offsets = coded.scales_and_offsets()
        groups = scales.shape[1]
        self.step = STEP if groups == 1 else step_of(self.shape[1] // groups)
        self.group = self.shape[1] // groups if groups > 1 else 0 if offsets is None else ONE_GROUP
        self.order = None if coded.order is None else coded.order.to(device, torch.int64)
        self.codes = self._packed(coded.codes.to(device))
        self.scales = self._by_group(scales.to(device))
        self.offsets = None if offsets is None else self._by_group(offsets.to(device))

    @property
    def planes(self) -> int:
        """Codes in a byte."""
        return 2 if self.kind in ("int4", "uint4", "e2m1") else 1

    @property
    def nbytes(self) -> int:
        """Memory of codes, scales and offsets."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    def _by_group(self, each: Tensor) -> Tensor:
        """Scales or offsets [N, K / G] as the kernel reads them: [K' / G, N]."""
        more = -(-self.codes.shape[1] * self.planes // self.group) - each.shape[1] if self.group else 0
        return torch.nn.functional.pad(each, (0, max(0, more))).T.contiguous()

    def _packed(self, codes: Tensor) -> Tensor:
        """codes int8 [N, K] as the kernel reads them."""
        if self.kind == "int4":
            codes = codes + 8
        whole = self.step * self.planes
        bytes_of = torch.nn.functional.pad(codes.view(torch.uint8), (0, -codes.shape[1] % whole))
        if self.planes == 1:
            return bytes_of.contiguous()
        low, high = bytes_of.view(len(codes), -1, 2, self.step).unbind(2)
        return (low | high << 4).flatten(1)


class GpuParts:
    """A weight whose outputs come in several formats, one part after another; numbers are [N, K] as they are."""

    __slots__ = ("parts", "shape")
    gated = False

    def __init__(self, parts: Sequence[GpuQuantized | Tensor]) -> None:
        self.parts = list(parts)
        self.shape: tuple[int, int] = (sum(part.shape[0] for part in parts), parts[0].shape[1])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


GpuWeight = GpuQuantized | GpuParts


def pack_parts(parts: Sequence[Tensor | Coded], dtype: torch.dtype, device: torch.device) -> Tensor | GpuWeight:
    """A weight whose outputs a file holds in parts, as codes or as numbers, in a GPU's memory: codes as they are,
    numbers in `dtype`. Raises ValueError where codes have an `obstacle`."""
    first, *others = parts
    if isinstance(first, Coded) and all(isinstance(other, Coded) and first.alike(other) for other in others):
        rest = [other for other in others if isinstance(other, Coded)]
        return GpuQuantized(first.joined(rest) if rest else first, device)
    if any(isinstance(part, Coded) for part in parts):
        return GpuParts(
            [GpuQuantized(part, device) if isinstance(part, Coded) else part.to(device, dtype) for part in parts]
        )
    return torch.cat([part for part in parts if isinstance(part, Tensor)]).to(device, dtype)


def operands(weight: GpuQuantized | Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weight, scales, offsets and bias as the kernel takes them; in the place of what there is none of, another."""
    if isinstance(weight, Tensor):
        return weight, weight, weight, weight if bias is None else bias
    scales = weight.scales
    return weight.codes, scales, scales if weight.offsets is None else weight.offsets, scales if bias is None else bias


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes, and how: `columns` outputs of `rows` rows."""

    columns: int
    rows: int
    warps: int
    stages: int


def tile_for(rows: int, dtype: torch.dtype) -> Tile:
    """By the number of rows. A row's bits are the same in each."""
    if dtype == torch.float32:
        return Tile(64, 16, 4, 2)
    if rows <= 16:
        return Tile(64, 16, 4, 6)
    if rows <= 32:
        return Tile(64, 32, 4, 5)
    return Tile(64, 64, 4, 4) if rows <= 64 else Tile(128, 128, 8, 3)


def constants(weight: GpuQuantized | Tensor, tile: Tile) -> dict[str, Any]:
    """What weight_kernels.product is compiled for: a weight's form, a tile."""
    if isinstance(weight, Tensor):
        step, planes = STEP, 1
        form: dict[str, Any] = {"CODES": "plain", "GROUP": 0, "OFFSETS": False}
    else:
        step, planes = weight.step, weight.planes
        form = {"CODES": weight.kind, "GROUP": weight.group, "OFFSETS": weight.offsets is not None}
    return form | {
        "ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": step, "PLANES": planes,
        "WHOLE": weight.shape[1] % (step * planes) == 0, "PRECISION": "ieee", "num_warps": tile.warps,
        "num_stages": tile.stages,
    }  # fmt: skip


def linear(x: Tensor, weight: GpuWeight, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N] in x's type, or fp32 if `wide`."""
    parts = weight.parts if isinstance(weight, GpuParts) else [weight]
    out = torch.empty(len(x), weight.shape[0], dtype=torch.float32 if wide else x.dtype, device=x.device)
    if not len(x):
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    first = 0
    for part in parts:
        last = first + part.shape[0]
        _product(x, part, None if bias is None else bias[first:last], out[:, first:last])
        first = last
    return out


def _product(x: Tensor, weight: GpuQuantized | Tensor, bias: Tensor | None, out: Tensor) -> None:
    from headrace.kernels.triton import weight_kernels

    if isinstance(weight, GpuQuantized) and weight.order is not None:
        x = x[:, weight.order]
    (rows, inputs), outputs, tile = x.shape, weight.shape[0], tile_for(len(x), x.dtype)
    codes, scales, offsets, added = operands(weight, bias)
    weight_kernels.product[(-(-rows // tile.rows), -(-outputs // tile.columns))](
        x, codes, scales, offsets, added, out, out, out, out, rows, inputs, outputs, x.stride(0), codes.stride(0),
        out.stride(0), 0, 0, **constants(weight, tile), BIAS=bias is not None, EXPERTS=0, SENT=False,
    )  # fmt: skip
