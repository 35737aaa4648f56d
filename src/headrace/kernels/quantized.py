"""Weights of 8 or 4 bits: rounded to the nearest code, packed for the C++ product, or multiplied out again.

N: outputs, K: inputs, T: rows. int8 has one scale per output, amax / 127, and codes -127..127; int4 one scale per
output and group of 64 inputs and codes -8..7. There the element furthest from 0 becomes -8, whatever its sign, so that
all sixteen codes are used: a step is an eighth of that element where symmetric codes would make it a seventh (about an
eighth less error in all; llama.cpp's Q4_0 does the same in groups of 32).
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.config import Quantization
from headrace.kernels import cpu
from headrace.kernels.extension import check, require, type_of
from headrace.memory import copied

BITS: dict[Quantization, int] = {"int8": 8, "int4": 4}
GROUP = 64
"""Inputs under one scale in int4."""


class Rounded:
    """A weight [N, K] as codes int8 [N, K] and scales fp32 [N, G]: K / G inputs in a row share a scale.

    Raises ValueError for a weight that is not finite or that the scheme cannot cut into pairs (int8) or groups (int4).
    """

    __slots__ = ("bits", "codes", "scales")

    def __init__(self, weight: Tensor, scheme: Quantization) -> None:
        _check(weight, scheme)
        self.bits = BITS[scheme]
        outputs, inputs = weight.shape
        groups = weight.float().view(outputs, -1, GROUP if scheme == "int4" else inputs)
        self.scales = _int4_scales(groups) if scheme == "int4" else groups.abs().amax(-1) / 127
        steps = torch.where(self.scales == 0, 1, self.scales)[..., None]
        codes = (groups / steps).round_().clamp_(*((-8, 7) if scheme == "int4" else (-127, 127)))
        self.codes = codes.to(torch.int8).view(outputs, inputs)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] that the codes stand for."""
        outputs, groups = self.scales.shape
        weight = self.codes.view(outputs, groups, -1).float() * self.scales[..., None]
        return weight.view(self.codes.shape).to(dtype)


class Quantized:
    """A rounded weight [N, K] as the C++ product reads it, outputs beyond N zero: see csrc/linear/linear_quant.cpp.

    codes: int8 [ceil(N / 64), K / 2, 4, 2, 16], or nibbles uint8 [ceil(N / 64), K / 2, 16, 2, 2].
    scales: fp32 [64 ceil(N / 64)], or bf16 [ceil(N / 64), K / 64, 64]. gated: as in cpu.Packed.
    """

    __slots__ = ("bits", "codes", "gated", "scales", "shape")

    def __init__(self, rounded: Rounded, gated: bool = False) -> None:
        self.bits, self.gated = rounded.bits, gated
        outputs, inputs = rounded.codes.shape
        self.shape: tuple[int, int] = (outputs, inputs)
        more = (0, 0, 0, -outputs % cpu.COLUMNS)
        ordered = [cpu.in_turn(each) if gated else each for each in (rounded.codes, rounded.scales)]
        codes, scales = (torch.nn.functional.pad(each, more) for each in ordered)
        if self.bits == 8:
            self.codes = copied(codes.view(-1, 4, 16, inputs // 2, 2).permute(0, 3, 1, 4, 2))
            self.scales = scales.view(-1)
            return
        nibbles = (codes + 8).view(torch.uint8).view(-1, 4, 16, inputs // 2, 2).permute(0, 3, 2, 4, 1)
        self.codes = copied(nibbles[..., 0::2] | nibbles[..., 1::2] << 4)
        self.scales = scales.view(-1, cpu.COLUMNS, inputs // GROUP).transpose(1, 2).contiguous().bfloat16()

    def outputs_from(self, first: int) -> Quantized:
        """The outputs from `first` on, a multiple of 64: a view."""
        blocks = cpu.whole_blocks(first)
        tail = object.__new__(Quantized)
        tail.bits, tail.shape, tail.gated = self.bits, (self.shape[0] - first, self.shape[1]), self.gated
        tail.codes, tail.scales = self.codes[blocks:], self.scales[first if self.bits == 8 else blocks :]
        return tail

    @property
    def nbytes(self) -> int:
        """Memory of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


def linear(x: Tensor, weight: Quantized, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """x [T, K] in bf16 or fp32 times weight [N, K] transposed, plus bias [N]: [T, N], fp32 if `wide`, else as x.
    With a gated weight [T, N / 2], as cpu.linear."""
    outputs, inputs = weight.shape
    if x.dim() != 2 or x.shape[1] != inputs or x.stride(1) != 1:
        raise ValueError(f"x must be [T, {inputs}] with contiguous rows, got {list(x.shape)}")
    kind = type_of(x)
    if bias is not None:
        check("bias", bias, x.dtype, (outputs,))
    width = outputs // 2 if weight.gated else outputs
    out = torch.empty((x.shape[0], width), dtype=torch.float32 if wide else x.dtype)
    require().linear_quant(
        kind, weight.bits, x.data_ptr(), weight.codes.data_ptr(), weight.scales.data_ptr(),
        0 if bias is None else bias.data_ptr(), out.data_ptr(), x.shape[0], x.stride(0), inputs, outputs, weight.gated,
        wide, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _check(weight: Tensor, scheme: Quantization) -> None:
    if scheme not in BITS:
        raise ValueError(f"quantization must be one of {', '.join(BITS)} here, got {scheme!r}")
    step = GROUP if scheme == "int4" else 2
    if weight.dim() != 2 or weight.shape[1] % step or not weight.numel():
        remedy = "use int8 or none" if scheme == "int4" and weight.shape[-1] % 2 == 0 else "use none"
        raise ValueError(
            f"quantization {scheme} takes matrices whose inputs are a multiple of {step}, got {list(weight.shape)}; "
            f"{remedy}"
        )
    if not weight.isfinite().all():
        raise ValueError(f"quantization {scheme}: a weight {list(weight.shape)} holds infinities or NaN; use none")


def _int4_scales(groups: Tensor) -> Tensor:
    """Scales [N, G] of groups [N, G, 64], values of bf16: the element furthest from 0 becomes -8."""
    furthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    return (furthest.squeeze(-1) / -8).bfloat16().float()
