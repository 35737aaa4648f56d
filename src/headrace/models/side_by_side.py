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
from headrace.models.hybrid import MambaLayer
from headrace.models.layers import Layer, Matrices, Weights
from headrace.models.shards import ALONE, Whole
from headrace.models.spec import ModelConfig


class SideBySide(Layer):
    """See the head of this file. Numbers are multiplied where they have been made (Multipliers), what adapters add to
    them with them; those that are convolved, by the filter, which has fp32."""

    def __init__(
        self, config: ModelConfig, weights: Weights, matrices: Matrices, index: int, whole: Whole = ALONE
    ) -> None:
        super().__init__(config, weights, matrices, index, whole)
        assert config.recurrent is not None and isinstance(self.net, MambaLayer), "the layer has both"
        self.mamba, self.times, self.gating = self.net, config.multipliers, config.recurrent.values
        if self.times is not None:
            of_parts = zip(config.recurrent.channel_parts, self.times.channels, strict=True)
            factors = torch.cat([torch.full((width,), factor) for width, factor in of_parts])
            own = self.mamba.weights
            self.mamba.weights = own._replace(conv=own.conv * factors.to(own.conv.device))

    def _mixed(
        self, x: Tensor, cos_sin: Tensor | None, attend: Attend, rows: Tensor | None, recur: Recur | None
    ) -> tuple[Tensor, ...]:
        """x [T, H] -> attended heads [T or n, Hq, D], and the recurrent layer's [T or n, Hv, V]."""
        made = self.mamba(x, recur, self._linear)
        return self._heads(x, cos_sin, attend, rows), made if rows is None else made[rows]

    def _out(self, heads: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Those of n rows -> [n, this rank's share of H]."""
        attended = self._linear("out", self.whole("heads", heads[0].flatten(1)))
        made = self._linear("recurrent_out", self.mamba.together(heads[1]).to(dtype))
        return attended.add_(made)  # not times a factor: torch rounds that otherwise where rows end

    def _linear(self, name: str, x: Tensor) -> Tensor:
        made = super()._linear(name, x)
        if self.times is None:
            return made
        if name == "mixed":
            made[:, : self.gating].mul_(self.times.z)
        elif name in ("gates", "out", "recurrent_out", "down"):
            made.mul_(getattr(self.times, name))
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
