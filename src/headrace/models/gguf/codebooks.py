"""ggml's types IQ1 to IQ3: groups of 4 or 8 numbers are one entry of a codebook, their signs and scales lie beside it.

N: rows, K: numbers of a row, in blocks of 256. In memory each number is a code of its own again: which of an entry's
few values it is, and above that a bit for its sign or shift (kernels.formats, whose tables are in units of
`scale * (2 s + 1)`, s being the stored sub-scale). How a block lies: as in `blocks`. The codebooks are those of the
gguf package.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.formats import FORMATS, Coded
from headrace.models.gguf.bits import at_bits, halves, numbers, row, words


@lru_cache(maxsize=8)
def _entries(name: str) -> Tensor:
    """The codebook of a type, uint8 [entries, 4 or 8]: which of its few values each number is, from 0 on."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    return torch.from_numpy(np.searchsorted(kind.grid_map, kind.grid.reshape(kind.grid_shape)).astype(np.uint8))


def _signs(bytes_: Tensor, group: int) -> Tensor:
    """[..., n] -> uint8 [..., 8 n / group, group]: whether a number is below zero, a bit each."""
    bits = at_bits(bytes_.to(torch.uint8), 1).transpose(-1, -2)  # [..., n, 8]
    return bits.flatten(-2).unflatten(-1, (-1, group))


def _even(sevens: Tensor) -> Tensor:
    """Signs of 7 bits and the eighth, which makes the number of those below zero even: uint8."""
    return torch.tensor([each | each.bit_count() % 2 << 7 for each in range(128)], dtype=torch.uint8)[sevens.long()]


def _looked_up(name: str, index: Tensor, above: Tensor, bit: int) -> Tensor:
    """Codes [N, K]: of entries [...] with a bit [..., 4 or 8] above them."""
    return row(_entries(name)[index.long()] | above << bit)


def _odd(small: Tensor) -> Tensor:
    """Sub-scales int8 [N, groups]: 2 s + 1."""
    return row(2 * small + 1)


def _scale(rows: Tensor, block: int) -> Tensor:
    return numbers(rows, block, 0, 2, torch.float16)[..., 0]


def _nibbles(rows: Tensor, block: int, at: int, size: int) -> Tensor:
    """Sub-scales of four bits, the low ones of a byte first."""
    return _odd(halves(numbers(rows, block, at, size, torch.uint8)).transpose(-1, -2))


def _signs_and_scales(halfwords: Tensor) -> tuple[Tensor, Tensor]:
    """Of words of 32 bits, as two of 16 each [..., 2]: four lots of 7 bits, and the last four."""
    low, high = halfwords.unbind(-1)
    word = low | high << 16
    return _even(at_bits(word[..., None], 7, 28).squeeze(-1) & 127), word >> 28 & 15


def _iq2_xxs(rows: Tensor) -> Coded:
    index = numbers(rows, 66, 2, 64, torch.uint8).unflatten(-1, (8, 8))[..., :4]
    signs, small = _signs_and_scales(words(rows, 66, 2, 64).unflatten(-1, (8, 4))[..., 2:])
    codes = _looked_up("IQ2_XXS", index, _signs(signs, 8), 2)
    return Coded(FORMATS["IQ2_XXS"], codes, _scale(rows, 66), _odd(small))


def _iq2_xs(rows: Tensor) -> Coded:
    both = words(rows, 74, 2, 64)
    codes = _looked_up("IQ2_XS", both & 511, _signs(_even(both >> 9), 8), 2)
    return Coded(FORMATS["IQ2_XS"], codes, _scale(rows, 74), _nibbles(rows, 74, 66, 8))


def _iq2_s(rows: Tensor) -> Coded:
    low, signs = numbers(rows, 82, 2, 64, torch.uint8).split(32, -1)
    high = at_bits(numbers(rows, 82, 66, 8, torch.uint8), 2).transpose(-1, -2).flatten(-2)
    codes = _looked_up("IQ2_S", low | high.int() << 8, _signs(signs, 8), 2)
    return Coded(FORMATS["IQ2_S"], codes, _scale(rows, 82), _nibbles(rows, 82, 74, 8))


def _iq3_xxs(rows: Tensor) -> Coded:
    index = numbers(rows, 98, 2, 64, torch.uint8)
    signs, small = _signs_and_scales(words(rows, 98, 66, 32).unflatten(-1, (8, 2)))
    codes = _looked_up("IQ3_XXS", index, _signs(signs.flatten(-2), 4), 3)
    return Coded(FORMATS["IQ3_XXS"], codes, _scale(rows, 98), _odd(small))


def _iq3_s(rows: Tensor) -> Coded:
    low, ninth, signs, _ = numbers(rows, 110, 2, 108, torch.uint8).split((64, 8, 32, 4), -1)
    index = low | at_bits(ninth, 1).transpose(-1, -2).flatten(-2).int() << 8
    codes = _looked_up("IQ3_S", index, _signs(signs, 4), 3)
    return Coded(FORMATS["IQ3_S"], codes, _scale(rows, 110), _nibbles(rows, 110, 106, 4))


def _iq1_s(rows: Tensor) -> Coded:
    low, more = numbers(rows, 50, 2, 32, torch.uint8), words(rows, 50, 34, 16)
    index = low | at_bits(more, 3, 12).transpose(-1, -2).flatten(-2) << 8
    above = (more >> 15 ^ 1).to(torch.uint8)[..., None, None].expand(*more.shape, 4, 1).flatten(-3, -2)
    return Coded(FORMATS["IQ1_S"], _looked_up("IQ1_S", index, above, 2), _scale(rows, 50), _odd(more >> 12 & 7))


def _iq1_m(rows: Tensor) -> Coded:
    """The scale is the highest four bits of each word of sub-scales, of three bits each."""
    low, small = numbers(rows, 56, 0, 32, torch.uint8), words(rows, 56, 48, 8)
    more = halves(numbers(rows, 56, 32, 16, torch.uint8)).transpose(-1, -2).flatten(-2)
    codes = _looked_up("IQ1_S", low | (more & 7).int() << 8, (more >> 3 ^ 1)[..., None], 2)
    scale = sum(small[..., i] >> 12 << 4 * i for i in range(4))
    assert isinstance(scale, Tensor)
    scales = scale.to(torch.int16).view(torch.float16)
    return Coded(FORMATS["IQ1_M"], codes, scales, _odd(at_bits(small, 3, 12).transpose(-1, -2)))


READERS: dict[str, Callable[[Tensor], Coded]] = {
    "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s, "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s, "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}  # fmt: skip
