"""Attention with sinks, soft caps, large heads, latents or int8 keys and values beside plain torch, on the GPU itself,
before an engine uses it: what no two sets of kernels can be compared in, as hopper_agreement does.

Hq, Hkv: query and KV heads; D: head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.config import AttentionSpec
from headrace.device import current
from headrace.kernels import reference
from headrace.kernels.records import Mask, Pool
from headrace.kernels.triton import attention
from headrace.kernels.triton.heads import Heads
from headrace.kernels.triton.hopper_agreement import PORTABLE, Ways
from headrace.kernels.triton.walk_options import heads_of
from headrace.types import CHUNK

SEQUENCES = ((1, 90), (1, 530), (20, 530))
"""Rows and keys of each: decoding, within a span and over two, and a piece of a prompt that a second span begins in. Of
one span so many rows would not be split."""
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""How far attention of random numbers of unit size may be from plain torch's, of the greatest of these if that is
above 1."""
ROOM = {"split": 1 << 20, "flash": 0}
"""States that rows may leave, by the way that all of them go then."""
SINK = 5.0
"""Mean of drawn sinks: they weigh about as much as a sequence's keys, so that one left out is seen."""
CAPPED = 6.0
"""Scores of 16-bit types are drawn with so many standard deviations in a cap: in those of unit size one left out would
be less than roundings are. The bound of fp32 is narrow enough."""
USUAL_HEAD = 256
"""Larger heads are walked by parts of chunks and of the values' columns, on all GPUs."""


class Variant(NamedTuple):
    """Attention of layers that are alike. computed: the type of rows; stored: of pools."""

    heads: Heads
    computed: torch.dtype
    stored: torch.dtype
    window: int | None
    cap: float | None
    sinks: bool
    scale: float

    @property
    def features(self) -> list[str]:
        """What other models' attention does not have."""
        int8 = self.stored == torch.int8
        told = {"attention sinks": self.sinks, "soft caps": self.cap is not None, "int8 keys and values": int8}
        told["blocks of keys"] = self.window is not None and self.window < 0
        told[f"latents of {self.heads.dim}"] = self.heads.once
        told[f"heads of {self.heads.dim}"] = self.heads.dim > USUAL_HEAD and not self.heads.once
        return [name for name, there in told.items() if there]


def verify(spec: AttentionSpec, computed: torch.dtype, stored: torch.dtype) -> None:
    """Compares a model's attention on the current GPU. Raises ValueError where it is wrong; does nothing for models
    without these features, and off a GPU."""
    place = current().place
    if place.type != "cuda":
        return
    for shape in spec.every_shape:
        heads = heads_of((spec.heads, *shape), spec.once, place)
        for window in sorted(spec.windows_of(shape), key=lambda each: each or 0):
            variant = Variant(heads, computed, stored, window, spec.score_cap, spec.sinks, spec.scale)
            if variant.features:
                check(variant, place)


@cache
def check(variant: Variant, place: torch.device) -> None:
    """Raises ValueError naming what is computed wrongly on the device, and by how much."""
    for how, difference in differences(variant, place):
        if not difference <= BOUNDS[variant.computed]:  # NaN is none
            raise ValueError(
                f"attention_backend 'triton': attention with {' and '.join(variant.features)} is off by "
                f"{difference:.2g} on this device ({how}, window {variant.window}, {variant.heads}, "
                f"{variant.computed}), more than {BOUNDS[variant.computed]:.0e}; use 'auto'"
            )


