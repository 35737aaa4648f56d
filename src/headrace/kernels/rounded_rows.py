"""What a product of rounded rows is: both factors are codes, each row and each output has one scale.

T: rows, K: inputs, N: outputs. The definition, in plain torch and on any device: kernels are compared with it.

    y[t, n] = w_scale[n] * (x_scale[t] * sum over k of x_code[t, k] * w_code[n, k])

int8 (w8a8): a row's scale is its greatest magnitude over 127; sums of whole numbers are exact in any order. e4m3
(fp8_rowwise): over 448, the greatest number of that type; here sums are in fp64, where a tensor core's are shorter. A
scale is of that row alone; products with scales are rounded to fp32 from left to right.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Codes = Literal["int8", "e4m3"]
LARGEST: dict[Codes, float] = {"int8": 127.0, "e4m3": 448.0}
LEAST = 1e-30
"""Rows of smaller numbers are rows of zeros: the inverse of their scale would be infinite."""


def round_rows(x: Tensor, kind: Codes = "int8") -> tuple[Tensor, Tensor]:
    """Rows [T, K] as codes [T, K], int8 or float8_e4m3fn, under scales fp32 [T]. Of a row that is not finite codes are
    0 and the scale is NaN."""
    wide = x.float()
    top = wide.abs().amax(-1, keepdim=True)
    finite = top < torch.inf
    zero = ~finite | (top < LEAST)
    largest = torch.full_like(top, LARGEST[kind])  # torch takes a number over a tensor as the number times an inverse
    steps = torch.where(zero, 0.0, wide * (largest / torch.where(zero, 1.0, top)))
    scales = torch.where(zero, 0.0, top / largest).masked_fill(~finite, torch.nan)
    return codes_of(steps, kind), scales.squeeze(-1)


def codes_of(steps: Tensor, kind: Codes) -> Tensor:
    """The codes nearest to numbers in units of their scale, of two as near the even one; beyond the ends, these."""
    held = steps.clamp(-LARGEST[kind], LARGEST[kind])
    return held.round().to(torch.int8) if kind == "int8" else held.to(torch.float8_e4m3fn)


def product(x: Tensor, codes: Tensor, scales: Tensor, kind: Codes = "int8") -> Tensor:
    """Rounded rows of x [T, K] times a weight's codes [N, K], of the type that rows have, under scales fp32 [N]: fp32
    [T, N]."""
    rows, row_scales = round_rows(x, kind)
    sums = rows.float().double() @ codes.float().double().T
    return sums.float() * row_scales[:, None] * scales
