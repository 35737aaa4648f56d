"""What layers of hybrid models do that plain attention does not: gated delta nets, Mamba-2 layers, short convolutions,
and gates behind attention.

T: rows; H: hidden size; Hq: query heads, D: their size; Hv, V: value heads of a gated delta net, and their size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.kernels import ops
from headrace.kernels.records import ConvWeights, DeltaWeights, MambaWeights
from headrace.kernels.recurrent import Recur
from headrace.models.spec import ModelConfig

Linear = Callable[[str, Tensor], Tensor]
"""A layer's matrix of that name times x [T, H], with what adapters have for it; of `gates` in fp32."""


class DeltaNet:
    """A gated delta net in place of a layer's attention. place: its number among the recurrent layers."""

    def __init__(self, config: ModelConfig, index: int, weights: Mapping[str, Tensor]) -> None:
        self.place = config.place(index)
        conv, rate = weights["conv.weight"].squeeze(1).t().contiguous(), weights["delta.A_log"].exp()
        self.weights = DeltaWeights(conv, rate, weights["delta.dt_bias"], weights["delta_norm.weight"], config.norm_eps)
        self.tiled = config.recurrent if config.tiled_values else None

    def __call__(self, x: Tensor, recur: Recur | None, linear: Linear) -> Tensor:
        """x [T, H], normed -> [T, Hv, V]. Raises ValueError without `recur`."""
        return needed(recur)(self.place, linear("mixed", x), linear("gates", x), self.weights)

    def as_columns(self, heads: Tensor) -> Tensor:
        """All heads of a row [T, Hv V] as the columns of `out` take them (ModelConfig.tiled_values)."""
        return heads if self.tiled is None else as_tiled(self.tiled, heads)


class MambaLayer:
    """A Mamba-2 layer in place of a layer's attention. place: as of a DeltaNet."""

    tiled = None

    def __init__(self, config: ModelConfig, index: int, weights: Mapping[str, Tensor]) -> None:
        self.place = config.place(index)
        conv, rate = weights["conv.weight"].squeeze(1).t().contiguous(), weights["delta.A_log"].exp()
        vectors = (rate, weights["delta.dt_bias"], weights["delta.D"], weights["delta_norm.weight"])
        self.weights = MambaWeights(conv, weights.get("conv.bias"), *vectors, config.norm_eps)

    def __call__(self, x: Tensor, recur: Recur | None, linear: Linear) -> Tensor:
        """x [T, H], normed -> [T, Hv, V]. Raises ValueError without `recur`."""
        return needed(recur)(self.place, linear("mixed", x), linear("gates", x), self.weights)

    def as_columns(self, heads: Tensor) -> Tensor:
        """As they are."""
        return heads


class ShortConvolution:
    """A short convolution between two gates, in place of a layer's attention. place: as of a DeltaNet."""

    tiled = None

    def __init__(self, config: ModelConfig, index: int, weights: Mapping[str, Tensor]) -> None:
        self.place = config.place(index)
        self.weights = ConvWeights(weights["conv.weight"].squeeze(1).t().contiguous())

    def __call__(self, x: Tensor, recur: Recur | None, linear: Linear) -> Tensor:
        """x [T, H], normed -> [T, H]. Raises ValueError without `recur`."""
        return needed(recur)(self.place, linear("mixed", x), None, self.weights)

    def as_columns(self, made: Tensor) -> Tensor:
        """As they are."""
        return made


KINDS: Mapping[str, type[DeltaNet | MambaLayer | ShortConvolution]] = {
    "delta": DeltaNet,
    "mamba2": MambaLayer,
    "conv": ShortConvolution,
}


def recurrent_layer(
    config: ModelConfig, index: int, weights: Mapping[str, Tensor]
) -> DeltaNet | MambaLayer | ShortConvolution | None:
    """What a layer has in place of attention; None: it has attention."""
    if config.recurrent is None or index not in config.recurrent_layers:
        return None
    return KINDS[config.recurrent.kind](config, index, weights)


def as_tiled(spec: RecurrentSpec, heads: Tensor) -> Tensor:
    """Values [n, Hv V] that lie by key head in the order of ModelConfig.tiled_values."""
    by_key = heads.view(len(heads), spec.key_heads, -1, spec.value_dim)
    return by_key.transpose(1, 2).reshape(heads.shape)


def needed(recur: Recur | None) -> Recur:
    """Raises ValueError where there is none."""
    if recur is None:
        raise ValueError("this model has recurrent layers: forward needs `recur`, which keeps their states")
    return recur


def let_through(heads: Tensor, gates: Tensor) -> Tensor:
    """heads [T, Hq, D] times the sigmoid of gates [T, Hq, D]; or [T, H] both."""
    both = torch.cat((gates.flatten(1), heads.flatten(1)), dim=1)
    return ops.sigmoid_mul(both).view(heads.shape)