def differences(variant: Variant, place: torch.device) -> Iterator[tuple[str, float]]:
    """By way and set of kernels: how far attention is from plain torch's at most."""
    items, positions = _plan()
    k, v, q = _drawn(variant)
    once = variant.heads.once
    ours, plain = _pool(variant, len(items), once, filled=True), _pool(variant, len(items), once=False, filled=False)
    ours = Pool.of([each.to(place) for each in ours.tensors], once)
    at = torch.cat([torch.arange(keys) for _, keys in SEQUENCES])
    slots = torch.from_numpy(np.repeat(items[:, 0], _written(items)))
    attention.append(ours, k.to(place), v.to(place), slots, (at % CHUNK).int())
    reference.append(plain, k, v, slots, (at % CHUNK).int())
    sinks = None
    if variant.sinks:
        sinks = torch.randn(variant.heads.heads, generator=torch.Generator().manual_seed(1)) + SINK
    given: dict[str, Any] = {"window": variant.window, "cap": variant.cap, "scale": variant.scale}
    mask = Mask(torch.from_numpy(items), positions, sinks=sinks, **given)
    truth = reference.attend(q, plain, mask).float()
    unit = max(1.0, float(truth.abs().max()))
    there = Mask(mask.items, positions, sinks=None if sinks is None else sinks.to(place), **given)
    for way, states in ROOM.items():
        for name, ways in _sets(variant, place, way):
            limits = attention.bounds_by(variant.heads, place, variant.stored, ways)
            limits = limits._replace(states=states, busy=1 << 30)
            found = attention.attended(variant.heads, limits, q.to(place), ours, there, ways)
            yield f"{way}, {name}", float((found.float().cpu() - truth).abs().max()) / unit


def _sets(variant: Variant, place: torch.device, way: str) -> Iterator[tuple[str, Ways]]:
    """The portable kernels, and those for Hopper if such layers go that way by them."""
    yield "portable kernels", PORTABLE
    found = attention.agreed(variant.heads, variant.stored, place, variant.window is not None, variant.sinks)
    if getattr(found, way) and variant.cap is None:
        yield "kernels for Hopper", found


def _plan() -> tuple[NDArray[np.int32], Tensor]:
    """Items and positions of the sequences, of which none shares a chunk."""
    items: list[tuple[int, int, int, int]] = []
    begin = 0
    for rows, keys in SEQUENCES:
        items += [(len(items) + n, CHUNK * n, begin, begin + rows) for n in range(-(-keys // CHUNK))]
        begin += rows
    return np.array(items, np.int32), torch.cat([torch.arange(keys - rows, keys) for rows, keys in SEQUENCES])


def _written(items: NDArray[np.int32]) -> NDArray[np.int64]:
    """Keys of each item that have been written."""
    ends = np.repeat([keys for _, keys in SEQUENCES], [-(-keys // CHUNK) for _, keys in SEQUENCES])
    return np.minimum(ends - items[:, 1], CHUNK)


def _drawn(variant: Variant) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [T, Hkv, D] of all sequences, and queries [R, Hq, D] whose scores spread as usual, or far enough
    for a cap."""
    generator = torch.Generator().manual_seed(variant.heads.dim)
    keys, rows = (sum(each) for each in zip(*((keys, rows) for rows, keys in SEQUENCES), strict=True))
    heads, kv_heads, dim = variant.heads[:3]
    k, v = (torch.randn(keys, kv_heads, dim, generator=generator) for _ in range(2))
    v = k if variant.heads.once else v
    capped = variant.cap is not None and variant.computed != torch.float32
    spread = max(1.0, (variant.cap or 0.0) / CAPPED) if capped else 1.0
    q = torch.randn(rows, heads, dim, generator=generator) * (spread * dim**-0.5 / variant.scale)
    return k.to(variant.computed), v.to(variant.computed), q.to(variant.computed)


def _pool(variant: Variant, slots: int, once: bool, filled: bool) -> Pool:
    """An empty pool; filled: with NaN, where nothing is written. once: see Pool."""

    def room(shape: Any, dtype: torch.dtype) -> Tensor:
        there = torch.zeros(shape, dtype=dtype)
        return there.fill_(float("nan")) if filled and dtype.is_floating_point else there

    return Pool.make(slots, variant.heads.kv_heads, variant.heads.dim, variant.stored, room, once)
