"""ALiBi: a bias on attention scores, linear in the key's position. Hq: query heads, N: positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.config import AttentionSpec


def alibi_bias(spec: AttentionSpec, length: int) -> Tensor:
    """Bias [Hq, N] fp32 for scores that are scaled already.

    slope * key position differs from the textbook's slope * (key - query) by a constant per row, which softmax drops.
    Falcon was trained, and transformers computes, with slope, position and product rounded to bf16; so is this, for
    any compute type. Falcon also scales the bias with the scores.
    """
    positions = torch.arange(length)[None, :]
    product = alibi_slopes(spec.heads)[:, None].bfloat16() * positions
    return product.float() / math.sqrt(spec.head_dim)


def alibi_slopes(heads: int) -> Tensor:
    """Geometric slopes [Hq] fp32; beyond the greatest power of two, every other slope of twice as many heads."""
    power = 2 ** math.floor(math.log2(heads))
    return torch.cat((_slopes(power, range(1, power + 1)), _slopes(2 * power, range(1, 2 * (heads - power), 2))))


def _slopes(heads: int, exponents: range) -> Tensor:
    """The slopes of `heads` heads with these numbers, of 1 to `heads`."""
    base = torch.tensor(2 ** -(8 / heads), dtype=torch.float32)
    return torch.pow(base, torch.tensor(exponents, dtype=torch.int32))
