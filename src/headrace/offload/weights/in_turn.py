"""Streamed layers as a decoder's own: each is loaded while the one before is computed. For a rank of several.

T: rows, n: rows whose states are wanted, H: hidden size, Hq, Hkv: query and KV heads, D: head size.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial

from torch import Tensor

from headrace.device import Device
from headrace.kernels.adapted_rows import AdaptedRows
from headrace.kernels.backend import Attend
from headrace.kernels.block import Watch
from headrace.kernels.recurrent import Recur
from headrace.models.layers import OneByOne
from headrace.offload.stopwatch import Stopwatch
from headrace.offload.streaming_totals import StreamingTotals
from headrace.offload.weights.streamed import StreamedLayers, WeightPart


class LayersInTurn(OneByOne):
    """The layers of a decoder over `source`, counted in `totals`; layer 0 follows the last one, for the next pass.

    device: whose memory the buffers lie in, which has done what it was given when once_done(call) calls. count: only
    so many layers.
    """

    def __init__(
        self,
        source: StreamedLayers,
        totals: StreamingTotals,
        device: Device | None = None,
        once_done: Callable[[Callable[[], None]], None] = lambda call: call(),
        count: int | None = None,
    ) -> None:
        super().__init__(source.outside[:count])
        self.source, self.totals, self.device, self.once_done = source, totals, device, once_done
        self.adapted: AdaptedRows | None = None

    def first(self, count: int) -> OneByOne:
        """A device multiplies by nothing outside: there they come through the buffers, which is not counted."""
        if self.device is None:
            return super().first(count)
        return LayersInTurn(self.source, StreamingTotals(), self.device, lambda call: None, count)

    def adapted_by(self, rows: AdaptedRows) -> LayersInTurn:
        other = copy(self)
        other.adapted = rows
        return other

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
            layer = source.layer(index).adapted_by(self.adapted)
            x = layer(x, cos_sin, _RestAwaited(attend, self), rows if index + 1 == count else None)
            source.done(index)
        return x

    def wait(self, layer: int, *parts: WeightPart) -> None:
        """Until these parts of the layer's weights are there."""
        watch = Stopwatch(self.device)
        self.source.wait(layer, *parts)
        watch.stop()
        self.once_done(partial(self._waited, watch))

    def _waited(self, watch: Stopwatch) -> None:
        self.totals.waited_s += watch.seconds()

    def project(self, layer: int, x: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """As OneByOne, while the layer is computed: its weights are loaded then."""
        one = self.source.layer(layer)
        self.wait(layer, "kv", *(() if one.splits else ("q",)))
        return one.adapted_by(self.adapted).project(x, cos_sin)


class _RestAwaited(Attend):
    """Attention during which the rest of its layer's weights may come."""

    def __init__(self, attend: Attend, layers: LayersInTurn) -> None:
        self.attend, self.layers = attend, layers

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        out = self.attend(layer, q, k, v) if rows is None else self.attend(layer, q, k, v, rows)
        self.layers.wait(layer, "out", "up", "down")
        return out
