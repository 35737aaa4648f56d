"""Blocks of ggml's types taken apart, row by row, into codes, scales and the rest (kernels.formats).

N: rows (outputs), K: inputs, B: blocks of a row. How a block lies: ggml's ggml-common.h and ggml-quants.c, which the
gguf package's `quants` follows; tests compare with that. Within a block low and high halves of bytes hold codes that
are 16, 32 or 64 apart.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.kernels.formats import FORMATS, Coded


def coded(name: str, rows: Tensor) -> Coded:
    """A weight [N, K] from rows uint8 [N, bytes of a row], in a type of that name."""
    return _READERS[name](rows)


def _numbers(rows: Tensor, block: int, at: int, size: int, dtype: torch.dtype) -> Tensor:
    """`size` bytes from `at` on in each block: [N, B, size / bytes of dtype]."""
    return rows.view(len(rows), -1, block)[..., at : at + size].contiguous().view(dtype)


def _row(codes: Tensor) -> Tensor:
    return codes.reshape(len(codes), -1).to(torch.int8)


def _halves(bytes_: Tensor) -> Tensor:
    """[..., n] -> [..., 2, n]: the low four bits of each, then the high four."""
    return torch.stack((bytes_ & 15, bytes_ >> 4), -2)


def _q8_0(rows: Tensor) -> Coded:
    codes = _numbers(rows, 34, 2, 32, torch.int8)
    return Coded(FORMATS["Q8_0"], _row(codes), _numbers(rows, 34, 0, 2, torch.float16)[..., 0])


def _q4_0(rows: Tensor) -> Coded:
    codes = _halves(_numbers(rows, 18, 2, 16, torch.uint8)).to(torch.int8) - 8
    return Coded(FORMATS["Q4_0"], _row(codes), _numbers(rows, 18, 0, 2, torch.float16)[..., 0])


def _q4_1(rows: Tensor) -> Coded:
    codes = _halves(_numbers(rows, 20, 4, 16, torch.uint8))
    return _from_least("Q4_1", 20, rows, codes)


def _q5_0(rows: Tensor) -> Coded:
    """Codes of 0 to 31 less 16, which is a minimum of 16 scales."""
    scales = _numbers(rows, 22, 0, 2, torch.float16)[..., 0]
    smalls = torch.full(scales.shape, 16, dtype=torch.int8)
    return Coded(FORMATS["Q5_0"], _row(_with_fifths(rows, 22, 2)), scales, None, scales, smalls)


def _q5_1(rows: Tensor) -> Coded:
    return _from_least("Q5_1", 24, rows, _with_fifths(rows, 24, 4))


def _with_fifths(rows: Tensor, block: int, at: int) -> Tensor:
    """Codes of five bits [N, B, 2, 16]: the fifth ones lie in 32 bits from byte `at` on, the others behind them."""
    bytes_ = _numbers(rows, block, at, 4, torch.uint8).unflatten(-1, (2, 2, 1))
    fifths = (bytes_ >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)
    return _halves(_numbers(rows, block, at + 4, 16, torch.uint8)) | fifths << 4


def _from_least(name: str, block: int, rows: Tensor, codes: Tensor) -> Coded:
    """Codes under a scale, above a least number of each block."""
    numbers = _numbers(rows, block, 0, 4, torch.float16)
    smalls = torch.ones(numbers.shape[:2], dtype=torch.int8)
    return Coded(FORMATS[name], _row(codes), numbers[..., 0], None, -numbers[..., 1], smalls)


def _mxfp4(rows: Tensor) -> Coded:
    codes = _halves(_numbers(rows, 17, 1, 16, torch.uint8))
    return Coded(FORMATS["MXFP4"], _row(codes), _numbers(rows, 17, 0, 1, torch.uint8)[..., 0])


def _small_scales(rows: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The sub-scales and small minima of Q4_K and Q5_K, int8 [N, 8 B]: 6 bits each, in 12 bytes."""
    low, middle, high = _numbers(rows, block, 4, 12, torch.uint8).split(4, dim=-1)
    scales = torch.cat((low & 63, (high & 15) | (low >> 6) << 4), -1)
    minima = torch.cat((middle & 63, high >> 4 | (middle >> 6) << 4), -1)
    return _row(scales), _row(minima)


def _with_minima(name: str, block: int, rows: Tensor, codes: Tensor) -> Coded:
    numbers = _numbers(rows, block, 0, 4, torch.float16)
    subs, smalls = _small_scales(rows, block)
    return Coded(FORMATS[name], _row(codes), numbers[..., 0], subs, numbers[..., 1], smalls)


def _q4_k(rows: Tensor) -> Coded:
    quarters = _numbers(rows, 144, 16, 128, torch.uint8).unflatten(-1, (4, 32))
    return _with_minima("Q4_K", 144, rows, _halves(quarters))


def _q5_k(rows: Tensor) -> Coded:
    quarters = _numbers(rows, 176, 48, 128, torch.uint8).unflatten(-1, (4, 32))
    fifth = _numbers(rows, 176, 16, 32, torch.uint8)[..., None, :] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return _with_minima("Q5_K", 176, rows, _halves(quarters).flatten(-3, -2) | fifth << 4)


def _q6_k(rows: Tensor) -> Coded:
    low = _halves(_numbers(rows, 210, 0, 128, torch.uint8).unflatten(-1, (2, 64))).unflatten(-1, (2, 32))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = _numbers(rows, 210, 128, 64, torch.uint8).unflatten(-1, (2, 1, 32)) >> shifts & 3  # [N, B, 2, 4, 32]
    codes = (low.flatten(-3, -2) | high << 4).to(torch.int8) - 32
    subs = _row(_numbers(rows, 210, 192, 16, torch.int8))
    return Coded(FORMATS["Q6_K"], _row(codes), _numbers(rows, 210, 208, 2, torch.float16)[..., 0], subs)


_READERS: dict[str, Callable[[Tensor], Coded]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "MXFP4": _mxfp4, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
