"""Weights of drawn codes under drawn scales, in any format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.formats import Coded, Format

SCALES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def coded(form: Format, outputs: int, blocks: int, seed: int = 0, **more: Any) -> Coded:
    """Random codes, scales, minima and small numbers, subnormal scales among them."""
    made = torch.Generator().manual_seed(seed)
    inputs, groups = blocks * form.block, blocks * (form.block // form.group)

    def whole(low: int, high: int, columns: int) -> Tensor:
        return torch.randint(low, high, (outputs, columns), generator=made).to(torch.int8)

    def number() -> Tensor:
        if form.number == "e8m0":
            return torch.randint(110, 140, (outputs, blocks), generator=made).to(torch.uint8)
        drawn = torch.randn(outputs, blocks, generator=made) / 16
        drawn[::3] *= 1e-6
        return drawn.to(SCALES[form.number])

    least = form.codes.least
    codes = whole(least, least + 2**form.codes.bits, inputs)
    if form.codes.name == "e4m3":
        codes[(codes & 127) == 127] = 5
    smalls = (
        None if form.offset == "none" else whole(0, 64, groups) if form.offset == "minimum" else whole(-8, 9, groups)
    )
    minima = number() if form.offset == "minimum" else None
    subs = whole(-64, 64, groups) if form.subs == "whole" else None
    if form.subs == "e4m3":
        subs = whole(-128, 127, groups)
        subs[(subs & 127) == 127] = 3
    return Coded(form, codes, number(), subs, minima, smalls, **more)
