"""Formats of weights that are codes under scales: one table, which the loader of files and the C++ products share.

N: outputs, K: inputs. A weight is `scale * value(code) + offset`. Along a row, `block` inputs share a scale as it is
stored; where there are sub-scales, of a byte each, a scale is the block's times that of its `group` of inputs. An
offset is -(the block's minimum times the group's small number) or -(scale times the group's zero point). Nothing is
rounded again: codes, scales and the rest are kept in the bits that the file has, in the order in which C++ reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Offset = Literal["none", "minimum", "zero"]
Number = Literal["fp32", "bf16", "fp16", "e8m0"]
Subs = Literal["none", "whole", "e4m3"]
"""Sub-scales: whole numbers of 8 bits, or numbers of FP8 (e4m3)."""
NUMBERS: dict[torch.dtype, Number] = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "e8m0"
}  # fmt: skip
"""By the type of a tensor of scales. e8m0: a power of 2 as its exponent plus 127 (OCP Microscaling Formats 1.0)."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ3_S = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
IQ3_XXS = (1, 3, 5, 7, 9, 11, 13, 15.5, -1, -3, -5, -7, -9, -11, -13, -15.5)
IQ2 = (1, 3.125, 5.375, 0, -1, -3.125, -5.375, 0)
IQ1 = (-1.125, -0.125, 0.875, 0, -0.875, 0.125, 1.125, 0)
NF4 = (
    -1.0, -0.6953125, -0.5234375, -0.39453125, -0.28515625, -0.1845703125, -0.0908203125, 0.0, 0.07958984375,
    0.1611328125, 0.24609375, 0.337890625, 0.44140625, 0.5625, 0.72265625, 1.0,
)  # fmt: skip
"""What codes of ggml's types stand for, its scales being taken in the units in which sub-scales are whole. The zeros of
IQ2 and IQ1 are of no file. NF4: bitsandbytes' numbers, rounded to bf16."""


