"""One layer of a decoder at a time, for schedules that go layer by layer and for streamed weights.

T: rows, H: hidden size, Hq, Hkv: query and KV heads, D: head size.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from torch import Tensor

from headrace.config import AttentionSpec
from headrace.kernels import block, cpu, ops
from headrace.kernels.backend import Attend
from headrace.kernels.quantized import Parts, Quantized
from headrace.kernels.triton.weights import GpuWeight
from headrace.models.decoder import Decoder
from headrace.models.layers import Layer, OneByOne


class OneLayer:
    """Layer `layer` of a model. In C++ where the model's other layers are."""

    def __init__(self, layer: Layer, shape: block.LayerShape | None) -> None:
        self.index = layer.index
        self.run: block.Blocks | OneByOne = block.Blocks(shape, [layer]) if shape is not None else OneByOne([layer])
        spec = layer.config.attention
        self.splits = ops.outputs_from(layer.matrices["qkv.weight"], spec.heads * spec.head_dim) is not None
        """Whether `project` reads the K and V part of the qkv matrix alone."""

    def __call__(self, x: Tensor, cos_sin: Tensor | None, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """x [T, H] -> [T, H] (maybe in x's memory), or [n, H] of `rows` alone: as models.layers.Layer."""
        return self.run(x, cos_sin, _AtLayer(attend, self.index), rows)

    def project(self, x: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """X [T, H] as it entered the layer -> keys and values [T, Hkv, D]: Decoder.project."""
        return self.run.project(0, x, cos_sin)


class _AtLayer(Attend):
    """Attention of a model whose only layer is this one of another."""

    def __init__(self, attend: Attend, layer: int) -> None:
        self.attend, self.layer = attend, layer

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        return self.attend(self.layer, q, k, v, rows)


def shape_of(decoder: Decoder) -> block.LayerShape | None:
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
    """The tensors that a weight consists of, contiguous each. Raises ValueError for codes in a GPU's memory."""
    if isinstance(weight, Tensor):
        return {"weight": weight}
    if isinstance(weight, cpu.Packed):
        return {"blocks": weight.blocks}
    if isinstance(weight, Parts):
        each = [tensors_of(part) for part in weight.parts]
        return {f"{index}.{name}": x for index, part in enumerate(each) for name, x in part.items()}
    if isinstance(weight, GpuWeight):
        raise ValueError("quantised weights lie in a GPU's memory as a whole; leave out weight_offload or quantization")
    return {"codes": weight.codes, "scales": weight.scales}


def on_tensors(weight: ops.Weight, tensors: dict[str, Tensor]) -> ops.Weight:
    """A weight of the same form on other tensors, shaped like `tensors_of(weight)`."""
    if isinstance(weight, Tensor):
        return tensors["weight"]
    other = copy(weight)
    if isinstance(other, Parts):
        other.parts = [_part_on(part, index, tensors) for index, part in enumerate(other.parts)]
        return other
    for name, tensor in tensors.items():
        setattr(other, name, tensor)
    return other


def _part_on(part: Quantized | cpu.Packed, index: int, tensors: dict[str, Tensor]) -> Quantized | cpu.Packed:
    other = on_tensors(part, {name: tensors[f"{index}.{name}"] for name in tensors_of(part)})
    assert isinstance(other, Quantized | cpu.Packed)
    return other


def bare(layer: Layer, matrices: dict[str, ops.Weight]) -> Layer:
    """The layer with other matrices; its vectors stay its own."""
    other = Layer(layer.config, {}, {}, layer.index, layer.whole)
    other.weights, other.matrices = layer.weights, matrices
    return other
