"""Blocks of ggml's types taken apart, row by row, into codes, scales and the rest (kernels.formats).

N: rows (outputs), K: inputs, B: blocks of a row. How a block lies: ggml's ggml-common.h and ggml-quants.c, which the
gguf package's `quants` follows; tests compare with that. Within a block low and high halves of bytes hold codes that
are 16, 32 or 64 apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headrace.kernels.formats import FORMATS, Coded
from headrace.models.gguf import codebooks
from headrace.models.gguf.bits import at_bits, halves, numbers, row

SLICE = 4096


def coded(name: str, rows: Tensor, scale: Tensor | None = None) -> Coded:
    """A weight [N, K] from rows uint8 [N, bytes of a row], in a type of that name. A slice of rows is taken apart after
    another, which takes several times the room of its codes. scale: one number in fp32 that all are multiplied by, of
    types that have none (NVFP4). Raises ValueError for scales that are not finite, or more than one."""
    first, *others = map(_READERS[name], rows.split(SLICE))
    whole = first.joined(others) if others else first
    if scale is None:
        return whole
    if scale.numel() != 1:
        raise ValueError(f"there are {scale.numel()} scales where one is expected")
    return replace(whole, scales=scale.float().reshape(1, 1).expand_as(whole.scales).contiguous())


def _q8_0(rows: Tensor) -> Coded:
    codes = numbers(rows, 34, 2, 32, torch.int8)
    return Coded(FORMATS["Q8_0"], row(codes), numbers(rows, 34, 0, 2, torch.float16)[..., 0])


def _q4_0(rows: Tensor) -> Coded:
    codes = halves(numbers(rows, 18, 2, 16, torch.uint8)).to(torch.int8) - 8
    return Coded(FORMATS["Q4_0"], row(codes), numbers(rows, 18, 0, 2, torch.float16)[..., 0])


def _q4_1(rows: Tensor) -> Coded:
    codes = halves(numbers(rows, 20, 4, 16, torch.uint8))
    return _from_least("Q4_1", 20, rows, codes)


def _q5_0(rows: Tensor) -> Coded:
    """Codes of 0 to 31 less 16, which is a minimum of 16 scales."""
    scales = numbers(rows, 22, 0, 2, torch.float16)[..., 0]
    smalls = torch.full(scales.shape, 16, dtype=torch.int8)
    return Coded(FORMATS["Q5_0"], row(_with_fifths(rows, 22, 2)), scales, None, scales, smalls)


def _q5_1(rows: Tensor) -> Coded:
    return _from_least("Q5_1", 24, rows, _with_fifths(rows, 24, 4))


def _with_fifths(rows: Tensor, block: int, at: int) -> Tensor:
    """Codes of five bits [N, B, 2, 16]: the fifth ones lie in 32 bits from byte `at` on, the others behind them."""
    bytes_ = numbers(rows, block, at, 4, torch.uint8).unflatten(-1, (2, 2, 1))
    fifths = (bytes_ >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)
    return halves(numbers(rows, block, at + 4, 16, torch.uint8)) | fifths << 4


def _from_least(name: str, block: int, rows: Tensor, codes: Tensor) -> Coded:
    """Codes under a scale, above a least number of each block."""
    pair = numbers(rows, block, 0, 4, torch.float16)
    smalls = torch.ones(pair.shape[:2], dtype=torch.int8)
    return Coded(FORMATS[name], row(codes), pair[..., 0], None, -pair[..., 1], smalls)


def _mxfp4(rows: Tensor) -> Coded:
    codes = halves(numbers(rows, 17, 1, 16, torch.uint8))
    return Coded(FORMATS["MXFP4"], row(codes), numbers(rows, 17, 0, 1, torch.uint8)[..., 0])


def _nvfp4(rows: Tensor) -> Coded:
    """Groups of 16 codes, the first 8 in low halves of bytes. Scales have no sign, and 127, which is no number in FP8,
    is 0 here. The number that all are multiplied by is a tensor of its own."""
    codes = halves(numbers(rows, 36, 4, 32, torch.uint8).unflatten(-1, (4, 8)))
    subs = row(numbers(rows, 36, 0, 4, torch.uint8).view(torch.int8))
    every = torch.ones(len(rows), 1)
    return Coded(FORMATS["NVFP4"].of_rows(codes[0].numel()), row(codes), every, subs.where(subs != 127, 0))


def _tq1_0(rows: Tensor) -> Coded:
    """Five numbers in a byte of 32, five in one of 16, then four in one of 4: digits to base 3 of a fraction of 256."""

    def digits(at: int, size: int, count: int) -> Tensor:
        powers = 3 ** torch.arange(count, dtype=torch.int32)[:, None]
        each = numbers(rows, 54, at, size, torch.uint8).int()[..., None, :] * powers & 255
        return (each * 3 >> 8).flatten(-2)

    codes = torch.cat((digits(0, 32, 5), digits(32, 16, 5), digits(48, 4, 4)), -1)
    return _ternary("TQ1_0", codes, numbers(rows, 54, 52, 2, torch.float16)[..., 0])


def _tq2_0(rows: Tensor) -> Coded:
    codes = at_bits(numbers(rows, 66, 0, 64, torch.uint8).unflatten(-1, (2, 32)), 2)
    return _ternary("TQ2_0", codes, numbers(rows, 66, 64, 2, torch.float16)[..., 0])


def _q1_0(rows: Tensor) -> Coded:
    """A bit for each sign."""
    bits = numbers(rows, 18, 2, 16, torch.uint8)[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return _ternary("Q1_0", bits * 2, numbers(rows, 18, 0, 2, torch.float16)[..., 0])


def _ternary(name: str, codes: Tensor, scales: Tensor) -> Coded:
    """Codes of 0 to 3 less 1."""
    return Coded(FORMATS[name], row(codes), scales, smalls=torch.ones(scales.shape, dtype=torch.int8))


def _small_scales(rows: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The sub-scales and small minima of Q4_K and Q5_K, int8 [N, 8 B]: 6 bits each, in 12 bytes."""
    low, middle, high = numbers(rows, block, 4, 12, torch.uint8).split(4, dim=-1)
    scales = torch.cat((low & 63, (high & 15) | (low >> 6) << 4), -1)
    minima = torch.cat((middle & 63, high >> 4 | (middle >> 6) << 4), -1)
    return row(scales), row(minima)