@dataclass(frozen=True, slots=True)
class Codes:
    """What codes of so many bits stand for: themselves from `least` on, or `table`. By their name in csrc/kernels.h,
    where csrc/linear/codes.h says how they lie."""

    name: str
    bits: int
    least: int = 0
    table: tuple[float, ...] = ()

    def values(self, codes: Tensor) -> Tensor:
        """fp32 of codes int8."""
        if self.table:
            return torch.tensor(self.table, dtype=torch.float32)[codes.long()]
        if self.name == "e4m3":
            return codes.view(torch.float8_e4m3fn).float()
        return codes.float()

    def whole(self) -> tuple[Tensor, int]:
        """The table in units of one of its numbers' halves, quarters ... that are whole: (int8, units of a 1)."""
        unit = next(unit for unit in (1, 2, 4, 8) if all(unit * each % 1 == 0 for each in self.table))
        return torch.tensor([unit * each for each in self.table]).to(torch.int8), unit

    def pack(self, codes: Tensor) -> Tensor:
        """Codes int8 [64 n, K] as C++ reads them: uint8 [n, K / 2, bytes of a pair of inputs]; of w8a8 [n, K / 4 + 1,
        64 outputs of 4 inputs], of which the last of a block are int32 [64]: -128 times the sums of codes."""
        if self.name == "w8a8":
            quads = codes.view(-1, 64, codes.shape[1] // 4, 4).transpose(1, 2).flatten(2)
            sums = codes.sum(-1, dtype=torch.int32).mul_(-128).view(-1, 1, 64)
            return torch.cat([quads.contiguous().view(torch.uint8), sums.view(torch.uint8)], dim=1)
        blocks = codes.view(-1, 4, 16, codes.shape[1] // 2, 2)
        if self.bits == 8:
            order = (0, 3, 1, 2, 4) if self.name == "e4m3" else (0, 3, 1, 4, 2)
            return blocks.permute(order).contiguous().view(torch.uint8).flatten(2)
        each = list((blocks - self.least).view(torch.uint8).unbind(1))  # four of [n, 16, K / 2, 2]
        packed = []
        if self.bits >= 4:
            low, each = [one & 15 for one in each], [one >> 4 for one in each]
            packed.append(_turned(torch.stack((low[0] | low[1] << 4, low[2] | low[3] << 4), -1), torch.int32))
        if self.bits in (2, 3, 6):
            low, each = [one & 3 for one in each], [one >> 2 for one in each]
            packed.append(_turned(low[0] | low[1] << 2 | low[2] << 4 | low[3] << 6, torch.int16))
        if self.bits in (3, 5):
            packed.append(_bits(torch.stack(each, 1)))
        return torch.cat(packed, -1) if len(packed) > 1 else packed[0]


def _turned(x: Tensor, words: torch.dtype) -> Tensor:
    """[n, 16, K / 2, ...] as uint8 [n, K / 2, 16 and the rest]; the rest makes one word of that type."""
    return x.flatten(3).contiguous().view(words).squeeze(-1).transpose(1, 2).contiguous().view(torch.uint8)


def _bits(x: Tensor) -> Tensor:
    """Bits [n, 4, 16, K / 2, 2] as uint8 [n, K / 2, 16]: of 16 outputs by two inputs a word of 32."""
    words = torch.zeros(x[:, :, 0, :, 0].shape, dtype=torch.int32)
    for output in range(16):
        for odd in range(2):
            words |= x[:, :, output, :, odd].int() << 2 * output + odd
    return words.transpose(1, 2).contiguous().view(torch.uint8)


CODES = {
    each.name: each
    for each in (
        Codes("int8", 8, -128), Codes("bytes", 8, -128), Codes("int4", 4, -8), Codes("uint4", 4), Codes("uint5", 5),
        Codes("int6", 6, -32), Codes("e2m1", 4, table=E2M1), Codes("e4m3", 8), Codes("w8a8", 8, -128),
        Codes("uint2", 2), Codes("int3", 3, -4), Codes("iq4", 4, table=IQ4), Codes("iq3_s", 4, table=IQ3_S),
        Codes("iq3_xxs", 4, table=IQ3_XXS), Codes("iq2", 3, table=IQ2), Codes("iq1", 3, table=IQ1),
        Codes("nf4", 4, table=NF4),
    )
}  # fmt: skip
"""int8: one scale for all inputs of an output; bytes: the same codes in groups; w8a8: for rows that are rounded."""


@dataclass(frozen=True, slots=True)
class Format:
    """See the head of this file. block 0: one scale for all inputs of an output, fp32. group: inputs under one pair of
    scale and offset, a divisor of the block."""

    name: str
    codes: Codes
    number: Number
    block: int
    group: int
    offset: Offset = "none"
    sub: Subs = "whole"

    @property
    def subs(self) -> Subs:
        """What scales of groups are the block's times."""
        return "none" if self.group == self.block else self.sub

    @property
    def bits(self) -> float:
        """Of a weight in memory."""
        if not self.block:
            return self.codes.bits
        each = {"fp32": 32, "bf16": 16, "fp16": 16, "e8m0": 8}[self.number]
        large = each * (2 if self.offset == "minimum" else 1) / self.block
        small = (8 * (self.subs != "none") + 8 * (self.offset != "none")) / self.group
        return self.codes.bits + large + small

    def grouped(self, group: int, number: Number) -> Format:
        """The same in groups of another size, under scales of another type."""
        return replace(self, block=group, group=group, number=number)

    def of_rows(self, inputs: int) -> Format:
        """The same with a block of so many inputs, all that a row has."""
        return replace(self, block=inputs)


def _listed(*formats: Format) -> dict[str, Format]:
    return {each.name: each for each in formats}


FORMATS = _listed(
    Format("int8", CODES["int8"], "fp32", 0, 0),
    Format("int4", CODES["int4"], "bf16", 64, 64),
    Format("w8a8", CODES["w8a8"], "fp32", 0, 0),
    Format("fp8_rowwise", CODES["e4m3"], "fp32", 0, 0),
    Format("Q8_0", CODES["bytes"], "fp16", 32, 32),
    Format("Q4_0", CODES["int4"], "fp16", 32, 32),
    Format("Q4_1", CODES["uint4"], "fp16", 32, 32, "minimum"),
    Format("Q5_0", CODES["uint5"], "fp16", 32, 32, "minimum"),
    Format("Q5_1", CODES["uint5"], "fp16", 32, 32, "minimum"),
    Format("Q4_K", CODES["uint4"], "fp16", 256, 32, "minimum"),
    Format("Q5_K", CODES["uint5"], "fp16", 256, 32, "minimum"),
    Format("Q6_K", CODES["int6"], "fp16", 256, 16),
    Format("MXFP4", CODES["e2m1"], "e8m0", 32, 32),
    Format("Q2_K", CODES["uint2"], "fp16", 256, 16, "minimum"),
    Format("Q3_K", CODES["int3"], "fp16", 256, 16),
    Format("IQ4_NL", CODES["iq4"], "fp16", 32, 32),
    Format("IQ4_XS", CODES["iq4"], "fp16", 256, 32),
    Format("IQ3_S", CODES["iq3_s"], "fp16", 256, 32),
    Format("IQ3_XXS", CODES["iq3_xxs"], "fp16", 256, 32),
    Format("IQ2_S", CODES["iq2"], "fp16", 256, 16),
    Format("IQ2_XS", CODES["iq2"], "fp16", 256, 16),
    Format("IQ2_XXS", CODES["iq2"], "fp16", 256, 32),
    Format("IQ1_M", CODES["iq1"], "fp16", 256, 16),
    Format("IQ1_S", CODES["iq1"], "fp16", 256, 32),
    Format("TQ1_0", CODES["uint2"], "fp16", 256, 256, "zero"),
    Format("TQ2_0", CODES["uint2"], "fp16", 256, 256, "zero"),
    Format("Q1_0", CODES["uint2"], "fp16", 128, 128, "zero"),
    Format("NVFP4", CODES["e2m1"], "fp32", 4096, 16, sub="e4m3"),
    Format("NF4", CODES["nf4"], "fp32", 64, 64),
    Format("W4", CODES["int4"], "fp16", 128, 128),
    Format("W4 zeros", CODES["int4"], "fp16", 128, 128, "zero"),
    Format("W8", CODES["bytes"], "fp16", 128, 128),
    Format("W8 zeros", CODES["bytes"], "fp16", 128, 128, "zero"),
    Format("FP8", CODES["e4m3"], "fp32", 128, 128),
)
"""By name. Of the last five block, group and type of scales are the checkpoint's (Format.grouped); NVFP4 has one scale
for all inputs of a row (Format.of_rows)."""


@dataclass(slots=True)
class Coded:
    """A weight [N, K] taken apart. codes int8 [N, K]; scales [N, K / block]; subs int8 [N, K / group] (of e4m3 their
    bits) or None; minima as scales or None; smalls int8 [N, K / group] or None: what minima are multiplied by, or zero
    points. order int32 [K]: the input that each column of codes is for; None: its own. Raises ValueError for shapes
    that do not fit, and for scales that are not finite.
    """

    format: Format
    codes: Tensor
    scales: Tensor
    subs: Tensor | None = None
    minima: Tensor | None = None
    smalls: Tensor | None = None
    order: Tensor | None = None

    def __post_init__(self) -> None:
        form, (outputs, inputs) = self.format, self.codes.shape
        blocks = inputs // form.block if form.block else 1
        groups = inputs // form.group if form.group else 1
        step = form.block or (4 if form.name == "w8a8" else 2)
        if inputs % step or inputs % 2:
            raise ValueError(f"{form.name} takes inputs in multiples of {step}, got {inputs}")
        for tensor, columns in (
            (self.scales, blocks),
            (self.subs, groups),
            (self.minima, blocks),
            (self.smalls, groups),
        ):
            if tensor is not None and tensor.shape != (outputs, columns):
                raise ValueError(f"{form.name}: scales {list(tensor.shape)} where {[outputs, columns]} are expected")
        for tensor in (self.scales, self.minima):
            if tensor is not None and not _finite(tensor):
                raise ValueError("a scale is NaN or infinity")
        if form.subs == "e4m3" and self.subs is not None and bool(((self.subs & 127) == 127).any()):
            raise ValueError("a scale is NaN")

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.codes.shape
        return outputs, inputs

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] that the codes stand for, its columns in their own order."""
        outputs, inputs = self.codes.shape
        scales, offsets = self.scales_and_offsets()
        weight = self.format.codes.values(self.codes).view(outputs, scales.shape[1], -1) * scales[..., None]
        if offsets is not None:
            weight = weight + offsets[..., None]
        weight = weight.view(outputs, inputs)
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order.long(), weight)
        return weight.to(dtype)

    def scales_and_offsets(self) -> tuple[Tensor, Tensor | None]:
        """fp32 [N, K / group] each; no offsets: None."""
        outputs = len(self.codes)

        def of_groups(blocks: Tensor, small: Tensor) -> Tensor:
            return (_wide(blocks)[..., None] * small.float().view(outputs, blocks.shape[1], -1)).view(outputs, -1)

        subs = self.subs
        if subs is not None and self.format.subs == "e4m3":
            subs = subs.view(torch.float8_e4m3fn)
        scales = _wide(self.scales) if subs is None else of_groups(self.scales, subs)
        if self.smalls is None:
            return scales, None
        if self.minima is None:
            return scales, -(scales * self.smalls.float())
        return scales, -of_groups(self.minima, self.smalls)

    def joined(self, others: list[Coded]) -> Coded:
        """This weight's outputs, then those of others in the same format and order."""
        each = [self, *others]

        def rows(name: str) -> Tensor | None:
            parts = [getattr(one, name) for one in each]
            return None if parts[0] is None else torch.cat(parts)

        codes, scales = rows("codes"), rows("scales")
        assert codes is not None and scales is not None
        return Coded(self.format, codes, scales, rows("subs"), rows("minima"), rows("smalls"), self.order)

    def of_plain_rows(self) -> Coded:
        """The same weight, for rows that are not rounded."""
        return Coded(FORMATS["int8"], self.codes, self.scales) if self.format.name == "w8a8" else self

    def alike(self, other: Coded) -> bool:
        """Whether both may be one weight."""
        same = (self.order is None) == (other.order is None)
        same = same and (self.order is None or other.order is None or torch.equal(self.order, other.order))
        return self.format == other.format and same


def _wide(scales: Tensor) -> Tensor:
    """fp32 of scales as they are stored."""
    if scales.dtype != torch.uint8:
        return scales.float()
    exponents = scales.int()
    return torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)  # 2^-127 is subnormal


def _finite(scales: Tensor) -> bool:
    return bool((scales != 255).all() if scales.dtype == torch.uint8 else scales.isfinite().all())
