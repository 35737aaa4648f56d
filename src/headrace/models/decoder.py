"""One decoder for all families, built from the facts in ModelConfig.

T: rows (tokens) of a step, of all sequences together. H: hidden size, E: embedding and head width, V: vocabulary,
Hq, Hkv: query and KV heads, D: head size.
No row's bits depend on other rows here (docs/architecture.md, rule 2): sums run inside
headrace.kernels.ops or within one row, and whatever is elementwise is add, multiply or a table look-up.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.config import Quantization
from headrace.kernels import block, experts, ops
from headrace.kernels.backend import Attend
from headrace.kernels.gated_delta import Recur
from headrace.kernels.model_step import Ends, ModelStep
from headrace.memory import give_back
from headrace.models.alibi import alibi_bias
from headrace.models.config import ModelConfig, read_config
from headrace.models.hybrid import DeltaNet, let_through
from headrace.models.rope import Rope
from headrace.models.shards import ALONE, Gathered, ShardGroup, Share, Whole, Width
from headrace.models.sizes import LOOKED_UP, refuse_rounding
from headrace.models.spec import LEARNED_OFFSET, ExpertsSpec, is_exact
from headrace.models.weights import OnProgress, StoredMatrix, load_weights
from headrace.models.x_turns import XTurns
from headrace.types import CHUNK

log = logging.getLogger(__name__)

Weights = dict[str, Tensor]
Matrices = dict[str, ops.Weight]
HEAD = "head.weight"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.bfloat16}
"""Compute type by checkpoint type."""


@dataclass(slots=True)
class TokenBatch:
    """Rows of one step: token_ids [T] and absolute positions [T], int64.

    `rope_lengths` [T] = max(prompt length, position + 1), for models with rope_depends_on_length.
    """

    token_ids: Tensor
    positions: Tensor
    rope_lengths: Tensor | None = None


class Layer:
    """One block: attention, or a gated delta net, and MLP, in the order that ModelConfig.block says.

    Of several tensor ranks each has its share of the heads, of the MLP's width and of the output (models.shards);
    `whole` puts the shares together.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, matrices: Matrices, index: int, whole: Whole = ALONE
    ) -> None:
        self.config = config
        self.index = index
        self.rotation = config.rotation(index)
        self.whole = whole
        prefix = f"layers.{index}."
        self.weights = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        self.matrices = {name.removeprefix(prefix): w for name, w in matrices.items() if name.startswith(prefix)}
        self.place = config.place(index)
        self.net = DeltaNet(config, index, self.weights, self.matrices) if index in config.recurrent_layers else None
        self.experts = config.experts_of(index)

    def __call__(
        self,
        x: Tensor,
        cos_sin: Tensor | None,
        attend: Attend,
        rows: Tensor | None = None,
        recur: Recur | None = None,
    ) -> Tensor:
        """x [T, H] -> [T, H], or [n, H] of `rows` [n] alone, while attend stores the keys and values of all."""
        first = x if self.config.block == "post" else self._norm("attention_norm", x)
        if self.net is None:
            heads = self._heads(first, cos_sin, attend, rows)
        else:
            heads = self.net(first, recur)
            heads = heads if rows is None else heads[rows]
        if rows is not None:
            x, first = x[rows], first[rows]
            if not len(rows):
                return x
        attended = self._linear("out", self.whole("heads", heads.reshape(len(x), -1)))
        if self.config.block == "post":
            x = self._norm("attention_norm", x + self.whole("hidden", attended))
            return self._norm("mlp_norm", x + self.whole("hidden", self._mlp(x)))
        if self.config.block == "parallel":
            second = self._norm("mlp_norm", x) if self.config.mlp_norm else first
            return x + self.whole("hidden", self._mlp(second) + attended)
        x = x + self._added("attention_out_norm", attended)
        return x + self._added("mlp_out_norm", self._mlp(self._norm("mlp_norm", x)))

    def _added(self, name: str, part: Tensor) -> Tensor:
        """What a part [T, this rank's share of H] adds to the residual stream [T, H]."""
        y = self.whole("hidden", part)
        if self.config.block == "sandwich":
            y = self._norm(name, y)
        return y if self.config.residual_scale == 1.0 else y * self.config.residual_scale

    def _heads(self, x: Tensor, cos_sin: Tensor | None, attend: Attend, rows: Tensor | None) -> Tensor:
        """x [T, H] -> attended heads [T or n, Hq, D]."""
        spec = self.config.attention
        own = spec.heads + 2 * spec.kv_heads
        heads = self._linear("qkv", x).view(len(x), own + self.config.attention_gate * spec.heads, spec.head_dim)
        q, k, v = heads[:, :own].split((spec.heads, spec.kv_heads, spec.kv_heads), dim=1)
        q, k = self._turned("q_norm", q, cos_sin), self._turned("k_norm", k, cos_sin)
        attended = attend(self.place, q, k, v) if rows is None else attend(self.place, q, k, v, rows)
        if not self.config.attention_gate:
            return attended
        gates = heads[:, own:]
        return let_through(attended, gates if rows is None else gates[rows])

    def _turned(self, name: str, heads: Tensor, cos_sin: Tensor | None) -> Tensor:
        """Queries or keys, normed if the model does that and rotated."""
        if self.config.qk_norm_whole:
            heads = self._normed_together(name, heads)
        elif self.config.qk_norm:
            heads = ops.rms_norm(heads, self.weights[f"{name}.weight"], self.config.norm_eps, self.config.norm_offset)
        first, width = self.rotation
        return heads if cos_sin is None or not width else ops.rotary(heads, cos_sin[:, first : first + width])

    def _normed_together(self, name: str, heads: Tensor) -> Tensor:
        """Queries or keys, all heads of a row in one norm: those of all ranks."""
        width: Width = "queries" if name == "q_norm" else "keys"
        every = self.whole(width, heads.flatten(1))
        normed = ops.rms_norm(every, self.weights[f"{name}.weight"], self.config.norm_eps, self.config.norm_offset)
        return self.whole.mine(width, normed).reshape(heads.shape)

    def project(self, x: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [n, H], which enters the layer -> k, v [n, Hkv, D], as `attend` gets them. Raises ValueError on a tensor
        rank of a model whose keys are normed over the heads of all ranks."""
        if self.config.qk_norm_whole and self.whole is not ALONE:
            raise ValueError(
                "a tensor rank has a part of the keys, which are normed over all heads; keep no activations"
            )
        spec = self.config.attention
        x = x if self.config.block == "post" else self._norm("attention_norm", x)
        queries = spec.heads * spec.head_dim
        weight, bias = self.matrices["qkv.weight"], self.weights.get("qkv.bias")
        tail = ops.outputs_from(weight, queries)
        if tail is None:
            heads = ops.linear(x, weight, bias)[:, queries:]
        else:
            heads = ops.linear(x, tail, None if bias is None else bias[queries:])
        width = 2 * spec.kv_heads * spec.head_dim  # gates may follow
        k, v = heads[:, :width].view(len(x), 2 * spec.kv_heads, spec.head_dim).split(spec.kv_heads, dim=1)
        return self._turned("k_norm", k, cos_sin), v

    def _mlp(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, this rank's share of H]."""
        if self.experts is not None:
            return self._met_experts(x, self.experts)
        if self.config.gated:
            gate = self.config.activation
            inner = ops.gated_linear(x, self.matrices["up.weight"], self.weights.get("up.bias"), gate)
        else:
            inner = self._activate(self._linear("up", x))
        return self._linear("down", self.whole("inner", inner))

    def _met_experts(self, x: Tensor, spec: ExpertsSpec) -> Tensor:
        """x [T, H] -> [T, this rank's share of H]: the sum of what each row's experts make of it."""
        ups, downs = (
            [self.matrices[f"experts.{e}.{part}.weight"] for e in range(spec.count)] for part in ("up", "down")
        )
        logits = ops.linear(x, self.matrices["router.weight"], wide=True)
        routes = experts.route(logits, spec.chosen, spec.normalised)
        inner = experts.gated_linear(x[routes.order // spec.chosen], ups, routes.begin, self.config.activation)
        made = experts.linear(self.whole("expert_inner", inner), downs, routes.begin)
        return experts.combine(made, routes)

    def _activate(self, x: Tensor) -> Tensor:
        if self.config.activation == "relu":
            return ops.relu(x)
        return ops.gelu(x, "tanh" if self.config.activation == "gelu_tanh" else "none")

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return ops.linear(x, self.matrices[name + ".weight"], self.weights.get(name + ".bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return norm(self.config, self.weights, name, x)


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
    ) -> Tensor:
        """x [T, H] -> [T, H], or [n, H] of `rows` alone."""
        for layer in self.layers:
            if watch is not None:
                watch(layer.index, x)
            x = layer(x, cos_sin, attend, rows if layer is self.layers[-1] else None)
        return x

    def project(self, layer: int, x: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor]:
        """The keys and values [n, Hkv, D] that the layer makes of x [n, H], as `attend` gets them."""
        return self.layers[layer].project(x, cos_sin)


class HybridLayers(OneByOne):
    """The same, where some are recurrent."""

    def __call__(
        self,
        x: Tensor,
        cos_sin: Tensor | None,
        attend: Attend,
        rows: Tensor | None = None,
        watch: block.Watch | None = None,
        recur: Recur | None = None,
    ) -> Tensor:
        """x [T, H] -> [T, H], or [n, H] of `rows` alone."""
        for layer in self.layers:
            if watch is not None:
                watch(layer.index, x)
            x = layer(x, cos_sin, attend, rows if layer is self.layers[-1] else None, recur)
        return x


class Decoder:
    """A loaded model. It keeps no state between calls; keys and values live with whoever supplies `attend`.

    It computes on the device of its weights; a TokenBatch stays on the CPU.

    `matrices` are the weights that rows are multiplied by, packed where that pays; `weights` the tensors that are not;
    `stored` those matrices that the checkpoint has as codes.

    `key_bias` [Hq, max_model_len] fp32 is added to the scaled scores by head and key position (ALiBi), if not None.
    `sinks`, fp32 [Hq] for each layer, if not None: scores of a key without a value (kernels.records.Mask).

    With `tensor`, one of several tensor ranks: `weights` are its share, and `config.attention` and `key_bias` become
    those of its own heads, so that keys and values are stored for these alone. All ranks of the group call `forward`
    with the same batches in the same order, and get the same hidden states; rank 0 alone has `logits`. `share`: what it
    computes; None where that is everything. `turns`: whose turn it is to keep a chunk's activations.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        quantization: Quantization = "none",
        tensor: ShardGroup | None = None,
        packed: OnProgress | None = None,
        stored: Mapping[str, StoredMatrix] | None = None,
    ) -> None:
        self.share = share = _share(config, tensor)
        self.turns = XTurns(None if share is None else tensor)
        self.config = config if share is None else replace(config, attention=share.attention)
        self.dtype, self.device = weights["embed.weight"].dtype, weights["embed.weight"].device
        self.matrices = _pack_all(weights, quantization, config.gated, packed)
        self.matrices |= _pack_stored(stored or {}, self.dtype, self.device, config.gated)
        self.weights = weights
        self.layers = self._layers(share, tensor)
        self.rope = Rope(config.rope, config.attention.head_dim, config.local_rope) if config.rope else None
        self.embed_scale = torch.tensor(config.embed_scale, dtype=self.dtype)
        self.key_bias = alibi_bias(config.attention, config.max_model_len) if config.positions == "alibi" else None
        if self.key_bias is not None and share is not None:
            self.key_bias = self.key_bias[share.heads.start : share.heads.stop].clone()
        if self.key_bias is not None:
            self.key_bias = self.key_bias.to(self.device)
        self.sinks = self._sinks()
        self._ends = self._plain_ends()

    def _sinks(self) -> list[Tensor] | None:
        if not self.config.attention.sinks:
            return None
        return [self.weights[f"layers.{layer}.sinks.weight"].float() for layer in range(self.config.layers)]

    def _layers(self, share: Share | None, tensor: ShardGroup | None) -> block.Blocks | OneByOne:
        whole = ALONE if share is None or tensor is None else Gathered(share, tensor)
        layers = [Layer(self.config, self.weights, self.matrices, index, whole) for index in range(self.config.layers)]
        if self.config.recurrent is not None:
            return HybridLayers(layers)
        reason = block.obstacle(layers, self.dtype) if share is None else f"shared by {share.size} tensor ranks"
        if reason is None:
            return block.Blocks(_shape(self.config), layers)
        log.info("layers are computed one operation at a time: %s", reason)
        return OneByOne(layers)

    def first(self, count: int) -> Decoder:
        """A decoder of the first layers alone, with the same weights: for measurements."""
        part, spec, layers = copy.copy(self), self.config.attention, self.layers
        attention = replace(spec, layers=count, windows=spec.windows[:count])
        part.config = replace(self.config, layers=count, attention=attention)
        if self.config.recurrent is not None:
            raise ValueError("a model with recurrent layers is not measured by its first layers")
        if isinstance(layers, block.Blocks):
            part.layers = block.Blocks(layers.shape, layers.layers[:count])
        else:
            part.layers = OneByOne(layers.layers[:count])
        part.sinks = self.sinks and self.sinks[:count]
        part._ends = None
        return part

    def _plain_ends(self) -> Ends | None:
        """What is beside the layers, where that is a table, a norm and a head, and all runs in C++."""
        config = self.config
        whole = config.head and config.final_norm and config.embed_size == config.hidden_size
        plain = whole and config.positions != "learned" and not config.rope_depends_on_length
        if not isinstance(self.layers, block.Blocks) or not plain:
            return None
        scales = (float(self.embed_scale), config.logit_scale, config.logit_cap)
        return Ends(self.layers.shape, self.weights, self.matrices, *scales)

    @property
    def runs_whole(self) -> bool:
        """Whether `prepare` can: all layers and what is beside them are C++."""
        return self._ends is not None and isinstance(self.layers, block.Blocks)

    def prepare(self, positions: Tensor, attend: Attend) -> ModelStep:
        """The step of rows at these positions, int64 [T], from tokens to logits in one call, and those behind it up to
        the ends of their chunks: the bits of `forward` and `logits`. Raises ValueError unless `runs_whole` and
        `attend.prepared`.
        """
        if self._ends is None or attend.prepared is None or not isinstance(self.layers, block.Blocks):
            raise ValueError("this model, or its attention, is not computed in C++ as a whole")
        turns = self.rope.table(positions | (CHUNK - 1)) if self.rope else None
        return ModelStep(self._ends, self.layers, attend.prepared, turns)

    def forward(
        self,
        batch: TokenBatch,
        attend: Attend,
        rows: Tensor | None = None,
        watch: block.Watch | None = None,
        recur: Recur | None = None,
    ) -> Tensor:
        """Hidden states [T, E] of the batch, ready for `logits`. Calls attend(layer, q, k, v) once per layer, in order.

        rows, int64 [n], ascending: only their states are returned, [n, E], and nothing that no other row needs of the
        last layer is computed: no attention and no MLP (attend(layer, q, k, v, rows) then). None: all.
        k is handed over rotated; q, k and v may be views of one tensor, each row contiguous.

        watch(layer, x [T, H]) is called with the residual stream of all rows as it enters each layer, before its norm.
        x is overwritten afterwards: whoever needs it copies it.

        recur(layer, ...) is called by each recurrent layer in attend's place; layers are numbered by kind then.
        """
        x, cos_sin = self.enter(batch)
        if isinstance(self.layers, HybridLayers):
            return self.leave(self.layers(x, cos_sin, attend, rows, watch, recur))
        return self.leave(self.layers(x, cos_sin, attend, rows, watch))

    def enter(self, batch: TokenBatch) -> tuple[Tensor, Tensor | None]:
        """The residual stream [T, H] that enters the first layer, and the rotation of each row (None for none)."""
        turns = self.rope.at(batch.positions, batch.rope_lengths).to(self.device) if self.rope else None
        return self._embed(batch), turns

    def leave(self, x: Tensor) -> Tensor:
        """The residual stream [T, H] behind the last layer -> hidden states [T, E], as `forward` returns them."""
        if not len(x):
            return x.new_empty(0, self.config.embed_size)
        if self.config.final_norm:
            x = norm(self.config, self.weights, "final_norm", x)
        return ops.linear(x, self.matrices["project_out.weight"]) if "project_out.weight" in self.matrices else x

    def project(self, layer: int, x: Tensor, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """k and v [n, Hkv, D] of a layer from what enters it, x [n, H] (see `forward`, watch): those that `forward`
        hands to attend for these rows, to the bit.

        positions, int64 [n], absolute; lengths [n]: as TokenBatch.rope_lengths. k and v may be views of one tensor.
        """
        cos_sin = self.rope.at(positions, lengths) if self.rope else None
        return self.layers.project(layer, x, cos_sin)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E] -> fp32 [R, V]. Raises ValueError for a model, and on a tensor rank, without a head."""
        if not self.config.head:
            raise ValueError(f"{self.config.architecture} has no head, and so no logits; it makes embeddings")
        if HEAD not in self.matrices:
            raise ValueError("this tensor rank has no head; ask rank 0 of its group for logits")
        logits = ops.linear(hidden, self.matrices[HEAD], wide=True)
        if self.config.logit_scale == 1.0 and self.config.logit_cap is None:
            return logits
        return ops.soft_cap(logits, self.config.logit_scale, self.config.logit_cap)

    def _embed(self, batch: TokenBatch) -> Tensor:
        x = F.embedding(batch.token_ids.to(self.device), self.weights["embed.weight"])
        if self.config.embed_scale != 1.0:
            x = x * self.embed_scale
        if "project_in.weight" in self.matrices:
            x = ops.linear(x, self.matrices["project_in.weight"])
        if self.config.positions == "learned":
            x = x + F.embedding((batch.positions + LEARNED_OFFSET).to(self.device), self.weights["positions.weight"])
        return x


def _share(config: ModelConfig, tensor: ShardGroup | None) -> Share | None:
    """What this rank computes; None: everything."""
    return None if tensor is None or tensor.size == 1 else Share(config, tensor.rank, tensor.size)


def _shape(config: ModelConfig) -> block.LayerShape:
    """What kernels.block needs to know of the layers."""
    return block.LayerShape(
        attention=config.attention,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        order=config.block,
        activation=f"{config.activation}_mul" if config.gated else config.activation,
        rms=config.norm == "rms",
        eps=config.norm_eps,
        mlp_norm=config.mlp_norm or config.block != "parallel",
        qk_norm=config.qk_norm,
        norm_offset=config.norm_offset,
        qk_norm_whole=config.qk_norm_whole,
        experts=config.experts,
        more=dict(residual_scale=config.residual_scale),
    )


def _pack_all(weights: Weights, quantization: Quantization, gated: bool, packed: OnProgress | None) -> Matrices:
    """All weights that rows are multiplied by. What is packed leaves `weights`: memory never holds all twice."""
    names = [name for name, weight in weights.items() if weight.dim() == 2 and name not in LOOKED_UP]
    matrices: Matrices = {}
    done, total = 0, sum(weights[name].nbytes for name in names)
    for name in names:
        weight = weights[name]
        matrices[name] = _packed(name, weight, _rounding(name, quantization), gated and name.endswith(".up.weight"))
        if matrices[name] is not weight:
            del weights[name]
        done += weight.nbytes
        if packed is not None:
            packed(done, total)
    return matrices


def _rounding(name: str, asked: Quantization) -> Quantization:
    """How the numbers of a matrix are kept. With w8a8 the head's weights are int8 and its rows are not rounded: a step
    has few of them, and logits feel it most."""
    if is_exact(name):
        return "none"
    return "int8" if asked == "w8a8" and name == HEAD else asked


def _pack_stored(stored: Mapping[str, StoredMatrix], dtype: torch.dtype, device: torch.device, gated: bool) -> Matrices:
    """Those that a checkpoint holds as codes, in these; what they stand for where there are no kernels for codes."""
    matrices: Matrices = {}
    for name, matrix in stored.items():
        if device.type == "cpu":
            matrices[name] = ops.pack_stored(matrix.read(), dtype, gated and name.endswith(".up.weight"))
        else:
            matrices[name] = matrix.numbers(dtype).to(device)
    return matrices


def _packed(name: str, weight: Tensor, quantization: Quantization, gated: bool) -> ops.Weight:
    try:
        return ops.pack(weight, quantization, gated)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def norm(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """The model's norm of x [T, H] with the weights called `name`."""
    weight, bias = weights.get(name + ".weight"), weights.get(name + ".bias")
    if config.norm == "rms" and weight is not None:
        return ops.rms_norm(x, weight, config.norm_eps, config.norm_offset)
    return ops.layer_norm(x, weight, bias, config.norm_eps)


def compute_dtype(config: ModelConfig, dtype: Literal["auto", "bfloat16", "float32"]) -> torch.dtype:
    """The type that is computed in where `dtype` is asked for."""
    return DTYPES[config.dtype if dtype == "auto" else dtype]


def load_decoder(
    folder: str | Path,
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    progress: OnProgress | None = None,
    quantization: Quantization = "none",
    tensor: ShardGroup | None = None,
    device: torch.device | None = None,
    packed: OnProgress | None = None,
) -> Decoder:
    """Reads the model in `folder`; `auto` computes in the checkpoint's type, float16 as bfloat16.

    `quantization` rounds every matrix that rows are multiplied by, the head among them, and with w8a8 the rows too;
    embeddings, norms and biases stay. progress and packed are told of bytes, as weights are read and then as matrices
    are packed. With `tensor` only this rank's share is read and kept. device: of the weights and of all that is
    computed; the CPU, if it is not given.
    Raises UnsupportedModel naming what Headrace does not implement, ValueError for a folder that is not sound or a
    model that the ranks cannot share.
    """
    if dtype not in ("auto", "bfloat16", "float32"):
        raise ValueError(f"dtype must be auto, bfloat16 or float32, got {dtype!r}")
    if quantization not in get_args(Quantization):
        raise ValueError(f"quantization must be one of {', '.join(get_args(Quantization))}, got {quantization!r}")
    config = read_config(folder)
    refuse_rounding(config, quantization)
    compute = compute_dtype(config, dtype)
    stored: dict[str, StoredMatrix] = {}
    weights = load_weights(Path(folder), config, compute, progress, _share(config, tensor), stored)
    if device is not None and device.type != "cpu":
        weights = {name: w.to(device) for name, w in weights.items()}
    decoder = Decoder(config, weights, quantization, tensor, packed, stored)
    del weights, stored
    give_back()
    return decoder
