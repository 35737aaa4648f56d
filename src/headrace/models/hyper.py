"""Layers of a model with hyper-connections: around attention and around the MLP, several residual streams in place of
one (kernels.hyper).

T: rows (tokens) of a step; S: streams, H: hidden size. What passes between layers is [T, S H].
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from headrace.kernels import block, hyper
from headrace.kernels.backend import Attend
from headrace.kernels.recurrent import Recur
from headrace.models.indexed import IndexedLayer
from headrace.models.spec import ModelConfig


def mixing_of(weights: Mapping[str, Tensor], name: str) -> hyper.Mixing:
    """The learned numbers of that name."""
    return hyper.Mixing(*(weights[f"{name}.{part}"] for part in hyper.Mixing._fields))


def collected(config: ModelConfig, mixing: hyper.Mixing, x: Tensor) -> tuple[Tensor, hyper.Counts | None]:
    """kernels.hyper.collect of x [T, S H], as the model does it."""
    spec = config.hyper
    assert spec is not None, "the model has several streams"
    bounds = hyper.Bounds(config.norm_eps, spec.least, spec.magnitude, spec.post_least, spec.rounds)
    return hyper.collect(x, mixing, spec.streams, bounds)


class HyperIndexedLayer(IndexedLayer):
    """A layer whose two halves each read one sum of the streams, normed, and add to all of them."""

    def __call__(
        self,
        x: Tensor,
        part: Tensor | None,
        cos_sin: Tensor | None,
        attend: Attend,
        rows: Tensor | None = None,
        watch: block.Watch | None = None,
        recur: Recur | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, S H] -> the same behind the layer, of all T or of `rows`; nothing is left to be added."""
        if watch is not None:
            watch(self.index, x)
        first, counts = self._read("attention", x)
        heads = self._mixed(first, cos_sin, attend, rows, recur)
        if rows is not None:
            x, counts = x[rows], counts.of(rows)
            if not len(rows):
                return x, None
            self.adapted = None if self.adapted is None else self.adapted.of(rows)
        x = hyper.spread(x, self.whole("hidden", self._out(heads, x.dtype)), counts)
        second, counts = self._read("mlp", x)
        return hyper.spread(x, self.whole("hidden", self._mlp(second)), counts), None

    def project(self, x: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [n, S H], which enters the layer -> k, v [n, 1, D], as `attend` gets them: the same tensor."""
        k = self._keys(self._read("attention", x)[0], cos_sin)
        return k, k

    def _read(self, half: str, x: Tensor) -> tuple[Tensor, hyper.Counts]:
        """x [T, S H] -> what a half reads, normed [T, H], and how it adds to the streams."""
        total, counts = collected(self.config, mixing_of(self.weights, f"{half}_streams"), x)
        assert counts is not None, "both halves add to the streams"
        return self._norm(f"{half}_norm", total), counts


def entered(config: ModelConfig, x: Tensor) -> Tensor:
    """Embeddings [T, H] -> what enters the first layer, [T, S H]: all streams alike."""
    return x if config.hyper is None else x.repeat(1, config.hyper.streams)


def left(config: ModelConfig, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """What leaves the last layer, [T, S H] -> [T, H], which is normed."""
    if config.hyper is None:
        return x
    if not config.hyper.learned_end:
        return hyper.mean(x, config.hyper.streams)
    return collected(config, mixing_of(weights, "streams"), x)[0]
