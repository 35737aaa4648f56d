"""Weights of 8 or 4 bits: rounded to the nearest code, packed for the C++ product, or multiplied out again.

N: outputs, K: inputs, T: rows. int8 has one scale per output, amax / 127, and codes -127..127; int4 one scale per
output and group of 64 inputs and codes -8..7. There the element furthest from 0 becomes -8, whatever its sign, so that
all sixteen codes are used: a step is an eighth of that element where symmetric codes would make it a seventh (about an
eighth less error in all; llama.cpp's Q4_0 does the same in groups of 32).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from headrace.config import Quantization
from headrace.kernels import cpu
from headrace.kernels.backend import listed
from headrace.kernels.extension import require, type_of
from headrace.memory import copied

if TYPE_CHECKING:
    from headrace.kernels import _cpu as native

GROUP = 64
"""Inputs under one scale in int4."""


class WeightFormat(Protocol):
    """How weights are rounded, and how the C++ product reads them. Another one is a class here, its name in
    config.Quantization and in csrc/kernels.h, and its C++ struct in csrc/linear/codes.h."""

    name: Quantization
    inputs: int
    """A matrix's inputs are a multiple of this."""
    codes: tuple[int, int]
    """The least and the greatest."""

    def scales(self, weight: Tensor) -> Tensor:
        """Scales fp32 [N, G] of a weight fp32 [N, K]: K / G inputs in a row share one."""

    def pack_codes(self, codes: Tensor) -> Tensor:
        """Codes int8 [64 n, K], with outputs in the order of `in_turn` where gated, as C++ reads them: [n, ...]."""

    def pack_scales(self, scales: Tensor) -> Tensor:
        """Scales fp32 [64 n, G] as C++ reads them: [n, ...] or [64 n]."""


class Int8Weights:
    """One scale per output, fp32 [64 n]; codes int8 [n, K / 2, 4, 2, 16]."""

    name: Quantization = "int8"
    inputs, codes = 2, (-127, 127)

    def scales(self, weight: Tensor) -> Tensor:
        return weight.abs().amax(-1, keepdim=True) / 127

    def pack_codes(self, codes: Tensor) -> Tensor:
        return copied(_blocks(codes).permute(0, 3, 1, 4, 2))

    def pack_scales(self, scales: Tensor) -> Tensor:
        return scales.view(-1)


class Int4Weights:
    """One scale per output and 64 inputs, bf16 [n, K / 64, 64]; nibbles uint8 [n, K / 2, 16, 2, 2]."""

    name: Quantization = "int4"
    inputs, codes = GROUP, (-8, 7)

    def scales(self, weight: Tensor) -> Tensor:
        """Values of bf16: the element furthest from 0 becomes -8."""
        groups = weight.view(len(weight), -1, self.inputs)
        furthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        return (furthest.squeeze(-1) / -8).bfloat16().float()

    def pack_codes(self, codes: Tensor) -> Tensor:
        nibbles = _blocks((codes + 8).view(torch.uint8)).permute(0, 3, 2, 4, 1)
        return copied(nibbles[..., 0::2] | nibbles[..., 1::2] << 4)

    def pack_scales(self, scales: Tensor) -> Tensor:
        return scales.view(-1, cpu.COLUMNS, scales.shape[-1]).transpose(1, 2).contiguous().bfloat16()


_EACH: tuple[WeightFormat, ...] = (Int8Weights(), Int4Weights())
FORMATS = {each.name: each for each in _EACH}


