"""Latent attention as attention over one KV head: nothing is multiplied out (DeepSeek-V2, arXiv 2405.04434, 2.1.2).

What is stored of a token is its latent and the rotated part of its key, alike for all heads. A head's key would be
U latent, its value W latent, with matrices U [plain, rank] and W [value, rank] of its own. Since q (U latent) =
(q U) latent, queries are multiplied by U, attention is over the latents themselves, and W comes behind it. Keys and
values are the same numbers, stored in the layouts of both.

T: rows (tokens) of a step, of all sequences together. H: hidden size, Hq: query heads, D = rotated + rank: size of the
one KV head, whose first numbers are the rotated ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import latents, ops
from headrace.kernels.backend import Attend
from headrace.models.hybrid import let_through
from headrace.models.layer_parts import LatentSpec
from headrace.models.layers import Layer, Matrices, Weights
from headrace.models.shards import ALONE, Whole
from headrace.models.spec import ModelConfig

WHOLE = "heads.weight"
"""The matrix of all heads together, which a GPU has as it is."""


def of_each_head(spec: LatentSpec, weights: Weights) -> Weights:
    """The weights with the matrix `heads` of each layer cut into one of each head: keys.h [rank, plain], which is U
    transposed, and values.h [value, rank]."""
    cut: Weights = {}
    for name, weight in weights.items():
        layer, of_heads, _ = name.partition(".heads.weight")
        if not of_heads:
            cut[name] = weight
            continue
        for head, rows in enumerate(weight.split(spec.plain + spec.value)):
            keys, values = rows.split((spec.plain, spec.value))
            cut[f"{layer}.keys.{head}.weight"] = keys.t().contiguous()
            cut[f"{layer}.values.{head}.weight"] = values.clone()
    return cut


class LatentLayer(Layer):
    """A layer whose attention is latent."""

    def __init__(
        self, config: ModelConfig, weights: Weights, matrices: Matrices, index: int, whole: Whole = ALONE
    ) -> None:
        super().__init__(config, weights, matrices, index, whole)
        assert config.latent is not None, "the model has latent attention"
        self.latent = config.latent

    def _heads(self, x: Tensor, cos_sin: Tensor | None, attend: Attend, rows: Tensor | None) -> Tensor:
        """x [T, H] -> attended heads [T or n, Hq, value]."""
        q, k = self._queries(self._narrow(x), cos_sin), self._keys(x, cos_sin)
        attended = attend(self.place, q, k, k) if rows is None else attend(self.place, q, k, k, rows)
        return self._passed(x, latents.values(attended, self.latent, self._of_heads()), rows)

    def _passed(self, x: Tensor, heads: Tensor, rows: Tensor | None) -> Tensor:
        """heads [T or n, Hq, value] of x [T, H], or of `rows`, times the sigmoid of their gates, if there are any."""
        if not self.config.attention_gate:
            return heads
        return let_through(heads, self._linear("attention_gates", x if rows is None else x[rows]).view(heads.shape))

    def _narrow(self, x: Tensor) -> Tensor:
        """x [T, H] -> what queries are made of: x, or [T, query_rank]."""
        if self.latent.query_rank is None:
            return x
        return ops.rms_norm(self._linear("query_in", x), self.weights["query_norm.weight"], self.latent.norm_eps)

    def _queries(self, x: Tensor, cos_sin: Tensor | None) -> Tensor:
        """x, as `_narrow` gives it -> [T, Hq, D], rotated, and multiplied by what makes keys of latents."""
        spec = self.latent
        heads, turns = self._linear("queries", x), self._turns(x, cos_sin)
        if cos_sin is not None and cos_sin.shape[1] > spec.rotated:
            heads = heads * cos_sin[:, spec.rotated :].to(heads.dtype)  # see RopeSpec.factor_alone
        heads = heads.view(len(x), self.config.attention.heads, spec.query)
        return latents.queries(heads, turns, spec, self._of_heads())

    def _keys(self, x: Tensor, cos_sin: Tensor | None) -> Tensor:
        """x [T, H] -> [T, 1, D], which is values as well."""
        projected, weights = self._linear("latent", x), self.weights["latent_norm.weight"]
        return latents.keys(projected, weights, self._turns(x, cos_sin), self.latent, on_gpu=WHOLE in self.matrices)

    def _turns(self, x: Tensor, cos_sin: Tensor | None) -> Tensor:
        """(cos, sin) [T, rotated]; of a model without positions those of no angle, which change no bit."""
        if cos_sin is not None:
            return cos_sin[:, : self.latent.rotated]
        none = x.new_zeros(len(x), self.latent.rotated, dtype=torch.float32)
        none[:, : self.latent.rotated // 2] = 1.0
        return none

    def _of_heads(self) -> latents.OfHeads:
        if (whole := self.matrices.get(WHOLE)) is not None:
            assert isinstance(whole, Tensor), "it is never rounded"
            return latents.OfHeads((), (), whole)
        every = range(self.config.attention.heads)
        keys, values = ([self.matrices[f"{name}.{head}.weight"] for head in every] for name in ("keys", "values"))
        return latents.OfHeads(keys, values)

    @property
    def splits(self) -> bool:
        """`project` reads the matrix `latent`, and queries other ones."""
        return True

    def project(self, x: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [n, H], which enters the layer -> k, v [n, 1, D], as `attend` gets them: the same tensor."""
        k = self._keys(self._norm("attention_norm", x), cos_sin)
        return k, k
