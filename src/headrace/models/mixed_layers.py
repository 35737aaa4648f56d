"""The layers of Gemma 4: they differ in their heads, may share keys and values, and have inputs of their own.

T: rows (tokens) of a step, of all sequences together. H: hidden size, Hq, Hkv: query and KV heads, D: head size, both
the layer's own (AttentionSpec.shapes). L: layers, P: width of a layer's inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headrace.kernels import block, experts, ops
from headrace.kernels.adapted_rows import AdaptedRows
from headrace.kernels.backend import Attend
from headrace.kernels.block import Made
from headrace.kernels.layer_shape import SHARE_SCALES
from headrace.kernels.records import QKRotary
from headrace.kernels.recurrent import Recur
from headrace.models.layer_parts import LayerInputs
from headrace.models.layers import Layer, Matrices, OneByOne, Weights
from headrace.models.shards import ALONE, Whole
from headrace.models.spec import ExpertsSpec, ModelConfig


class MixedLayer(Layer):
    """One layer. It is called by `run`.

    A layer without keys and values of its own hands those of another to `attend` again, which then stores them once
    more where they are: so ranks exchange them for it as for any layer, and no strategy knows of the difference.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, matrices: Matrices, index: int, whole: Whole = ALONE
    ) -> None:
        super().__init__(config, weights, matrices, index, whole)
        self.kv_heads, self.dim = self.kv_shape
        self.source = config.attention.source(index)
        self.lends = index in config.attention.shared
        self.weights["v_norm.weight"] = torch.ones_like(self.weights["q_norm.weight"])
        if self.experts is not None:
            self.weights[SHARE_SCALES] = self.weights["routing.per_expert_scale"].float()

    def run(
        self,
        x: Tensor,
        cos_sin: Tensor | None,
        attend: Attend,
        made: Made,
        inputs: Tensor | None,
        rows: Tensor | None,
    ) -> Tensor:
        """x [T, H] -> [T, H], or [n, H] of `rows` [n] alone. inputs [T, P]: the layer's own; made: see Made."""
        heads = self._attended(self._norm("attention_norm", x), cos_sin, attend, made, rows)
        if rows is not None:
            x, inputs = x[rows], None if inputs is None else inputs[rows]
            if not len(rows):
                return x
            self.adapted = None if self.adapted is None else self.adapted.of(rows)
        x = x + self._added("attention_out_norm", self._linear("out", self.whole("heads", heads.reshape(len(x), -1))))
        x = x + self._norm("mlp_out_norm", self._fed(x))
        if inputs is not None:
            gated = ops.gelu(self._linear("input_gate", x), "tanh") * inputs
            x = x + self._norm("input_norm", self._linear("input_out", gated))
        return x * self.weights["whole.layer_scalar"]

    def _attended(self, x: Tensor, cos_sin: Tensor | None, attend: Attend, made: Made, rows: Tensor | None) -> Tensor:
        """x [T, H] -> attended heads [T or n, Hq, D]."""
        heads = self._linear("qkv", x).view(len(x), sum(self.projected), self.dim)
        q, *own = self._parts(heads, self.config.attention.heads, cos_sin)
        k, v = own if self.source == self.index else made[self.source]
        if self.lends:
            made[self.index] = k, v
        return attend(self.index, q, k, v) if rows is None else attend(self.index, q, k, v, rows)

    def _parts(self, heads: Tensor, queries: int, cos_sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """heads [T, `queries`, and Hkv or 2 Hkv or none, D], projected queries, keys and values, or keys that are both,
        as far as the layer has them -> q, k, v, as `attend` gets them."""
        config, (first, width), keys = self.config, self.rotation, self.kv_heads if self.source == self.index else 0
        turn = cos_sin[:, first : first + width] if cos_sin is not None and width else None
        q_norm = self.weights["q_norm.weight"]
        norms = (q_norm, self.weights["k_norm.weight"] if keys else q_norm)
        how = QKRotary(ops.rotated_heads, queries, keys, turn, *norms, config.norm_eps, config.norm_offset)
        q, k, _ = how(heads)
        v = heads[:, heads.shape[1] - keys :]
        return q, k, ops.rms_norm(v, self.weights["v_norm.weight"], config.norm_eps) if keys else v

    def project(self, x: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [n, H], which enters the layer -> k, v [n, Hkv, D], as `attend` gets them."""
        heads = self._linear("qkv", self._norm("attention_norm", x)).view(len(x), sum(self.projected), self.dim)
        _, k, v = self._parts(heads[:, self.config.attention.heads :], 0, cos_sin)
        return k, v

    def _fed(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]: what its MLP makes of it, and its experts beside that."""
        dense = self.whole("hidden", self._dense(self._norm("mlp_norm", x)))
        if self.experts is None:
            return dense
        met = self._met(x, self.experts)
        return self._norm("dense_out_norm", dense) + self._norm("experts_out_norm", self.whole("hidden", met))

    def _met(self, x: Tensor, spec: ExpertsSpec) -> Tensor:
        """x [T, H] -> [T, this rank's share of H]: what each row's experts make of it, by the scales of experts too."""
        scaled = ops.rms_norm(x, self.weights["routing.scale"], self.config.norm_eps) * self.config.hidden_size**-0.5
        logits = ops.linear(scaled, self.matrices["router.weight"], wide=True)
        scales, x = self.weights[SHARE_SCALES], self._norm("experts_norm", x)
        if self.mixture is not None:
            return self.mixture(x, logits, scales)
        routes = experts.route(logits, spec.chosen, True)
        return self._sent(x, replace(routes, share=routes.share * scales[routes.expert.long()]), spec)


class MixedLayers(OneByOne):
    """The layers of a model, one operation at a time."""

    def __init__(self, layers: Sequence[MixedLayer]) -> None:
        super().__init__(list(layers))
        self.mixed = layers

    def adapted_by(self, rows: AdaptedRows) -> MixedLayers:
        adapted = [layer.adapted_by(rows) for layer in self.mixed]
        return MixedLayers([layer for layer in adapted if isinstance(layer, MixedLayer)])

    def first(self, count: int) -> MixedLayers:
        return MixedLayers(self.mixed[:count])

    def __call__(
        self,
        x: Tensor,
        cos_sin: Tensor | None,
        attend: Attend,
        rows: Tensor | None = None,
        watch: block.Watch | None = None,
        recur: Recur | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """x [T, H] -> [T, H], or [n, H] of `rows` alone. inputs [T, L, P]: of each layer, if the model has some.

        watch is told of layers that have keys and values of their own.
        """
        made: Made = {}
        for layer in self.mixed:
            if watch is not None and layer.source == layer.index:
                watch(layer.index, x)
            own = None if inputs is None else inputs[:, layer.index]
            x = layer.run(x, cos_sin, attend, made, own, rows if layer is self.mixed[-1] else None)
        return x


def input_scales(config: ModelConfig, spec: LayerInputs) -> tuple[float, float, float]:
    """What the rows of the inputs' table, what is projected of x, and the sum of both are multiplied by."""
    return spec.width**0.5, config.hidden_size**-0.5, 2.0**-0.5


def layer_inputs(
    config: ModelConfig,
    spec: LayerInputs,
    table: ops.Table,
    weights: Weights,
    matrices: Matrices,
    tokens: Tensor,
    x: Tensor,
) -> Tensor:
    """What each layer adds of these tokens [T], which enter the first layer as x [T, H]: [T, L, P], for all layers of
    the file, of which config may have the first alone. table: of what they add by themselves, [V, L P]."""
    shape = (len(x), table.shape[1] // spec.width, spec.width)
    of_own, of_projected, of_both = input_scales(config, spec)
    own = ops.look_up(table, tokens, x.dtype) * torch.tensor(of_own, dtype=x.dtype)
    projected = ops.linear(x, matrices["layer_inputs.weight"]) * of_projected
    normed = ops.rms_norm(projected.view(shape), weights["layer_inputs_norm.weight"], config.norm_eps)
    return (normed + own.view(shape)) * of_both
