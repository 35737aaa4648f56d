"""Latent attention to the keys that rows choose by an indexer (DSA; DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

T: rows (tokens) of a step; H: hidden size; N, I: heads of the indexer and their size; rotated, rank: as in
models.latent. Of a token are stored its I numbers for indexers, as many that its key counts by where keys are pooled,
then its latent. Scores are left without the factors
I^-0.5 and N^-0.5 of the paper, which change no choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.config import IndexSpec
from headrace.kernels import latents, ops
from headrace.kernels.backend import Attend
from headrace.kernels.indexer import IndexQueries
from headrace.models.latent import LatentLayer
from headrace.models.layers import Layer


class Choosing(Layer):
    """A layer of a model with indexers."""

    @property
    def indexer(self) -> IndexSpec:
        assert self.config.attention.index is not None, "the model has indexers"
        return self.config.attention.index

    @property
    def chooses(self) -> bool:
        """Whether the layer has an indexer."""
        return self.indexer.own[self.place]


class IndexedLayer(Choosing, LatentLayer):
    """A layer whose rows attend to the keys that they choose, or that those of a layer before have chosen."""

    def _heads(self, x: Tensor, cos_sin: Tensor | None, attend: Attend, rows: Tensor | None) -> Tensor:
        """x [T, H] -> attended heads [T or n, Hq, value]."""
        narrow = self._narrow(x)
        q, k = self._queries(narrow, cos_sin), self._keys(x, cos_sin)
        index = self._index(x, narrow, cos_sin) if self.chooses else None
        attended = attend.sparse(self.place, q, k, k, index, rows)
        return self._passed(x, latents.values(attended, self.latent, self._of_heads()), rows)

    def _index(self, x: Tensor, narrow: Tensor, cos_sin: Tensor | None) -> IndexQueries:
        """x [T, H], narrow [T, query_rank] -> by which rows choose keys."""
        heads = self._linear("index_queries", narrow).view(len(x), self.indexer.heads, self.indexer.size)
        weights = ops.linear(x, self.matrices["index_weights.weight"], wide=True)
        return IndexQueries(self._turned_first(heads, cos_sin), weights, self.weights.get("index.places"))

    def _keys(self, x: Tensor, cos_sin: Tensor | None) -> Tensor:
        """x [T, H] -> [T, 1, I + rotated + rank], which is values as well."""
        latent = super()._keys(x, cos_sin)
        if not self.chooses:
            return torch.nn.functional.pad(latent, (self.indexer.stored, 0))
        weight, bias = (self.weights[f"index_norm.{kind}"] for kind in ("weight", "bias"))
        keys, counts = self._linear("index_keys", x).tensor_split((self.indexer.size,), dim=1)
        own = ops.layer_norm(keys.contiguous(), weight, bias, self.indexer.norm_eps)
        return torch.cat((self._turned_first(own[:, None], cos_sin), counts[:, None], latent), dim=-1)

    def _turned_first(self, heads: Tensor, cos_sin: Tensor | None) -> Tensor:
        """heads [T, heads, I], of which the first numbers are rotated, if any are."""
        if not self.latent.rotated:
            return heads
        turned, plain = heads.split((self.latent.rotated, self.indexer.size - self.latent.rotated), dim=-1)
        return torch.cat((ops.rotary(turned.contiguous(), self._turns(turned, cos_sin)), plain), dim=-1)
