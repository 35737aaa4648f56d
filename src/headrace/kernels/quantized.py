"""Weights that are codes under scales: rounded here or as a file has them, packed for the C++ product.

N: outputs, K: inputs, T: rows. int8 has one scale per output, amax / 127, and codes -127..127; int4 one scale per
output and group of 64 inputs and codes -8..7. There the element furthest from 0 becomes -8, whatever its sign, so that
all sixteen codes are used: a step is an eighth of that element where symmetric codes would make it a seventh (about an
eighth less error in all; llama.cpp's Q4_0 does the same in groups of 32).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from headrace.config import Quantization
from headrace.kernels import cpu, rounded_rows
from headrace.kernels.backend import listed
from headrace.kernels.extension import require, type_of
from headrace.kernels.formats import FORMATS as STORED
from headrace.kernels.formats import NUMBERS, Coded
from headrace.memory import copied, zeros

if TYPE_CHECKING:
    from headrace.kernels import _cpu as native

GROUP = 64
"""Inputs under one scale in int4."""
SLICE = 4096
"""Outputs that are packed together."""
GPU_ALONE = ("fp8_rowwise",)
"""Formats that the C++ kernels have no products with."""
MOST_RUN = 64
"""Inputs whose products the kernels add up before they multiply by a scale: a group, or a part of one."""


class Rounding(Protocol):
    """How weights are rounded to a format of kernels.formats. Another one is a class here, and its name in
    config.Quantization."""

    name: Quantization
    inputs: int
    """A matrix's inputs are a multiple of this."""

    def scales(self, weight: Tensor) -> Tensor:
        """Scales fp32 [N, G] of a weight fp32 [N, K]: K / G inputs in a row share one."""

    def codes(self, steps: Tensor) -> Tensor:
        """int8 of numbers in units of their scale, which may be changed."""


class Int8Weights:
    """One scale per output."""

    name: Quantization = "int8"
    inputs = 2

    def scales(self, weight: Tensor) -> Tensor:
        return _greatest_over(127.0, weight)

    def codes(self, steps: Tensor) -> Tensor:
        return steps.round_().clamp_(-127, 127).to(torch.int8)


class Int4Weights:
    """One scale per output and 64 inputs."""

    name: Quantization = "int4"
    inputs = GROUP

    def scales(self, weight: Tensor) -> Tensor:
        """Values of bf16: the element furthest from 0 becomes -8."""
        groups = weight.view(len(weight), -1, GROUP)
        furthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        return (furthest.squeeze(-1) / -8).bfloat16().float()

    def codes(self, steps: Tensor) -> Tensor:
        return steps.round_().clamp_(-8, 7).to(torch.int8)


class W8A8Weights(Int8Weights):
    """As int8; rows are rounded too, each under a scale of its own, and whole numbers are multiplied."""

    name: Quantization = "w8a8"
    inputs = 4


class Fp8RowwiseWeights:
    """Numbers of FP8 (e4m3) under one scale per output, for a GPU; rows are rounded, too."""

    name: Quantization = "fp8_rowwise"
    inputs = 2

    def scales(self, weight: Tensor) -> Tensor:
        return _greatest_over(rounded_rows.LARGEST["e4m3"], weight)

    def codes(self, steps: Tensor) -> Tensor:
        return rounded_rows.codes_of(steps, "e4m3").view(torch.int8)


def _greatest_over(largest: float, weight: Tensor) -> Tensor:
    """Of each output [N, K] its greatest magnitude over a number: [N, 1]."""
    top = weight.abs().amax(-1, keepdim=True)
    return top / torch.full_like(top, largest)  # torch takes a division by a number as a product on a GPU


_EACH: tuple[Rounding, ...] = (Int8Weights(), Int4Weights(), W8A8Weights(), Fp8RowwiseWeights())
FORMATS = {each.name: each for each in _EACH}


