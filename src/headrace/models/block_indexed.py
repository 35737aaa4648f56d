"""Grouped attention to blocks of keys that rows choose by an indexer (MiniMax-M3).

T: rows (tokens) of a step; H: hidden size; Hq, Hkv: query and KV heads, D: head size; N, I: heads of the indexer, of
which each KV head has one, and their size. Of a token and KV head are stored I / N numbers of the indexer's key, then
the head's own D; beside its value are as many zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.backend import Attend
from headrace.kernels.indexer import IndexQueries
from headrace.models.indexed import Choosing


class BlockIndexedLayer(Choosing):
    """A layer whose rows attend to blocks that they choose, or without an indexer to all keys."""

    def _heads(self, x: Tensor, cos_sin: Tensor | None, attend: Attend, rows: Tensor | None) -> Tensor:
        """x [T, H] -> attended heads [T or n, Hq, D]."""
        q, k, v = self._projected(x, cos_sin)
        index = None
        if self.chooses:
            queries = self._linear("index_queries", x)
            index = IndexQueries(self._turned_index("q", queries, self.indexer.heads, cos_sin))
        return attend.sparse(self.place, q, k, v, index, rows)

    def project(self, x: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [n, H], which enters the layer -> k, v [n, Hkv, I / N + D], as `attend` gets them."""
        return self._projected(self._norm("attention_norm", x), cos_sin)[1:]

    @property
    def splits(self) -> bool:
        return False

    def _projected(self, x: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H] -> q [T, Hq, D], k and v [T, Hkv, I / N + D]."""
        spec = self.config.attention
        heads = self._linear("qkv", x).view(len(x), spec.heads + 2 * spec.kv_heads, spec.own_dim)
        q, k, v = self._rotary(spec.heads, cos_sin)(heads)
        width = (spec.index_width, 0)
        if not self.chooses:
            return q, torch.nn.functional.pad(k, width), torch.nn.functional.pad(v, width)
        own = self._turned_index("k", self._linear("index_keys", x), 1, cos_sin)
        parts = own.view(len(x), spec.kv_heads, spec.index_width)
        return q, torch.cat((parts, k), dim=-1), torch.nn.functional.pad(v, width)

    def _turned_index(self, part: str, x: Tensor, heads: int, cos_sin: Tensor | None) -> Tensor:
        """The indexer's queries or its key [T, heads I], normed and rotated: [T, heads, I]."""
        weight, eps, offset = self.weights[f"index_{part}_norm.weight"], self.config.norm_eps, self.config.norm_offset
        normed = ops.rms_norm(x.view(len(x), heads, self.indexer.size), weight, eps, offset)
        return normed if cos_sin is None else ops.rotary(normed, cos_sin)