def _blocks(codes: Tensor) -> Tensor:
    """Codes [64 n, K] as [n, 4, 16, K / 2, 2]."""
    return codes.view(-1, 4, 16, codes.shape[1] // 2, 2)


class Rounded:
    """A weight [N, K] as codes int8 [N, K] and scales fp32 [N, G]: K / G inputs in a row share a scale.

    Raises ValueError for a weight that is not finite or that the scheme cannot cut into pairs (int8) or groups (int4).
    """

    __slots__ = ("codes", "format", "scales")

    def __init__(self, weight: Tensor, scheme: Quantization) -> None:
        _check(weight, scheme)
        self.format = FORMATS[scheme]
        outputs, inputs = weight.shape
        wide = weight.float()
        self.scales = self.format.scales(wide)
        steps = torch.where(self.scales == 0, 1, self.scales)[..., None]
        codes = (wide.view(outputs, steps.shape[1], -1) / steps).round_().clamp_(*self.format.codes)
        self.codes = codes.to(torch.int8).view(outputs, inputs)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] that the codes stand for."""
        outputs, groups = self.scales.shape
        weight = self.codes.view(outputs, groups, -1).float() * self.scales[..., None]
        return weight.view(self.codes.shape).to(dtype)


class Quantized:
    """A rounded weight [N, K] as the C++ product reads it, outputs beyond N zero: codes and scales as its format says
    (and csrc/linear/linear_quant.cpp). gated: as in cpu.Packed."""

    __slots__ = ("codes", "format", "gated", "scales", "shape")

    def __init__(self, rounded: Rounded, gated: bool = False) -> None:
        self.format, self.gated = rounded.format, gated
        outputs, inputs = rounded.codes.shape
        self.shape: tuple[int, int] = (outputs, inputs)
        more = (0, 0, 0, -outputs % cpu.COLUMNS)
        ordered = [cpu.in_turn(each) if gated else each for each in (rounded.codes, rounded.scales)]
        codes, scales = (torch.nn.functional.pad(each, more) for each in ordered)
        self.codes, self.scales = self.format.pack_codes(codes), self.format.pack_scales(scales)

    def matrix(self, bias: int) -> native.Matrix:
        """See cpu.StoredWeight."""
        (outputs, inputs), codes, scales = self.shape, self.codes.data_ptr(), self.scales.data_ptr()
        form = getattr(require().Form, self.format.name)
        return require().Matrix(form, codes, scales, bias, inputs=inputs, outputs=outputs, gated=self.gated)

    def outputs_from(self, first: int) -> Quantized:
        """The outputs from `first` on, a multiple of 64: a view."""
        blocks = cpu.whole_blocks(first)
        tail = object.__new__(Quantized)
        tail.format, tail.shape, tail.gated = self.format, (self.shape[0] - first, self.shape[1]), self.gated
        tail.codes = self.codes[blocks:]
        tail.scales = self.scales[blocks * (len(self.scales) // len(self.codes)) :]
        return tail

    @property
    def nbytes(self) -> int:
        """Memory of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


def linear(x: Tensor, weight: Quantized, bias: Tensor | None = None, wide: bool = False, gate: str = "silu") -> Tensor:
    """x [T, K] in bf16 or fp32 times weight [N, K] transposed, plus bias [N]: [T, N], fp32 if `wide`, else as x.
    With a gated weight [T, N / 2], as cpu.linear."""
    inputs = weight.shape[1]
    if x.dim() != 2 or x.shape[1] != inputs or x.stride(1) != 1:
        raise ValueError(f"x must be [T, {inputs}] with contiguous rows, got {list(x.shape)}")
    type_of(x)
    return cpu.product(x, weight, bias, wide, gate)


def _check(weight: Tensor, scheme: Quantization) -> None:
    if scheme not in FORMATS:
        raise ValueError(f"quantization must be one of {', '.join(FORMATS)} here, got {scheme!r}")
    step = FORMATS[scheme].inputs
    if weight.dim() != 2 or weight.shape[1] % step or not weight.numel():
        others = [
            name for name, other in FORMATS.items() if other.inputs < step and weight.shape[-1] % other.inputs == 0
        ]
        remedy = f"use {listed([*others, 'none'], 'or')}"
        raise ValueError(
            f"quantization {scheme} takes matrices whose inputs are a multiple of {step}, got {list(weight.shape)}; "
            f"{remedy}"
        )
    if not weight.isfinite().all():
        raise ValueError(f"quantization {scheme}: a weight {list(weight.shape)} holds infinities or NaN; use none")