def _with_minima(name: str, block: int, rows: Tensor, codes: Tensor) -> Coded:
    pair = numbers(rows, block, 0, 4, torch.float16)
    subs, smalls = _small_scales(rows, block)
    return Coded(FORMATS[name], row(codes), pair[..., 0], subs, pair[..., 1], smalls)


def _q4_k(rows: Tensor) -> Coded:
    quarters = numbers(rows, 144, 16, 128, torch.uint8).unflatten(-1, (4, 32))
    return _with_minima("Q4_K", 144, rows, halves(quarters))


def _q5_k(rows: Tensor) -> Coded:
    quarters = numbers(rows, 176, 48, 128, torch.uint8).unflatten(-1, (4, 32))
    fifth = numbers(rows, 176, 16, 32, torch.uint8)[..., None, :] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return _with_minima("Q5_K", 176, rows, halves(quarters).flatten(-3, -2) | fifth << 4)


def _q6_k(rows: Tensor) -> Coded:
    low = halves(numbers(rows, 210, 0, 128, torch.uint8).unflatten(-1, (2, 64))).unflatten(-1, (2, 32))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = numbers(rows, 210, 128, 64, torch.uint8).unflatten(-1, (2, 1, 32)) >> shifts & 3  # [N, B, 2, 4, 32]
    codes = (low.flatten(-3, -2) | high << 4).to(torch.int8) - 32
    subs = row(numbers(rows, 210, 192, 16, torch.int8))
    return Coded(FORMATS["Q6_K"], row(codes), numbers(rows, 210, 208, 2, torch.float16)[..., 0], subs)


def _q2_k(rows: Tensor) -> Coded:
    quarters = at_bits(numbers(rows, 84, 16, 64, torch.uint8).unflatten(-1, (2, 32)), 2)
    pair, both = numbers(rows, 84, 80, 4, torch.float16), numbers(rows, 84, 0, 16, torch.uint8)
    return Coded(FORMATS["Q2_K"], row(quarters), pair[..., 0], row(both & 15), pair[..., 1], row(both >> 4))


def _q3_k(rows: Tensor) -> Coded:
    """A third bit of 0 takes 4 away. Sub-scales of 6 bits, less 32: the lower four in 8 bytes, the others in four."""
    low = at_bits(numbers(rows, 110, 32, 64, torch.uint8).unflatten(-1, (2, 32)), 2).flatten(-3, -2)
    third = at_bits(numbers(rows, 110, 0, 32, torch.uint8), 1)
    codes = (low | third << 2).to(torch.int8) - 4
    lower, upper = numbers(rows, 110, 96, 12, torch.uint8).split((8, 4), -1)
    subs = row(halves(lower).flatten(-2) | at_bits(upper, 2).flatten(-2) << 4) - 32
    return Coded(FORMATS["Q3_K"], row(codes), numbers(rows, 110, 108, 2, torch.float16)[..., 0], subs)


def _iq4_nl(rows: Tensor) -> Coded:
    codes = halves(numbers(rows, 18, 2, 16, torch.uint8))
    return Coded(FORMATS["IQ4_NL"], row(codes), numbers(rows, 18, 0, 2, torch.float16)[..., 0])


def _iq4_xs(rows: Tensor) -> Coded:
    """Sub-scales of 6 bits, less 32: the upper two of all eight, then the lower four."""
    codes = halves(numbers(rows, 136, 8, 128, torch.uint8).unflatten(-1, (8, 16)))
    upper = at_bits(numbers(rows, 136, 2, 2, torch.uint8)[..., None], 2).flatten(-3)
    lower = halves(numbers(rows, 136, 4, 4, torch.uint8)[..., None]).flatten(-3)
    subs = row(lower | upper << 4) - 32
    return Coded(FORMATS["IQ4_XS"], row(codes), numbers(rows, 136, 0, 2, torch.float16)[..., 0], subs)


_READERS: dict[str, Callable[[Tensor], Coded]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "MXFP4": _mxfp4, "NVFP4": _nvfp4,
    "TQ1_0": _tq1_0, "TQ2_0": _tq2_0, "Q1_0": _q1_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
    **codebooks.READERS,
}  # fmt: skip
