"""The records that attention works on: one layer's pool of chunks, and which of its keys the rows of a call see.

Hq, Hkv: query and KV heads; D: head size; 64: tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from headrace.types import CHUNK

T = TypeVar("T")
Layout = Literal["plain", "vnni"]
"""How chunks lie in a pool. plain: K [Hkv, D, 64], V [Hkv, 64, D]. vnni: two elements of a pair side by side, K
[Hkv, D/2, 64, 2], V [Hkv, 32, D, 2], under the same shapes."""
Allocate = Callable[[Sequence[int], torch.dtype], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Keys and values of one layer: k [slots, Hkv, D, 64], v [slots, Hkv, 64, D]; int8 has a scale for each key and
    value, k_scale and v_scale fp32 [slots, Hkv, 64]. once: values are the keys too; k is then a view of v, right in the
    plain layout alone, and k_scale is v_scale."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    once: bool = False

    @classmethod
    def make(
        cls, slots: int, kv_heads: int, dim: int, dtype: torch.dtype, allocate: Allocate, once: bool = False
    ) -> Pool:
        """A pool in memory that `allocate` gives."""
        return cls.of([allocate(*each) for each in cls.parts(slots, kv_heads, dim, dtype, once)], once)

    @classmethod
    def of(cls, tensors: Sequence[Tensor], once: bool = False) -> Pool:
        """A pool with these tensors, in the order of `parts`."""
        if once:
            scale = tensors[1] if len(tensors) > 1 else None
            return cls(tensors[0].transpose(2, 3), tensors[0], scale, scale, once=True)
        return cls(tensors[0], tensors[1], *tensors[2:])  # type: ignore[arg-type]

    @staticmethod
    def parts(
        slots: int, kv_heads: int, dim: int, dtype: torch.dtype, once: bool = False
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each of a pool's tensors."""
        keys, values = ((slots, kv_heads, dim, CHUNK), dtype), ((slots, kv_heads, CHUNK, dim), dtype)
        planes = [values] if once else [keys, values]
        scales = [((slots, kv_heads, CHUNK), torch.float32)] * (len(planes) if dtype == torch.int8 else 0)
        return [*planes, *scales]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that the pool has, in the order of the fields: none of keys, if these are the values."""
        every = (self.v, self.v_scale) if self.once else (self.k, self.v, self.k_scale, self.v_scale)
        return tuple(each for each in every if each is not None)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(slots, Hkv, D)."""
        slots, kv_heads, dim, _ = self.k.shape
        return slots, kv_heads, dim


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """Which keys the rows of a call see, and what becomes of their scores.

    items int32 [n, 4] = (slot, key_start, row_begin, row_end): the chunk in `slot` holds the keys at key_start ..
    key_start + 63 and is offered to rows row_begin .. row_end - 1. A row at position p, of positions int64 [R], sees
    the keys up to p, through a window those from config.attention.first_seen on. Scores are multiplied by `scale`,
    capped to cap * tanh(score / cap) where there is a cap, and bias fp32 [Hq, keys] is added to them by the key's
    position. sinks fp32 [Hq]: the score of a key without a value, which every row that sees any key sees when it is
    finished. kept: what backends have made of items and positions, where several calls have the same.
    """

    items: Tensor
    positions: Tensor
    _: KW_ONLY
    window: int | None = None
    bias: Tensor | None = None
    cap: float | None = None
    sinks: Tensor | None = None
    scale: float
    kept: dict[Any, Any] | None = None

    def keep(self, name: Any, make: Callable[[], T]) -> T:
        """What `make` makes of items and positions, once for each name where it is kept."""
        if self.kept is None:
            return make()
        if name not in self.kept:
            self.kept[name] = make()
        made: T = self.kept[name]
        return made


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """What a step of append and attend is prepared from: rows at `positions` int64 [T], which store their keys and
    values in chunks `slots` at `offsets`, int32 [T] each, and see items[window] through that window (see Mask).

    heads: Hq; shape: (slots, Hkv, D) of the pools, whose type is `dtype`; once: see Pool; scale, cap, bias: see Mask.
    """

    items: Mapping[int | None, Tensor]
    positions: Tensor
    slots: Tensor
    offsets: Tensor
    _: KW_ONLY
    heads: int
    shape: tuple[int, int, int]
    dtype: torch.dtype
    scale: float
    cap: float | None = None
    bias: Tensor | None = None
    once: bool = False

    def masks(self, positions: Tensor) -> dict[int | None, Mask]:
        """What the rows see from `positions`, by window."""
        common: dict[str, Any] = dict(bias=self.bias, cap=self.cap, scale=self.scale)
        return {window: Mask(each, positions, window=window, **common) for window, each in self.items.items()}


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """States of one recurrent layer (kernels.recurrent). K: inputs of its convolution, C: its channels; V: size of
    the values. last [slots, K-1, C]: the convolution's last inputs; matrices [slots, value heads, D, V] fp32, of a
    short convolution without elements."""

    last: Tensor
    matrices: Tensor


class ConvWeights(NamedTuple):
    """Of a short convolution, fp32: conv [K, H]."""

    conv: Tensor


class MambaWeights(NamedTuple):
    """Vectors of a Mamba-2 layer, fp32: conv [K, C], its bias [C] or None; rate [Hv], exp(A_log); dt_bias [Hv]; skip
    [Hv], what the paper calls D; norm [Hv V], or None where it follows later, and its epsilon."""

    conv: Tensor
    conv_bias: Tensor | None
    rate: Tensor
    dt_bias: Tensor
    skip: Tensor
    norm: Tensor | None
    eps: float

    @property
    def addresses(self) -> list[int]:
        """Where the vectors lie, as C++ takes them; 0 for none."""
        vectors = (self.conv, self.conv_bias, self.rate, self.dt_bias, self.skip, self.norm)
        return [0 if each is None else each.data_ptr() for each in vectors]


class DeltaWeights(NamedTuple):
    """Vectors of a gated delta net, fp32: conv [K, C]; rate [Hv], exp(A_log); dt_bias [Hv], or of each channel of keys
    [Hv D]; norm [V], its epsilon."""

    conv: Tensor
    rate: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


RecurrentWeights = DeltaWeights | MambaWeights | ConvWeights
"""Vectors of a net, of a Mamba-2 layer, or of a short convolution."""


@dataclass(frozen=True, slots=True)
class QKRotary:
    """What lies between a layer's projected heads and attention: norms of queries and keys, and the rotation.

    rotate: does that (ops.rotated_heads); heads, kv_heads: Hq and Hkv; cos_sin [T, N] fp32 as in ops.rotary, None:
    nothing is rotated; q_norm, k_norm [D]: weights of a root-mean-square norm of each head, to which `offset` is added,
    None: no norm.
    """

    rotate: Callable[[Tensor, QKRotary], tuple[Tensor, Tensor, Tensor]]
    heads: int
    kv_heads: int
    cos_sin: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether queries and keys are taken as they are projected."""
        return self.cos_sin is None and self.k_norm is None

    def __call__(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """heads [T, Hq + 2 Hkv, D], as projected -> q [T, Hq, D], k and v [T, Hkv, D], maybe views of `heads`."""
        return self.rotate(heads, self)
