"""Streamed layers as a decoder's own: each is loaded while the one before is computed. For a rank of several.

T: rows, n: rows whose states are wanted, H: hidden size, Hq, Hkv: query and KV heads, D: head size.
"""

from __future__ import annotations

import time

from torch import Tensor

from headrace.kernels.backend import Attend
from headrace.kernels.block import Watch
from headrace.kernels.gated_delta import Recur
from headrace.models.layers import OneByOne
from headrace.offload.streaming_totals import StreamingTotals
from headrace.offload.weights.streamed import StreamedLayers, WeightPart


class LayersInTurn(OneByOne):
    """The layers of a decoder over `source`, counted in `totals`; layer 0 follows the last one, for the next pass."""

    def __init__(self, source: StreamedLayers, totals: StreamingTotals) -> None:
        super().__init__(source.outside)
        self.source, self.totals = source, totals

    def __call__(
        self,
        x: Tensor,
        cos_sin: Tensor | None,
        attend: Attend,
        rows: Tensor | None = None,
        watch: Watch | None = None,
        recur: Recur | None = None,
    ) -> Tensor:
        """As OneByOne: x [T, H] -> [T, H], or [n, H] of `rows` alone. Models with recurrent layers are not streamed."""
        source, count = self.source, len(self.layers)
        source.start()
        for index in range(count):
            following = (index + 1) % count
            if following != index:
                source.load(following, 0, 1, "first")
                source.load(following, 0, 1, "rest")
                self.totals.bytes_in += source.bytes_per_layer
            if watch is not None:
                watch(index, x)
            self.wait(index, "kv", "q")
            x = source.layer(index)(x, cos_sin, _RestAwaited(attend, self), rows if index + 1 == count else None)
            source.done(index)
        return x

    def wait(self, layer: int, *parts: WeightPart) -> None:
        """Until these parts of the layer's weights are there."""
        began = time.perf_counter()
        self.source.wait(layer, *parts)
        self.totals.waited_s += time.perf_counter() - began

    def project(self, layer: int, x: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """As OneByOne, while the layer is computed: its weights are loaded then."""
        one = self.source.layer(layer)
        self.wait(layer, "kv", *(() if one.splits else ("q",)))
        return one.project(x, cos_sin)


class _RestAwaited(Attend):
    """Attention during which the rest of its layer's weights may come."""

    def __init__(self, attend: Attend, layers: LayersInTurn) -> None:
        self.attend, self.layers = attend, layers

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        out = self.attend(layer, q, k, v) if rows is None else self.attend(layer, q, k, v, rows)
        self.layers.wait(layer, "out", "up", "down")
        return out
