"""A layer's vectors and matrices as C++ takes them: addresses, which whoever holds the tensors keeps alive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.kernels.adapted_rows import PlacedPairs
from headrace.kernels.extension import check, require
from headrace.kernels.layer_shape import LayerShape, LayerWeights
from headrace.kernels.ops import Weight
from headrace.kernels.triton.weights import GpuWeight

if TYPE_CHECKING:
    from headrace.kernels import _cpu as native


def matrix(
    layer: LayerWeights, name: str, shape: tuple[int, int], first: int = 0, count: int | None = None
) -> native.Matrix:
    """So many outputs (None: all) of a layer's matrix from `first` on, with what adapters have for them."""
    made = matrix_of(layer.weights, layer.matrices, name, shape, first, count)
    return _adapted(made, layer.pairs[name], first, count) if name in layer.pairs else made


def _adapted(matrix: native.Matrix, pairs: PlacedPairs, first: int, count: int | None) -> native.Matrix:
    assert isinstance(pairs, Sequence), "those of a GPU have no layers in C++"
    met = [(number, pair) for number, pair in enumerate(pairs) if pair is not None]
    down, up = [_low_rank(pair.down) for _, pair in met], [_low_rank(pair.up, first, count) for _, pair in met]
    return matrix.adapted([number for number, _ in met], down, up, count=len(pairs))


def _low_rank(weight: Weight, first: int = 0, count: int | None = None) -> native.Matrix:
    if isinstance(weight, Tensor | GpuWeight):
        raise ValueError("matrices of adapters must be packed")
    return weight.outputs_from(first, count).matrix(0)


def matrix_of(
    weights: Mapping[str, Tensor], matrices: Mapping[str, Weight], name: str, shape: tuple[int, int], first: int = 0,
    count: int | None = None,
) -> native.Matrix:  # fmt: skip
    """So many outputs (None: all) of a matrix of this shape from `first` on, as C++ takes it."""
    weight = matrices[f"{name}.weight"]
    if isinstance(weight, Tensor | GpuWeight) or weight.shape != shape:
        raise ValueError(f"{name}.weight must be packed and {list(shape)}, got {list(weight.shape)}")
    return weight.outputs_from(first, count).matrix(vector(weights, f"{name}.bias", shape[0], first))


def norm_of(shape: LayerShape, weights: Mapping[str, Tensor], name: str) -> native.Scale:
    """The norm of that name, as C++ takes it."""
    weight, bias = (vector(weights, f"{name}.{kind}", shape.hidden) for kind in ("weight", "bias"))
    return require().Scale(shape.rms and weight != 0, weight, bias, shape.norm_offset)


def vector(weights: Mapping[str, Tensor], name: str, size: int, first: int = 0) -> int:
    """Address of a vector's element `first`; 0 where there is none of that name."""
    vector = weights.get(name)
    if vector is None:
        return 0
    check(name, vector, torch.bfloat16, (size,))
    return vector[first:].data_ptr()
