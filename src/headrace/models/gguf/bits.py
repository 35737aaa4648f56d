"""Numbers of a few bits out of rows of blocks. N: rows, B: blocks of a row."""

from __future__ import annotations

import torch
from torch import Tensor


def numbers(rows: Tensor, block: int, at: int, size: int, dtype: torch.dtype) -> Tensor:
    """`size` bytes from `at` on in each block: [N, B, size / bytes of dtype]."""
    return rows.view(len(rows), -1, block)[..., at : at + size].contiguous().view(dtype)


def words(rows: Tensor, block: int, at: int, size: int) -> Tensor:
    """The same as words of 16 bits: int32 [N, B, size / 2]."""
    low, high = numbers(rows, block, at, size, torch.uint8).int().unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 8


def row(codes: Tensor) -> Tensor:
    """int8 [N, all that a row has]."""
    return codes.reshape(len(codes), -1).to(torch.int8)


def halves(bytes_: Tensor) -> Tensor:
    """[..., n] -> [..., 2, n]: the low four bits of each, then the high four."""
    return at_bits(bytes_, 4)


def at_bits(bytes_: Tensor, bits: int, each: int = 8) -> Tensor:
    """[..., n] -> [..., each / bits, n]: so many bits of each number of `each` bits, the lowest first."""
    shifts = torch.arange(0, each, bits, dtype=bytes_.dtype)[:, None]
    return bytes_[..., None, :] >> shifts & (1 << bits) - 1
