"""Recurrent layers of each kind with drawn numbers, and states that their segments begin with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.kernels.records import ConvWeights, DeltaWeights, LayerStates, MambaWeights, RecurrentWeights
from headrace.kernels.recurrent import recur_rows

SLOTS = 5


class RecurrentCase:
    """A layer with drawn numbers: rows of `dtype`, apart from each other, and slots whose states are drawn too."""

    def __init__(self, spec: RecurrentSpec, rows: int, dtype: torch.dtype, seed: int = 0, bias: bool = True) -> None:
        g = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g)

        self.spec, heads = spec, spec.value_heads
        self.mixed = draw(rows, spec.width + 3).to(dtype)[:, :-3]
        self.gates = draw(rows, spec.gates) if spec.gates else None
        conv, rate = 0.4 * draw(spec.kernel, spec.channels), draw(heads).exp()
        dt_bias = draw(spec.keys if spec.kind == "kda" else heads)
        added = 0.3 * draw(spec.channels) if bias else None
        self.weights: RecurrentWeights = {
            **dict.fromkeys(("delta", "kda"), DeltaWeights(conv, rate, dt_bias, draw(spec.value_dim), 1e-6)),
            "mamba2": MambaWeights(
                conv, added, rate, dt_bias, draw(heads), draw(spec.values) if spec.normed else None, 1e-6
            ),
            "conv": ConvWeights(conv),
        }[spec.kind]
        last = draw(SLOTS, spec.kernel - 1, spec.channels).to(dtype)
        self.states = LayerStates(last, draw(SLOTS, heads, spec.key_dim, spec.value_dim))

    def run(self, segments: list[list[int]], **other: Any) -> tuple[Tensor, LayerStates]:
        """The outputs, and the states afterwards."""
        states = other.pop("states", None) or self.copied()
        given = dict(mixed=self.mixed, gates=self.gates, weights=self.weights) | other
        return recur_rows(self.spec, states=states, segments=torch.tensor(segments), **given), states

    def copied(self) -> LayerStates:
        return LayerStates(self.states.last.clone(), self.states.matrices.clone())
