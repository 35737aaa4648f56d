"""A layer of a gated delta net with drawn numbers, and states that its segments begin with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.kernels.gated_delta import gated_delta
from headrace.kernels.records import DeltaWeights, LayerStates

SLOTS = 5


class DeltaCase:
    """A layer with drawn numbers: rows [T, C + Hv V] of `dtype`, and slots whose states are drawn too."""

    def __init__(self, spec: RecurrentSpec, rows: int, dtype: torch.dtype, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g)

        self.spec = spec
        wide = draw(rows, spec.channels + spec.values + 3).to(dtype)
        self.mixed, self.gates = wide[:, :-3], draw(rows, 2 * spec.value_heads)
        conv, heads = 0.4 * draw(spec.kernel, spec.channels), spec.value_heads
        self.weights = DeltaWeights(conv, draw(heads).exp(), draw(heads), draw(spec.value_dim), 1e-6)
        last = draw(SLOTS, spec.kernel - 1, spec.channels).to(dtype)
        self.states = LayerStates(last, draw(SLOTS, heads, spec.key_dim, spec.value_dim))

    def run(self, segments: list[list[int]], **other: Any) -> tuple[Tensor, LayerStates]:
        """The outputs, and the states afterwards."""
        states = self.copied()
        given = dict(mixed=self.mixed, gates=self.gates, weights=self.weights) | other
        return gated_delta(self.spec, states=states, segments=torch.tensor(segments), **given), states

    def copied(self) -> LayerStates:
        return LayerStates(self.states.last.clone(), self.states.matrices.clone())
