"""One layer at a time, where a decoder runs all of its own: for schedules that go by layers, and for weights that come
and go.

T: rows, H: hidden size, Hq, Hkv: query and KV heads, D: head size.
"""

from __future__ import annotations

from torch import Tensor

from headrace.attention.execute import Attend
from headrace.config import AttentionSpec
from headrace.kernels import block, cpu, ops
from headrace.kernels.quantized import Quantized
from headrace.models.decoder import Decoder, Layer


class OneLayer:
    """Layer `layer` of a model. In C++ where the model's other layers are."""

    def __init__(self, layer: Layer, shape: block.Shape | None) -> None:
        self.layer = layer
        self._blocks = block.Blocks(shape, [layer]) if shape is not None else None
        self._key_value = key_value(layer.matrices["qkv.weight"], layer.config.attention)

    @property
    def splits(self) -> bool:
        """Whether projecting reads the K and V part of the qkv matrix alone."""
        return not isinstance(self._key_value[0], Tensor)

    def __call__(self, x: Tensor, cos_sin: Tensor | None, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """x [T, H] -> [T, H] (maybe in x's memory), or [n, H] of `rows` alone: as models.decoder.Layer."""
        if self._blocks is None:
            return self.layer(x, cos_sin, attend, rows)
        index = self.layer.index

        def renamed(_: int, q: Tensor, k: Tensor, v: Tensor, some: Tensor | None = None) -> Tensor:
            return attend(index, q, k, v, some)

        return self._blocks(x, cos_sin, renamed, rows)

    def project(self, x: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """X [T, H] as it entered the layer -> keys (rotated) and values [T, Hkv, D], to the bit what the layer made of
        these rows: norm, the K and V outputs of the projection with bias, QK-norm, rotation."""
        layer, config, spec = self.layer, self.layer.config, self.layer.config.attention
        first = x if config.block == "post" else layer._norm("attention_norm", x)
        weight, drop = self._key_value
        bias = layer.weights.get("qkv.bias")
        skipped = spec.heads * spec.head_dim - drop
        both = ops.linear(first, weight, None if bias is None else bias[skipped:])[:, drop:]
        k, v = both.reshape(len(x), 2 * spec.kv_heads, spec.head_dim).split(spec.kv_heads, dim=1)
        if config.qk_norm:
            k = ops.rms_norm(k, layer.weights["k_norm.weight"], config.norm_eps)
        return (k if cos_sin is None else ops.rotary(k, cos_sin)), v


def shape_of(decoder: Decoder) -> block.Shape | None:
    """What the decoder's C++ layers have in common; None where it has none."""
    return decoder.layers.shape if isinstance(decoder.layers, block.Blocks) else None


def layers_of(decoder: Decoder) -> list[Layer]:
    """The decoder's layers. Raises ValueError for a tensor rank, whose layers wait for others."""
    return [layer for layer in decoder.layers.layers if isinstance(layer, Layer)]


def query_blocks(spec: AttentionSpec) -> int:
    """Whole blocks of 64 outputs of a packed qkv matrix that are queries' alone."""
    return spec.heads * spec.head_dim // cpu.COLUMNS


def key_value(weight: ops.Weight, spec: AttentionSpec) -> tuple[ops.Weight, int]:
    """The rows of a qkv matrix that make keys and values, in the same memory, and how many outputs before them are
    queries: packed weights come in blocks of 64. A plain tensor stays whole, since torch may add up in another order
    for fewer outputs."""
    queries, first = spec.heads * spec.head_dim, query_blocks(spec)
    if isinstance(weight, Tensor):
        return weight, queries
    shape = (weight.shape[0] - first * cpu.COLUMNS, weight.shape[1])
    return view_of(weight, first, shape), queries - first * cpu.COLUMNS


def view_of(weight: cpu.Packed | Quantized, first: int, shape: tuple[int, int]) -> ops.Weight:
    """The packed weight from block `first` on, in the same memory."""
    if isinstance(weight, cpu.Packed):
        return packed(weight.blocks[first:], shape)
    per_block = cpu.COLUMNS if weight.bits == 8 else 1
    return quantized(weight.bits, weight.codes[first:], weight.scales[first * per_block :], shape)


def packed(blocks: Tensor, shape: tuple[int, int]) -> cpu.Packed:
    """A packed weight on blocks that exist."""
    weight = cpu.Packed.__new__(cpu.Packed)
    weight.blocks, weight.shape = blocks, shape
    return weight


def quantized(bits: int, codes: Tensor, scales: Tensor, shape: tuple[int, ...]) -> Quantized:
    """A quantised weight on codes and scales that exist."""
    weight = Quantized.__new__(Quantized)
    weight.bits, weight.codes, weight.scales, weight.shape = bits, codes, scales, shape
    return weight


def tensors_of(weight: ops.Weight) -> dict[str, Tensor]:
    """The tensors that a weight consists of, contiguous each."""
    if isinstance(weight, Tensor):
        return {"weight": weight}
    if isinstance(weight, cpu.Packed):
        return {"blocks": weight.blocks}
    return {"codes": weight.codes, "scales": weight.scales}


def on_tensors(weight: ops.Weight, tensors: dict[str, Tensor]) -> ops.Weight:
    """A weight of the same form on other tensors, shaped like `tensors_of(weight)`."""
    if isinstance(weight, Tensor):
        return tensors["weight"]
    if isinstance(weight, cpu.Packed):
        return packed(tensors["blocks"], weight.shape)
    return quantized(weight.bits, tensors["codes"], tensors["scales"], weight.shape)


def bare(layer: Layer, matrices: dict[str, ops.Weight]) -> Layer:
    """The layer with other matrices; its vectors stay its own."""
    other = Layer(layer.config, {}, {}, layer.index, layer.whole)
    other.weights, other.matrices = layer.weights, matrices
    return other
