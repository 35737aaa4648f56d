"""Chunks <-> stored sections in torch: the slow truth beside csrc/store/stored.cpp, bit for bit, and its stand-in.

n: chunks; heads: Hkv, or 1 for activations; a plane is [heads, D, 64] (K) or [heads, 64, D] (V, X), in plain order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.config import OffloadFormat
from headrace.types import CHUNK

GROUP = 64
MOST_HALF = 65504.0


@dataclass(slots=True)
class Plane:
    """One kind of numbers of a layer: its pool [slots, heads, rows, cols], and scales [slots, heads, 64] if int8.

    by_column: an int8 scale is for one column (a key's), not for one row. vnni: see kernels.cpu_attention.layout.
    """

    pool: Tensor
    scale: Tensor | None
    by_column: bool
    vnni: bool

    def get(self, slots: Tensor) -> tuple[Tensor, Tensor | None]:
        """Numbers [n, heads, rows, cols] and scales of these chunks, in plain order."""
        x = self.pool[slots]
        if self.vnni:
            count, heads, rows, cols = x.shape
            x = x.view(count, heads, rows // 2, cols, 2).transpose(3, 4).reshape(x.shape)
        return x, None if self.scale is None else self.scale[slots]

    def set(self, slots: Tensor, x: Tensor, scale: Tensor | None) -> None:
        if self.vnni:
            count, heads, rows, cols = x.shape
            x = x.view(count, heads, rows // 2, 2, cols).transpose(3, 4).reshape(x.shape)
        self.pool[slots] = x
        if self.scale is not None:
            assert scale is not None
            self.scale[slots] = scale

    def shape(self, count: int) -> tuple[int, ...]:
        """Of the numbers of so many chunks."""
        return (count, *self.pool.shape[1:])

    def sizes(self, format: ChunkFormat) -> tuple[int, int]:
        """Bytes of a chunk's numbers and of its scales."""
        _, heads, rows, cols = self.pool.shape
        return format.sizes(heads * rows * cols, heads * CHUNK, self.pool.dtype)

    def spread(self, scale: Tensor) -> Tensor:
        """Scales [n, heads, 64] as they multiply numbers."""
        return scale[..., None, :] if self.by_column else scale[..., None]


class ChunkFormat(Protocol):
    """How a plane's chunks are stored. Another one is a class here, its name in config.OffloadFormat, and its C++ side
    (Format and csrc/stored.cpp)."""

    def sizes(self, numbers: int, tokens: int, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes of `numbers` numbers of a pool's type and of the scales beside them. tokens: one for each head."""

    def encode(self, plane: Plane, slots: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Numbers, scales and whether the format holds them, of each chunk; None: it holds any."""

    def decode(self, plane: Plane, code: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        """Numbers and scales as the pool has them, of bytes [n, ...] each."""


class RawChunks:
    """As the pool has it."""

    def sizes(self, numbers: int, tokens: int, dtype: torch.dtype) -> tuple[int, int]:
        return numbers * dtype.itemsize, 4 * tokens if dtype == torch.int8 else 0

    def encode(self, plane: Plane, slots: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, scale = plane.get(slots)
        return x, x.new_empty(len(slots), 0) if scale is None else scale, None

    def decode(self, plane: Plane, code: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        stored = None if plane.scale is None else scale.view(torch.float32).view(len(code), -1, CHUNK)
        return code.view(plane.pool.dtype).view(plane.shape(len(code))), stored


class Int8Chunks(RawChunks):
    """Codes under a scale for each token and head; an int8 pool as it is."""

    def sizes(self, numbers: int, tokens: int, dtype: torch.dtype) -> tuple[int, int]:
        return numbers, 4 * tokens

    def encode(self, plane: Plane, slots: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if plane.scale is not None:
            return super().encode(plane, slots)
        wide = plane.get(slots)[0].float()
        return *_quantise8(plane, wide), wide.isfinite().flatten(1).all(1)

    def decode(self, plane: Plane, code: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        if plane.scale is not None:
            return super().decode(plane, code, scale)
        scales = plane.spread(scale.view(torch.float32).view(len(code), -1, CHUNK))
        return (code.view(torch.int8).view(plane.shape(len(code))) * scales).to(plane.pool.dtype), None


class Int4Chunks:
    """Codes in groups of 64 numbers that follow one another."""

    def sizes(self, numbers: int, tokens: int, dtype: torch.dtype) -> tuple[int, int]:
        return numbers // 2, numbers // GROUP * 4

    def encode(self, plane: Plane, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, scale = plane.get(slots)
        return _quantise4(x.float() if scale is None else x.float() * plane.spread(scale))

    def decode(self, plane: Plane, code: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        wide = _widen4(code, scale).view(plane.shape(len(code)))
        return (wide.to(plane.pool.dtype), None) if plane.scale is None else _quantise8(plane, wide)


FORMATS: dict[OffloadFormat, ChunkFormat] = {"raw": RawChunks(), "int8": Int8Chunks(), "int4": Int4Chunks()}


def store(buffer: Tensor, planes: list[Plane], slots: Tensor, format: ChunkFormat) -> list[bool]:
    """Fills the rows of buffer [n, bytes]: for each, whether the format holds its numbers."""
    codes, scales, fits = [], [], list[Tensor]()
    for plane in planes:
        code, scale, good = format.encode(plane, slots)
        fits += [] if good is None else [good]
        codes.append(_bytes(code))
        scales.append(_bytes(scale))
    packed = torch.cat(codes + scales, dim=1)
    buffer[:, : packed.shape[1]] = packed
    return torch.stack(fits).all(0).tolist() if fits else [True] * len(slots)


def load(buffer: Tensor, planes: list[Plane], slots: Tensor, format: ChunkFormat) -> None:
    """Fills the chunks `slots` [n] from the rows of `buffer`."""
    empty = [plane.sizes(format) for plane in planes]
    cuts = [code for code, _ in empty] + [scale for _, scale in empty]
    parts = buffer[:, : sum(cuts)].split(cuts, dim=1)
    for plane, code, scale in zip(planes, parts[: len(planes)], parts[len(planes) :], strict=True):
        plane.set(slots, *format.decode(plane, code.contiguous(), scale.contiguous()))


def _quantise8(plane: Plane, x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-2 if plane.by_column else -1) / 127
    steps = plane.spread(scale)
    codes = torch.where(steps > 0, (x / steps).round().clamp(-127, 127), 0)
    return codes.nan_to_num(0).to(torch.int8), scale


def _quantise4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [n, groups, 32], (low, step) fp16 [n, groups, 2], and which chunks fit."""
    groups = x.reshape(len(x), -1, GROUP)
    fits = (groups.abs() <= MOST_HALF).flatten(1).all(1)
    groups = torch.where(fits[:, None, None], groups, 0)
    least, most = groups.amin(-1) + 0.0, groups.amax(-1)  # adding 0 makes -0 one: its bits would depend on the order
    low = _half(least, up=False)
    step = _half((most - low.float()) / 15 + 0.0, up=True)
    steps = step.float()[..., None]
    codes = torch.where(steps > 0, (groups - low.float()[..., None]) / steps, 0).clamp(max=15).round().to(torch.uint8)
    packed = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    return packed, torch.stack((low, step), dim=-1), fits


def _widen4(code: Tensor, bounds: Tensor) -> Tensor:
    code = code.view(len(code), -1, GROUP // 2)
    low, step = bounds.view(torch.float16).view(len(code), -1, 2).float().unbind(-1)
    return low[..., None] + torch.cat((code & 15, code >> 4), dim=-1).float() * step[..., None]


def _half(x: Tensor, up: bool) -> Tensor:
    """The next fp16 at or above x (x >= 0 then), or at or below x; |x| <= 65504."""
    near = x.half()
    bits = near.view(torch.int16)
    if up:
        return torch.where(near.float() < x, bits + 1, bits).view(torch.float16)
    below = torch.where(near > 0, bits - 1, torch.where(near < 0, bits + 1, -0x7FFF)).to(torch.int16)
    return torch.where(near.float() > x, below, bits).view(torch.float16)


def _bytes(x: Tensor) -> Tensor:
    """[n, ...] -> uint8 [n, bytes]."""
    return x.reshape(len(x), -1).contiguous().view(torch.uint8) if x.numel() else x.new_empty(len(x), 0).byte()