class Rounded(Coded):
    """A weight [N, K] rounded to codes under scales fp32 [N, G]: K / G inputs in a row share a scale.

    Raises ValueError for a weight that is not finite or that the scheme cannot cut into pairs (int8) or groups (int4).
    """

    def __init__(self, weight: Tensor, scheme: Quantization) -> None:
        _check(weight, scheme)
        rounding, (outputs, inputs) = FORMATS[scheme], weight.shape
        wide = weight.float()
        scales = rounding.scales(wide)
        steps = torch.where(scales == 0, 1, scales)[..., None]
        codes = rounding.codes(wide.view(outputs, steps.shape[1], -1) / steps)
        super().__init__(STORED[scheme], codes.view(outputs, inputs), scales)


class Quantized:
    """A weight [N, K] of codes under scales as the C++ product reads it, outputs beyond N zero: codes and scales by
    blocks of 64 outputs (csrc/linear/codes.h, csrc/linear/scales.h). gated: as in cpu.Packed."""

    __slots__ = ("codes", "format", "gated", "order", "scales", "shape")

    def __init__(self, coded: Coded, gated: bool = False) -> None:
        self.format, self.gated, self.shape = coded.format, gated, coded.shape
        self.order = coded.order
        ordered = _padded(coded, cpu.in_turn if gated else lambda each: each)
        self.codes = _packed_by_slices(self.format.codes.pack, ordered.codes)
        self.scales = copied(_pack_scales(ordered))

    def matrix(self, bias: int) -> native.Matrix:
        """See cpu.StoredWeight."""
        ext, (outputs, inputs), form = require(), self.shape, self.format
        scaling = ext.Scaling(
            getattr(ext.Number, form.number), getattr(ext.Offset, form.offset), subs=getattr(ext.Subs, form.subs),
            block=form.block, group=form.group, run=run_of(form.group),
        )  # fmt: skip
        return ext.Matrix(
            getattr(ext.Form, form.codes.name), self.codes.data_ptr(), self.scales.data_ptr(), bias, inputs=inputs,
            outputs=outputs, gated=self.gated, scaling=scaling,
            order=0 if self.order is None else self.order.data_ptr(),
        )  # fmt: skip

    def outputs_from(self, first: int, count: int | None = None) -> Quantized:
        """So many outputs (None: all) from `first` on, a multiple of 64: a view."""
        blocks = cpu.whole_blocks(first)
        tail = object.__new__(Quantized)
        tail.shape = (self.shape[0] - first if count is None else count, self.shape[1])
        tail.format, tail.gated = self.format, self.gated
        tail.order, tail.codes = self.order, self.codes[blocks:]
        tail.scales = self.scales[blocks * (len(self.scales) // len(self.codes)) :]
        return tail

    def by_columns(self) -> Quantized:
        """See cpu.Packed."""
        plain = object.__new__(Quantized)
        plain.format, plain.shape, plain.gated = self.format, self.shape, False
        plain.order, plain.codes, plain.scales = self.order, self.codes, self.scales
        return plain

    @property
    def nbytes(self) -> int:
        """Memory of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


class Parts:
    """A weight whose outputs come in several formats, one part after another. Never gated."""

    __slots__ = ("parts", "shape")
    gated = False

    def __init__(self, parts: Sequence[Quantized | cpu.Packed]) -> None:
        self.parts = list(parts)
        self.shape: tuple[int, int] = (sum(part.shape[0] for part in parts), parts[0].shape[1])

    def matrix(self, bias: int) -> native.Matrix:
        """See cpu.StoredWeight."""
        ext, (outputs, inputs) = require(), self.shape
        return ext.Matrix.of_parts([part.matrix(0) for part in self.parts], bias, inputs=inputs, outputs=outputs)

    def begins_block(self, first: int) -> bool:
        """Whether the outputs from `first` on begin a block of their part."""
        for part in self.parts:
            if first < part.shape[0]:
                return first % cpu.COLUMNS == 0
            first -= part.shape[0]
        return True

    def outputs_from(self, first: int, count: int | None = None) -> Parts:
        """So many outputs (None: all) from `first` on, where a block begins: a view."""
        tail, left = [], self.shape[0] - first if count is None else count
        for part in self.parts:
            outputs = part.shape[0]
            if first < outputs and left:
                tail.append(part.outputs_from(first, min(left, outputs - first)))
                left -= tail[-1].shape[0]
            first = max(0, first - outputs)
        return Parts(tail)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def run_of(group: int) -> int:
    """Inputs whose products are added up before they are multiplied by a scale: the greatest power of 2 that divides a
    group, 64 at most; 0 where all inputs are one group."""
    return min(MOST_RUN, group & -group)


def linear(
    x: Tensor, weight: Quantized | Parts, bias: Tensor | None = None, wide: bool = False, gate: str = "silu"
) -> Tensor:
    """x [T, K] in bf16 or fp32 times weight [N, K] transposed, plus bias [N]: [T, N], fp32 if `wide`, else as x.
    With a gated weight [T, N / 2], as cpu.linear."""
    inputs = weight.shape[1]
    if x.dim() != 2 or x.shape[1] != inputs or x.stride(1) != 1:
        raise ValueError(f"x must be [T, {inputs}] with contiguous rows, got {list(x.shape)}")
    type_of(x)
    return cpu.product(x, weight, bias, wide, gate)


def _packed_by_slices(pack: Callable[[Tensor], Tensor], codes: Tensor) -> Tensor:
    """pack(codes [64 n, K]) = uint8 [n, ...], a slice of outputs after another: what packing takes beside it stays
    small."""
    slices = codes.split(SLICE)
    first = pack(slices[0])
    packed = zeros((len(codes) // cpu.COLUMNS, *first.shape[1:]), torch.uint8)
    for place, part in zip(packed.split(SLICE // cpu.COLUMNS), slices, strict=True):
        place.copy_(pack(part))
    return packed


def _padded(coded: Coded, ordered: Callable[[Tensor], Tensor]) -> Coded:
    """With outputs in the order of packing, and zeros behind them that fill the last block of 64."""
    more = (0, 0, 0, -len(coded.codes) % cpu.COLUMNS)

    def of(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not more[-1]:
            return None if tensor is None else ordered(tensor)
        return torch.nn.functional.pad(ordered(tensor), more)

    codes, scales = of(coded.codes), of(coded.scales)
    assert codes is not None and scales is not None
    return Coded(coded.format, codes, scales, of(coded.subs), of(coded.minima), of(coded.smalls))


def _pack_scales(coded: Coded) -> Tensor:
    """Scales of coded [64 n, K] as C++ reads them: fp32 [64 n] of all inputs, or uint8 [n, K / block, bytes]: of 64
    outputs and a block of inputs the scales [64], the minima [64], the sub-scales [groups, 64], the small numbers
    [groups, 64], each where the format has them."""
    form = coded.format
    if not form.block:
        return coded.scales.view(-1)
    blocks = coded.codes.shape[1] // form.block
    numbers = {number: dtype for dtype, number in NUMBERS.items()}

    def part(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """[64 n, K / block * m] -> uint8 [n, K / block, bytes of m * 64]."""
        each = tensor.to(dtype).view(-1, cpu.COLUMNS, blocks, tensor.shape[1] // blocks)
        return each.permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2)

    wide = numbers[form.number]
    large = [part(tensor, wide) for tensor in (coded.scales, coded.minima) if tensor is not None]
    small = [part(tensor, torch.int8) for tensor in (coded.subs, coded.smalls) if tensor is not None]
    return torch.cat(large + small, -1)


def _check(weight: Tensor, scheme: Quantization) -> None:
    if scheme not in FORMATS:
        raise ValueError(f"quantization must be one of {', '.join(FORMATS)} here, got {scheme!r}")
    step = FORMATS[scheme].inputs
    if weight.dim() != 2 or weight.shape[1] % step or not weight.numel():
        others = [
            name
            for name, other in FORMATS.items()
            if other.inputs < step and weight.shape[-1] % other.inputs == 0 and name not in GPU_ALONE
        ]
        remedy = f"use {listed([*others, 'none'], 'or')}"
        raise ValueError(
            f"quantization {scheme} takes matrices whose inputs are a multiple of {step}, got {list(weight.shape)}; "
            f"{remedy}"
        )
    if not weight.isfinite().all():
        raise ValueError(f"quantization {scheme}: a weight {list(weight.shape)} holds infinities or NaN; use none")
