"""What layers of hybrid models do that plain attention does not: gated delta nets, and gates behind attention.

T: rows; H: hidden size; Hq: query heads, D: their size; Hv, V: value heads of a gated delta net, and their size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.gated_delta import Recur
from headrace.kernels.records import DeltaWeights
from headrace.models.spec import ModelConfig


class DeltaNet:
    """One recurrent layer's part in place of attention. place: its number among the recurrent layers."""

    def __init__(
        self, config: ModelConfig, index: int, weights: Mapping[str, Tensor], matrices: Mapping[str, ops.Weight]
    ) -> None:
        self.place = config.place(index)
        self.mixed, self.gates = matrices["mixed.weight"], matrices["gates.weight"]
        conv, rate = weights["conv.weight"].squeeze(1).t().contiguous(), weights["delta.A_log"].exp()
        self.weights = DeltaWeights(conv, rate, weights["delta.dt_bias"], weights["delta_norm.weight"], config.norm_eps)
        self.tiled = config.recurrent if config.tiled_values else None

    def __call__(self, x: Tensor, recur: Recur | None) -> Tensor:
        """x [T, H], normed -> [T, Hv, V]. Raises ValueError without `recur`."""
        if recur is None:
            raise ValueError("this model has recurrent layers: forward needs `recur`, which keeps their states")
        gates = ops.linear(x, self.gates, wide=True)
        return recur(self.place, ops.linear(x, self.mixed), gates, self.weights)

    def as_columns(self, heads: Tensor) -> Tensor:
        """All heads of a row [T, Hv V] as the columns of `out` take them (ModelConfig.tiled_values)."""
        if self.tiled is None:
            return heads
        by_key = heads.view(len(heads), self.tiled.key_heads, -1, self.tiled.value_dim)
        return by_key.transpose(1, 2).reshape(heads.shape)


def let_through(heads: Tensor, gates: Tensor) -> Tensor:
    """heads [T, Hq, D] times the sigmoid of gates [T, Hq, D]; or [T, H] both."""
    both = torch.cat((gates.flatten(1), heads.flatten(1)), dim=1)
    return ops.sigmoid_mul(both).view(heads.shape)
