"""What a product of rounded rows is: both factors are codes, each row and each output has one scale.

T: rows, K: inputs, N: outputs. The definition, in plain torch and on any device: kernels are compared with it.

    y[t, n] = w_scale[n] * (x_scale[t] * sum over k of x_code[t, k] * w_code[n, k])

A row's scale is its greatest magnitude over 127, of that row alone; products with scales are rounded to fp32 from
left to right. Sums of whole numbers are exact in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127.0
LEAST = 1e-30
"""Rows of smaller numbers are rows of zeros: the inverse of their scale would be infinite."""


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [T, K] as codes int8 [T, K] under scales fp32 [T]. A row that is not finite: codes 0, scale NaN."""
    wide = x.float()
    top = wide.abs().amax(-1, keepdim=True)
    finite = top < torch.inf
    zero = ~finite | (top < LEAST)
    largest = torch.full_like(top, LARGEST)  # torch takes a number over a tensor as the number times an inverse
    codes = torch.where(zero, 0.0, wide * (largest / torch.where(zero, 1.0, top))).round()
    scales = torch.where(zero, 0.0, top / largest).masked_fill(~finite, torch.nan)
    return codes.to(torch.int8), scales.squeeze(-1)


def product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Rounded rows of x [T, K] times a weight's codes int8 [N, K] under scales fp32 [N]: fp32 [T, N]."""
    rows, row_scales = round_rows(x)
    sums = rows.double() @ codes.double().T
    return sums.float() * row_scales[:, None] * scales
