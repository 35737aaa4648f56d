"""Streamed layers as a decoder's own: each is loaded while the one before is computed. For a rank of several.

T: rows, n: rows whose states are wanted, H: hidden size, Hq, Hkv: query and KV heads, D: head size.
"""

from __future__ import annotations

from torch import Tensor

from headrace.kernels.backend import Attend
from headrace.kernels.block import Watch
from headrace.models.decoder import OneByOne
from headrace.offload.weights.streamed import StreamedLayers


class LayersInTurn(OneByOne):
    """The layers of a decoder over `source`; layer 0 follows the last one, for the next pass."""

    def __init__(self, source: StreamedLayers) -> None:
        super().__init__(source.outside)
        self.source = source

    def __call__(
        self, x: Tensor, cos_sin: Tensor | None, attend: Attend, rows: Tensor | None = None, watch: Watch | None = None
    ) -> Tensor:
        """As OneByOne: x [T, H] -> [T, H], or [n, H] of `rows` alone."""
        source, count = self.source, len(self.layers)
        source.start()
        for index in range(count):
            following = (index + 1) % count
            if following != index:
                source.load(following, 0, 1, "first")
                source.load(following, 0, 1, "rest")
            if watch is not None:
                watch(index, x)
            source.wait(index, "kv", "q")
            x = source.layer(index)(x, cos_sin, _RestAwaited(attend, source), rows if index + 1 == count else None)
            source.done(index)
        return x

    def project(self, layer: int, x: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """As OneByOne, while the layer is computed: its weights are loaded then."""
        one = self.source.layer(layer)
        self.source.wait(layer, "kv", *(() if one.splits else ("q",)))
        return one.project(x, cos_sin)


class _RestAwaited(Attend):
    """Attention during which the rest of its layer's weights may come."""

    def __init__(self, attend: Attend, source: StreamedLayers) -> None:
        self.attend, self.source = attend, source

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        out = self.attend(layer, q, k, v) if rows is None else self.attend(layer, q, k, v, rows)
        self.source.wait(layer, "out", "up", "down")
        return out
