"""One layer of a decoder at a time, for schedules that go layer by layer and for streamed weights.

T: rows, H: hidden size, Hq, Hkv: query and KV heads, D: head size.
"""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from dataclasses import replace
from typing import Any

from torch import Tensor

from headrace.config import AttentionSpec
from headrace.kernels import block, cpu, ops
from headrace.kernels.adapted_rows import AdaptedRows
from headrace.kernels.backend import Attend
from headrace.kernels.layer_shape import LayerShape
from headrace.kernels.quantized import Parts
from headrace.kernels.records import Allocate
from headrace.kernels.triton.rounded import GpuRounded
from headrace.kernels.triton.weights import GpuParts, GpuQuantized, GpuWeight
from headrace.models.decoder import Decoder
from headrace.models.layers import Layer, OneByOne


class OneLayer:
    """Layer `layer` of a model. In C++ where the model's other layers are."""

    def __init__(self, layer: Layer, shape: LayerShape | None) -> None:
        self.index = layer.index
        self.run: block.Blocks | OneByOne = block.Blocks(shape, [layer]) if shape is not None else OneByOne([layer])
        self.splits = layer.splits
        """Whether `project` reads nothing that queries alone need."""

    def __call__(self, x: Tensor, cos_sin: Tensor | None, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """x [T, H] -> [T, H] (maybe in x's memory), or [n, H] of `rows` alone: as models.layers.Layer."""
        return self.run(x, cos_sin, _AtLayer(attend, self.index), rows)

    def adapted_by(self, rows: AdaptedRows | None) -> OneLayer:
        """The layer for rows some of which have an adapter; None: none has."""
        if rows is None:
            return self
        other = copy(self)
        other.run = self.run.adapted_by(rows)
        return other

    def project(self, x: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """X [T, H] as it entered the layer -> keys and values [T, Hkv, D]: Decoder.project."""
        return self.run.project(0, x, cos_sin)


class _AtLayer(Attend):
    """Attention of a model whose only layer is this one of another."""

    def __init__(self, attend: Attend, layer: int) -> None:
        self.attend, self.layer = attend, layer

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        return self.attend(self.layer, q, k, v, rows)


def shape_of(decoder: Decoder) -> LayerShape | None:
    """What the decoder's C++ layers have in common; None where it has none."""
    return decoder.layers.shape if isinstance(decoder.layers, block.Blocks) else None


def layers_of(decoder: Decoder) -> list[Layer]:
    """The decoder's layers. Raises ValueError for a tensor rank, whose layers wait for others."""
    return [layer for layer in decoder.layers.layers if isinstance(layer, Layer)]


def query_rows(weight: ops.Weight, spec: AttentionSpec) -> dict[str, int]:
    """Of each tensor of a qkv matrix, how many of its first rows are queries' alone: whole blocks of 64 outputs where
    it is packed."""
    heads = spec.heads * spec.head_dim
    if isinstance(weight, Tensor):
        return {"weight": heads}
    if isinstance(weight, GpuWeight):
        return dict.fromkeys(tensors_of(weight), 0)  # its groups of inputs are not rows
    if not isinstance(weight, Parts):
        blocks = heads // cpu.COLUMNS
        return {name: blocks * cpu.COLUMNS if x.dim() == 1 else blocks for name, x in tensors_of(weight).items()}
    found: dict[str, int] = {}
    first = 0
    for index, part in enumerate(weight.parts):
        own = replace(spec, heads=min(max(0, heads - first), part.shape[0]), head_dim=1)
        found |= {f"{index}.{name}": rows for name, rows in query_rows(part, own).items()}
        first += part.shape[0]
    return found


def tensors_of(weight: ops.Weight) -> dict[str, Tensor]:
    """The tensors that a weight consists of, contiguous each."""
    if isinstance(weight, Tensor):
        return {"weight": weight}
    if isinstance(weight, cpu.Packed):
        return {"blocks": weight.blocks}
    if isinstance(weight, Parts | GpuParts):
        each = [tensors_of(part) for part in weight.parts]
        return {f"{index}.{name}": x for index, part in enumerate(each) for name, x in part.items()}
    if isinstance(weight, GpuQuantized):
        found = {"codes": weight.codes, "scales": weight.scales, "offsets": weight.offsets, "order": weight.order}
        return {name: x for name, x in found.items() if x is not None}
    return {"codes": weight.codes, "scales": weight.scales}


def on_tensors(weight: ops.Weight, tensors: dict[str, Tensor]) -> ops.Weight:
    """A weight of the same form on other tensors, shaped like `tensors_of(weight)`."""
    if isinstance(weight, Tensor):
        return tensors["weight"]
    other = copy(weight)
    if isinstance(other, Parts | GpuParts):
        parts: Any = [on_tensors(part, _named(index, tensors)) for index, part in enumerate(other.parts)]
        other.parts = parts
    else:
        for name, tensor in tensors.items():
            setattr(other, name, tensor)
    return other


def _named(part: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one of several parts, by their names there."""
    prefix = f"{part}."
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def moved(weight: ops.Weight, allocate: Allocate) -> ops.Weight:
    """A copy of the weight in other memory."""
    return on_tensors(weight, {name: allocate(x.shape, x.dtype).copy_(x) for name, x in tensors_of(weight).items()})


def form_of(weight: ops.Weight) -> Hashable:
    """What weights have in common that are the same but for the numbers in their tensors. Of a CPU's weights each has a
    form of its own."""
    if isinstance(weight, Tensor):
        return weight.shape, weight.dtype
    if isinstance(weight, GpuParts):
        return weight.segments, tuple(form_of(part) for part in weight.parts)
    if isinstance(weight, GpuQuantized):
        names = tuple(tensors_of(weight))
        return weight.shape, weight.kind, weight.bits, weight.group, weight.step, weight.segments, names
    if isinstance(weight, GpuRounded):
        return weight.shape, weight.kind
    return id(weight)
