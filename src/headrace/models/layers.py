"""The layers of a decoder, one operation at a time: attention or what stands in its place, and an MLP or experts.

T: rows (tokens) of a step, of all sequences together. H: hidden size, Hq, Hkv: query and KV heads, D: head size.
No row's bits depend on other rows here (docs/architecture.md, rule 2): sums run inside headrace.kernels.ops or within
one row, and whatever is elementwise is add, multiply or a table look-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from headrace.config.routing import CORRECTION
from headrace.kernels import block, dispatch, experts, ops
from headrace.kernels.adapted_rows import AdaptedRows, PlacedPairs
from headrace.kernels.backend import Attend
from headrace.kernels.layer_shape import ALPHAS
from headrace.kernels.records import QKRotary
from headrace.kernels.recurrent import Recur
from headrace.kernels.routing import weighted_inputs
from headrace.kernels.triton.weights import GpuWeight
from headrace.models.hybrid import WIDE, let_through, recurrent_layer
from headrace.models.shards import ALONE, Whole, Width
from headrace.models.spec import NORMED_BEHIND, ExpertsSpec, ModelConfig

Weights = dict[str, Tensor]
Matrices = dict[str, ops.Weight]


class Layer:
    """One block: attention, or a recurrent layer of models.hybrid, and MLP, in the order that ModelConfig.block says.

    Of several tensor ranks each has its share of the heads, of the MLP's width and of the output (models.shards);
    `whole` puts the shares together.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, matrices: Matrices, index: int, whole: Whole = ALONE
    ) -> None:
        self.config = config
        self.index = index
        self.rotation, self.query_first = config.rotation(index), config.query_first(index)
        self.turned_apart = config.turned_apart(index)
        self.whole = whole
        prefix = f"layers.{index}."
        self.weights = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        self.matrices = {name.removeprefix(prefix): w for name, w in matrices.items() if name.startswith(prefix)}
        self.place = config.place(index)
        self.kv_shape = config.attention.shape(self.place)
        self.projected = config.projected_heads(index)
        self.inner = config.inner(index)
        self.net = recurrent_layer(config, index, self.weights, whole)
        self.experts = config.experts_of(index)
        self.has_mlp = index not in config.without_mlp
        self.mixture = self._mixture(self.experts)
        self.pairs: dict[str, PlacedPairs] = {}
        """What adapters have for its matrices, by their names without `.weight`."""
        self.adapted: AdaptedRows | None = None

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
        """The residual stream x [T, H] and the part [T, H] still to be added to it, if there is one -> the same behind
        the layer, or [n, H] of `rows` [n] alone, while attend stores the keys and values of all. So a layer's last sum
        can be one operation with the next one's norm. watch: see Decoder.forward."""
        if self.config.block == "post":
            first = x
        else:
            x, first = self._joined("attention_norm", x, part)
        if watch is not None:
            watch(self.index, x)
        heads = self._mixed(first, cos_sin, attend, rows, recur)
        if rows is not None:
            x, first = x[rows], first[rows]
            if not len(rows):
                return x, None
            self.adapted = None if self.adapted is None else self.adapted.of(rows)
        attended = self._out(heads, x.dtype)
        if self.config.block == "post":
            x = self._norm("attention_norm", x + self.whole("hidden", attended))
            return self._norm("mlp_norm", x + self.whole("hidden", self._mlp(x))), None
        if self.config.block == "parallel":
            second = self._norm("mlp_norm", x) if self.config.mlp_norm else first
            return x, self.whole("hidden", self._mlp(second) + attended)
        if not self.has_mlp:
            return x, self._added("attention_out_norm", attended)
        x, second = self._joined("mlp_norm", x, self._added("attention_out_norm", attended))
        return x, self._added("mlp_out_norm", self._mlp(second))

    def on(self, matrices: Matrices) -> Layer:
        """The layer with other matrices; its vectors stay its own."""
        other = copy(self)
        other.matrices = matrices
        other.mixture = other._mixture(other.experts)
        return other

    def adapted_by(self, rows: AdaptedRows) -> Layer:
        """The layer in a step some rows of which have an adapter. It is for that step alone."""
        other = copy(self)
        other.adapted = rows
        return other

    def _added(self, name: str, part: Tensor) -> Tensor:
        """What a part [T, this rank's share of H] adds to the residual stream [T, H]."""
        y = self.whole("hidden", part)
        if self.config.block in NORMED_BEHIND:
            y = self._norm(name, y)
        return y if self.config.residual_scale == 1.0 else y * self.config.residual_scale

    def _mixed(
        self, x: Tensor, cos_sin: Tensor | None, attend: Attend, rows: Tensor | None, recur: Recur | None
    ) -> tuple[Tensor, ...]:
        """x [T, H] -> this rank's heads, of all T or of `rows`, as attention or what stands in its place makes them."""
        if self.net is None:
            return (self._heads(x, cos_sin, attend, rows),)
        heads = self.net(x, recur, self._linear)
        return (heads if rows is None else heads[rows],)

    def _out(self, heads: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Those of n rows -> [n, this rank's share of H]."""
        [own] = heads
        own = self.whole("heads", own.flatten(1)) if self.net is None else self.net.together(own).to(dtype)
        return self._linear("out", own)

    def _heads(self, x: Tensor, cos_sin: Tensor | None, attend: Attend, rows: Tensor | None) -> Tensor:
        """x [T, H] -> attended heads [T or n, Hq, D]."""
        spec = self.config.attention
        own = spec.heads + 2 * spec.kv_heads
        heads = self._linear("qkv", x).view(len(x), own + self.config.attention_gate * spec.heads, spec.head_dim)
        if self.turned_apart:
            q, k, v = heads[:, :own].split((spec.heads, spec.kv_heads, spec.kv_heads), dim=1)
            q, k = self._turned("q_norm", q, cos_sin), self._turned("k_norm", k, cos_sin)
            attended = attend(self.place, q, k, v) if rows is None else attend(self.place, q, k, v, rows)
        else:
            attended = attend.projected(self.place, heads[:, :own], self._rotary(spec.heads, cos_sin), rows)
        if not self.config.attention_gate:
            return attended
        gates = heads[:, own:]
        return let_through(attended, gates if rows is None else gates[rows])

    def _rotary(self, queries: int, cos_sin: Tensor | None) -> QKRotary:
        """How projected heads, the first `queries` of them queries, become those that attention takes."""
        config, (first, width) = self.config, self.rotation
        if cos_sin is not None and (first, width) != (0, cos_sin.shape[1]):
            cos_sin = cos_sin[:, first : first + width] if width else None
        rotary = QKRotary(
            ops.rotated_heads,
            queries,
            config.attention.kv_heads,
            cos_sin,
            eps=config.norm_eps,
            offset=config.norm_offset,
        )
        if not config.qk_norm:
            return rotary
        return replace(rotary, q_norm=self.weights["q_norm.weight"], k_norm=self.weights["k_norm.weight"])

    def _turned(self, name: str, heads: Tensor, cos_sin: Tensor | None) -> Tensor:
        """Queries or keys, normed if the model does that and rotated."""
        first, width = self.query_first if name == "q_norm" else self.rotation[0], self.rotation[1]
        turns = cos_sin[:, first : first + width] if cos_sin is not None and width else None
        if turns is not None and self.config.turn_before_norm:
            heads, turns = ops.rotary(heads, turns), None
        if self.config.qk_norm_whole:
            heads = self._normed_together(name, heads)
        elif f"{name}.weight" in self.weights:
            heads = ops.rms_norm(heads, self.weights[f"{name}.weight"], self.config.norm_eps, self.config.norm_offset)
        return heads if turns is None else ops.rotary(heads, turns)

    def _normed_together(self, name: str, heads: Tensor) -> Tensor:
        """Queries or keys, all heads of a row in one norm: those of all ranks."""
        width: Width = "queries" if name == "q_norm" else "keys"
        every = self.whole(width, heads.flatten(1))
        normed = ops.rms_norm(every, self.weights[f"{name}.weight"], self.config.norm_eps, self.config.norm_offset)
        return self.whole.mine(width, normed).reshape(heads.shape)

    def project(self, x: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [n, H], which enters the layer -> k, v [n, Hkv, D], as `attend` gets them. Where keys are normed over the
        heads of all tensor ranks, these call it alike. Raises RankLost."""
        spec = self.config.attention
        x = x if self.config.block in ("post", "after") else self._norm("attention_norm", x)
        queries = spec.heads * spec.head_dim
        weight, bias = self.matrices["qkv.weight"], self.weights.get("qkv.bias")
        width = 2 * spec.kv_heads * spec.head_dim  # gates may follow
        tail = ops.outputs_from(weight, queries, width)
        if tail is None:
            heads = ops.linear(x, weight, bias)[:, queries:]
        else:
            heads = ops.linear(x, tail, None if bias is None else bias[queries : queries + width])
        if self.adapted is not None and "qkv" in self.pairs:
            heads = self.adapted.added(self.pairs["qkv"], x, heads, queries)
        heads = heads[:, :width].view(len(x), 2 * spec.kv_heads, spec.head_dim)
        if not self.turned_apart:
            return self._rotary(0, cos_sin)(heads)[1:]
        k, v = heads.split(spec.kv_heads, dim=1)
        return self._turned("k_norm", k, cos_sin), v

    @property
    def splits(self) -> bool:
        """Whether `project` reads nothing that queries alone need: of qkv the part of keys and values."""
        spec = self.config.attention
        return ops.outputs_from(self.matrices["qkv.weight"], spec.heads * spec.head_dim) is not None

    def _mlp(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, this rank's share of H]."""
        if self.experts is not None:
            return self._met_experts(x, self.experts)
        return self._dense(x)

    def _dense(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, this rank's share of H]: the MLP that every row meets."""
        return self._linear("down", self.whole("inner", self._inner("up", x)))

    def _inner(self, name: str, x: Tensor) -> Tensor:
        """x [T, H] -> [T, this rank's share of I]: up and the activation."""
        weight, bias, kind = self.matrices[name + ".weight"], self.weights.get(name + ".bias"), self.config.activation
        alphas = self.weights.get(ALPHAS)
        if self.adapted is None or name not in self.pairs:
            if self.config.gated:
                return ops.gated_linear(x, weight, bias, kind)
            return ops.activated_linear(x, weight, bias, kind, alphas)
        made = self.adapted.added(self.pairs[name], x, ops.halves_linear(x, weight, bias))
        return ops.gated(made, kind) if self.config.gated else ops.activated(made, kind, alphas)

    def _met_experts(self, x: Tensor, spec: ExpertsSpec) -> Tensor:
        """x [T, H] -> [T, this rank's share of H]: the sum of what each row's experts make of it."""
        logits = ops.linear(x, self.matrices["router.weight"], self.weights.get("router.bias"), wide=True)
        if self.mixture is not None:
            met = self.mixture(x, logits, gather=partial(self.whole, "expert_inner"))
        else:
            routes = experts.route(logits, spec.chosen, spec.normalised, spec.routing, self.weights.get(CORRECTION))
            met = self._sent(x, routes, spec)
        return met + self._met_by_all(x, spec) if spec.shared else met

    def _sent(self, x: Tensor, routes: experts.Routes, spec: ExpertsSpec) -> Tensor:
        """x [T, H], each row to its experts -> [T, this rank's share of H]."""
        (ups, up_biases), (downs, down_biases) = self._of_experts("up", spec), self._of_experts("down", spec)
        if experts.OUTSIDE in self.weights:
            experts.fetch(self.weights[experts.OUTSIDE], routes.begin)
        if spec.routing.weighs_inputs:
            chosen, ones = weighted_inputs(x, routes.order, routes.share)
            routes = replace(routes, share=ones)
        else:
            chosen = x[routes.order // spec.chosen]
        inner = self._inner_of_experts(chosen, ups, routes.begin, up_biases)
        made = experts.linear(self.whole("expert_inner", inner), downs, routes.begin, biases=down_biases)
        return experts.combine(made, routes)

    def _inner_of_experts(
        self, x: Tensor, ups: list[ops.Weight], begin: Sequence[int], biases: list[Tensor] | None
    ) -> Tensor:
        """x [M, H] by expert -> [M, this rank's share of I]: up and the activation."""
        if self.config.gated:
            return experts.gated_linear(x, ups, begin, self.config.expert_activation, biases)
        return ops.activated(experts.linear(x, ups, begin, biases=biases), self.config.expert_activation)

    def bring_experts(self, matrices: Matrices, bring: experts.Bring) -> None:
        """Has experts in `matrices` from now on, memory of a GPU, in which `bring` puts those that rows meet."""
        self.matrices = self.matrices | matrices
        self.mixture = self._mixture(self.experts, bring)

    def _mixture(self, spec: ExpertsSpec | None, bring: experts.Bring | None = None) -> experts.Mixture | None:
        """All experts of the layer as one, on a GPU; those in a file once they are brought."""
        router = self.matrices.get("router.weight")
        if spec is None or router is None or (experts.OUTSIDE in self.weights and bring is None):
            return None
        if not (dispatch.on_gpu(router) if isinstance(router, Tensor) else isinstance(router, GpuWeight)):
            return None
        parts = (*self._of_experts("up", spec), *self._of_experts("down", spec))
        correction = self.weights.get(CORRECTION)
        return experts.mixture(
            *parts, self.config.expert_activation, spec.chosen, spec.normalised, bring, spec.routing, correction,
            gated=self.config.gated,
        )  # fmt: skip

    def _of_experts(self, part: str, spec: ExpertsSpec) -> tuple[list[ops.Weight], list[Tensor] | None]:
        """Matrices of that name, and their biases if they have any."""
        names = [f"experts.{e}.{part}" for e in range(spec.count)]
        biases = [self.weights[f"{name}.bias"] for name in names] if self.config.mlp_bias else None
        return [self.matrices[f"{name}.weight"] for name in names], biases

    def _met_by_all(self, x: Tensor, spec: ExpertsSpec) -> Tensor:
        """x [T, H] -> [T, this rank's share of H]: what the shared expert makes of every row."""
        made = self._linear("shared.down", self.whole("shared_inner", self._inner("shared.up", x)))
        return let_through(made, self._linear("shared_gate", x).expand_as(made)) if spec.shared_gate else made

    def _linear(self, name: str, x: Tensor) -> Tensor:
        """x times a matrix; what decides how much a recurrent state forgets stays in fp32."""
        made = ops.linear(x, self.matrices[name + ".weight"], self.weights.get(name + ".bias"), wide=name in WIDE)
        if self.adapted is None or name not in self.pairs:
            return made
        return self.adapted.added(self.pairs[name], x, made)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return norm(self.config, self.weights, name, x)

    def _joined(self, name: str, x: Tensor, part: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + part [T, H], and the norm of that, unless the model norms what is behind alone."""
        if self.config.block == "after":
            total = x if part is None else x + part
            return total, total
        if part is None:
            return x, self._norm(name, x)
        weight, bias = self.weights.get(name + ".weight"), self.weights.get(name + ".bias")
        if self.config.norm == "rms" and weight is not None:
            return ops.add_rms_norm(x, part, weight, self.config.norm_eps, self.config.norm_offset)
        return ops.add_layer_norm(x, part, weight, bias, self.config.norm_eps)


class OneByOne:
    """The layers of a model, each operation by its own call: what kernels.block.Blocks does in two calls a layer."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers

    def __call__(
        self,
        x: Tensor,
        cos_sin: Tensor | None,
        attend: Attend,
        rows: Tensor | None = None,
        watch: block.Watch | None = None,
        recur: Recur | None = None,
    ) -> Tensor:
        """x [T, H] -> [T, H], or [n, H] of `rows` alone. recur: see Decoder.forward."""
        part: Tensor | None = None
        for layer in self.layers:
            x, part = layer(x, part, cos_sin, attend, rows if layer is self.layers[-1] else None, watch, recur)
        return x if part is None else x + part

    def adapted_by(self, rows: AdaptedRows) -> OneByOne:
        """The layers in a step some rows of which have an adapter."""
        return OneByOne([layer.adapted_by(rows) for layer in self.layers])

    def first(self, count: int) -> OneByOne:
        """The first layers alone."""
        return OneByOne(self.layers[:count])

    def project(self, layer: int, x: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """The keys and values [n, Hkv, D] that the layer makes of x [n, H], as `attend` gets them."""
        return self.layers[layer].project(x, cos_sin)


def norm(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """The model's norm of x [T, H] with the weights called `name`."""
    weight, bias = weights.get(name + ".weight"), weights.get(name + ".bias")
    eps = config.eps_behind if name.endswith("_out_norm") else config.norm_eps
    if config.norm == "rms" and weight is not None:
        return ops.rms_norm(x, weight, eps, config.last_offset if name == "final_norm" else config.norm_offset)
    return ops.layer_norm(x, weight, bias, eps)
