"""Layers that have attention and a recurrent layer side by side, as Falcon-H1's (arXiv 2507.22448, section 2).

Both read the same rows, and what they make is added: x + attention(norm(x)) + mamba(norm(x)). Letters are those of
models.layers and models.hybrid.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.backend import Attend
from headrace.kernels.recurrent import Recur
from headrace.models.layers import Layer, Matrices, Weights
from headrace.models.shards import ALONE, Whole
from headrace.models.spec import ModelConfig


class SideBySide(Layer):
    """See the head of this file. Numbers are multiplied where they have been made (models.spec.Multipliers), what
    adapters add to them with them."""

    def __init__(
        self, config: ModelConfig, weights: Weights, matrices: Matrices, index: int, whole: Whole = ALONE
    ) -> None:
        super().__init__(config, weights, matrices, index, whole)
        assert config.recurrent is not None and self.net is not None, "the layer has both"
        self.parts, self.times = config.recurrent.mixed_parts, config.multipliers

    def _mixed(
        self, x: Tensor, cos_sin: Tensor | None, attend: Attend, rows: Tensor | None, recur: Recur | None
    ) -> tuple[Tensor, ...]:
        """x [T, H] -> attended heads [T or n, Hq, D], and the recurrent layer's [T or n, Hv, V]."""
        assert self.net is not None, "the layer has both"
        made = self.net(x, recur, self._linear)
        return self._heads(x, cos_sin, attend, rows), made if rows is None else made[rows]

    def _out(self, heads: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Those of n rows -> [n, this rank's share of H]."""
        assert self.net is not None, "the layer has both"
        attended, made = heads
        attended = self._linear("out", self.whole("heads", attended.flatten(1)))
        return attended + self._linear("recurrent_out", self.net.together(made).to(dtype))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        made = super()._linear(name, x)
        if self.times is None or name == "qkv":
            return made
        if name != "mixed":
            return made.mul_(getattr(self.times, name))
        for part, factor in zip(made.split(self.parts, dim=1), self.times.mixed, strict=True):
            part.mul_(factor)
        return made

    def _inner(self, name: str, x: Tensor) -> Tensor:
        """x [T, H] -> [T, this rank's share of I]: the gate is multiplied before its activation."""
        if self.times is None:
            return super()._inner(name, x)
        made = ops.halves_linear(x, self.matrices[name + ".weight"], self.weights.get(name + ".bias"))
        if self.adapted is not None and name in self.pairs:
            made = self.adapted.added(self.pairs[name], x, made)
        made[:, : made.shape[1] // 2].mul_(self.times.up)
        return ops.gated(made, self.config.activation)
