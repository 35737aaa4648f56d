"""What a decoder is made of, as plain records: read once from config.json, used by every room. Imports no torch.

A new fact of a family is a field of ModelConfig, the tensors that it brings (`expected`), the family's `facts` that
fill it in, the field of config.json in schema.py, and what layers.py does with it, and what decoder.py hands to C++
(LayerShape.more).

H: hidden size, E: embedding width, I: MLP width, V: vocabulary, Hq, Hkv: query and KV heads, D: head size.
Fused rows: qkv [(Hq + 2 Hkv) D, H] = (q, k, v), with Hq D more that gate the attended heads where the model does that;
up [2 I, H] = (gate, up) where the MLP is gated, else [I, H]. A recurrent layer has mixed [C + Hv V, H] = (q, k, v, z)
and gates [2 Hv, H] = (b, a) in their place: see kernels.gated_delta.
Experts: layers.N.router [E, H], and layers.N.experts.e.up and .down in place of layers.N.up and .down; E: experts.
Beside them, in some models, layers.N.shared.up and .down, in most with layers.N.shared_gate [1, H].
Inputs of each layer (LayerInputs): layer_embed [V, L P], layer_inputs [L P, H], layers.N.input_gate [P, H] and
layers.N.input_out [H, P]; L: layers, P: their width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from headrace.config import AttentionSpec, RecurrentSpec
from headrace.models.quantised import Scheme

CheckpointDType = Literal["float32", "bfloat16", "float16"]
Norm = Literal["rms", "layer"]
Block = Literal["pre", "post", "parallel", "sandwich"]
"""pre: x + f(norm(x)), attention then MLP. post: norm(x + f(x)). parallel: x + attention(norm(x)) + mlp(norm(x)).
sandwich: x + norm(f(norm(x))), each norm with weights of its own."""
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "swiglu_oai"]
"""swiglu_oai, of gated MLPs alone, takes both halves: see kernels.ops.swiglu_oai_mul."""
Positions = Literal["rope", "learned", "alibi"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
LENGTH_DEPENDENT: tuple[RopeKind, ...] = ("dynamic", "longrope")
"""Kinds that rotate a token by the length of its sequence too."""

CLASSIFIER = "score.weight"
"""[labels, E]."""
LEARNED_OFFSET = 2
"""OPT's table of positions begins with two rows that no position uses."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions. `parameters` are transformers' rope_parameters (theta, factor, ...), sorted by name.

    `original_length` is the length up to which the rotation is not stretched: the configuration's
    max_position_embeddings, and for longrope original_max_position_embeddings.
    """

    kind: RopeKind
    parameters: tuple[tuple[str, Any], ...]
    original_length: int

    def width(self, head_dim: int) -> int:
        """How many elements of a head are rotated, the first ones. proportional: all, the slow ones by nothing."""
        if self.kind == "proportional":
            return head_dim
        return int(head_dim * dict(self.parameters).get("partial_rotary_factor", 1.0))


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Matrices that a checkpoint holds quantised. bytes: of its weights, but for an embedding that is no head;
    formats: their names, the most used first; scheme: how the tensors of safetensors lie."""

    bytes: int
    formats: tuple[str, ...]
    scheme: Scheme | None = None


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts in place of a layer's MLP: `count` MLPs of the width `inner`, of which a row meets `chosen`.

    The router's softmax is taken over all experts, in fp32; then the greatest are chosen, the first of equal ones.
    normalised: their shares are divided by their sum. layers: which layers have experts; the others have a dense MLP.
    shared: width of an MLP that every row meets beside them; 0: none. shared_gate: what that makes is multiplied by the
    sigmoid of its gate. beside: every row meets the layer's dense MLP too; what either makes is normed and added, the
    router's input is normed and scaled, and shares are multiplied by a scale of each expert.
    """

    count: int
    chosen: int
    inner: int
    normalised: bool
    layers: tuple[bool, ...]
    shared: int = 0
    shared_gate: bool = True
    beside: bool = False


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What each layer adds of a token beside its residual stream (per-layer embeddings): `width` numbers, from a table
    of `vocab_size` tokens and from what enters the first layer. The layer gates them by its own stream."""

    width: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The facts of one model. Sizes in elements; `embed_size` is the width of the embedding and of the head.

    mlp_bias: of MLPs, and where a layer has experts of each of them and of the router.
    qk_norm: queries and keys are normed, head by head, or with qk_norm_whole all heads of a row together.
    local_rope: the rotation in layers with a window, where theirs is another one than `rope`. no_rope_layers: layers
    without rotation. norm_offset: is added to the weights of RMS norms. embed_scale multiplies embeddings,
    residual_scale what attention and MLP add to the residual stream, logit_scale the logits, which are then capped:
    logit_cap * tanh(logit / logit_cap). head: whether there are logits; a checkpoint made for embeddings may have none.
    labels: names of a classifier's outputs, of a checkpoint that has one in place of the head.

    attention_gate: the attended heads are multiplied by the sigmoid of gates, which are projected beside q, k and v.
    recurrent: of the layers that have a gated delta net in place of attention, which `recurrent_layers` numbers;
    `attention.layers` counts the others alone. tiled_values: the columns of such a layer's `out` go through all key
    heads for their first value heads, then for their second ones, where rows of other matrices end one key head first.

    value_norm: values are normed, without weights. keys_as_values: in layers without a window values are the keys
    before their norm. shared_inner: MLP width of layers without keys and values of their own (AttentionSpec.shared); 0:
    as of the others. layer_scale: what leaves a layer is multiplied by a number of its own.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    embed_size: int
    layers: int
    max_model_len: int
    attention: AttentionSpec
    dtype: CheckpointDType
    positions: Positions
    norm: Norm
    norm_eps: float
    activation: Activation
    gated: bool
    rope: RopeSpec | None = None
    block: Block = "pre"
    norm_affine: bool = True
    mlp_norm: bool = True
    final_norm: bool = True
    qk_norm: bool = False
    qk_norm_whole: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    experts: ExpertsSpec | None = None
    tied: bool = False
    local_rope: RopeSpec | None = None
    no_rope_layers: tuple[int, ...] = ()
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    head: bool = True
    labels: tuple[str, ...] = ()
    attention_gate: bool = False
    recurrent: RecurrentSpec | None = None
    recurrent_layers: tuple[int, ...] = ()
    tiled_values: bool = False
    value_norm: bool = False
    keys_as_values: bool = False
    shared_inner: int = 0
    layer_scale: bool = False
    layer_inputs: LayerInputs | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    stored: StoredWeights | None = None

    def experts_of(self, layer: int) -> ExpertsSpec | None:
        """The experts of a layer; None: it has a dense MLP."""
        return self.experts if self.experts is not None and self.experts.layers[layer] else None

    @property
    def has_dense_mlp(self) -> bool:
        """Whether any layer has."""
        return self.experts is None or self.experts.beside or not all(self.experts.layers)

    def inner(self, layer: int) -> int:
        """Width of a layer's dense MLP."""
        shares = layer >= self.attention.stored and self.recurrent is None
        return self.shared_inner or self.intermediate_size if shares else self.intermediate_size

    def projected_heads(self, layer: int) -> tuple[int, ...]:
        """Heads of the parts of a layer's qkv: queries, keys and values, as far as it has them."""
        spec = self.attention
        if layer >= spec.stored and self.recurrent is None:
            return (spec.heads,)
        alike = self.keys_as_values and spec.windows[layer] is None
        return (spec.heads, *(spec.shape(layer)[0],) * (1 if alike else 2))

    @property
    def mlp_width(self) -> int:
        """Columns of MLPs that a row meets in a layer: those of its experts, the mean over layers that differ."""
        if self.experts is None or self.experts.beside:
            met = 0 if self.experts is None else self.experts.chosen * self.experts.inner
            return met + sum(map(self.inner, range(self.layers))) // self.layers
        sparse, met = sum(self.experts.layers), self.experts.chosen * self.experts.inner + self.experts.shared
        return (sparse * met + (self.layers - sparse) * self.intermediate_size) // self.layers

    @property
    def rope_depends_on_length(self) -> bool:
        """Whether a token's rotation depends on the length of its sequence (dynamic NTK, longrope): see models.rope."""
        return self.rope is not None and self.rope.kind in LENGTH_DEPENDENT

    def rope_namespace(self, prompt_length: int) -> str:
        """The prompts that share prefixes with one of this length: those of the same name. Others' keys differ."""
        if not self.rope_depends_on_length or self.rope is None or prompt_length <= self.rope.original_length:
            return ""
        return f"length {prompt_length}" if self.rope.kind == "dynamic" else self.rope.kind

    def rotation(self, layer: int) -> tuple[int, int]:
        """Where the layer's rotation stands in the rows of models.rope's table: its first element, and how many.

        (0, 0) for a layer that rotates nothing. Rows hold (cos, sin) of `rope`, then of `local_rope`.
        """
        if self.rope is None or layer in self.no_rope_layers:
            return 0, 0
        dim, local_dim = self.rotated_heads
        width = self.rope.width(dim)
        if self.local_rope is None or self.attention.windows[layer] is None:
            return 0, width
        return width, self.local_rope.width(local_dim)

    @property
    def rotated_heads(self) -> tuple[int, int]:
        """Head sizes that `rope` and `local_rope` turn."""
        spec = self.attention
        windowed = {spec.windows[layer] is not None: dim for layer, (_, dim) in enumerate(spec.shapes)}
        return windowed.get(False, spec.head_dim), windowed.get(True, spec.head_dim)

    def first(self, layers: int) -> ModelConfig:
        """The model of the first layers alone."""
        recurrent = tuple(layer for layer in self.recurrent_layers if layer < layers)
        attending, experts = layers - len(recurrent), self.experts
        return replace(
            self,
            layers=layers,
            attention=self.attention.first(attending),
            recurrent=self.recurrent and replace(self.recurrent, layers=len(recurrent)),
            recurrent_layers=recurrent,
            experts=experts and replace(experts, layers=experts.layers[:layers]),
        )

    @property
    def one_of_each_kind(self) -> int:
        """First layers among which are some with attention and some that are recurrent, and some with each shape of
        heads, if the model has them."""
        if self.attention.shapes:
            return 1 + max(map(self.attention.shapes.index, self.attention.every_shape))
        recurrent = [layer in self.recurrent_layers for layer in range(self.layers)]
        return 1 + max(recurrent.index(kind) for kind in set(recurrent))

    @property
    def ends_in_attention(self) -> bool:
        """Whether the last layer has attention."""
        return self.layers - 1 not in self.recurrent_layers

    def place(self, layer: int) -> int:
        """Number of a layer among those of its kind, with attention or recurrent."""
        before = sum(each < layer for each in self.recurrent_layers)
        return before if layer in self.recurrent_layers else layer - before


@dataclass(frozen=True, slots=True)
class Slot:
    """Shape that one of our tensors must have: the row counts of its parts, and the columns (None for a vector).

    filter: a convolution's, [rows, 1, columns]. wide: kept in fp32, whatever is computed in.
    """

    parts: tuple[int, ...]
    columns: int | None = None
    filter: bool = False
    wide: bool = False

    def shape(self, rows: int) -> tuple[int, ...]:
        if self.columns is None:
            return (rows,)
        return (rows, 1, self.columns) if self.filter else (rows, self.columns)

    @property
    def count(self) -> int:
        """Numbers in the tensor."""
        return sum(self.parts) * (self.columns or 1)


def expected(config: ModelConfig) -> dict[str, Slot]:
    """Our tensors and their shapes, from the model's facts alone."""
    hidden, embed = config.hidden_size, config.embed_size
    slots = {"embed.weight": Slot((config.vocab_size,), embed)}
    if config.positions == "learned":
        slots["positions.weight"] = Slot((config.max_model_len + LEARNED_OFFSET,), hidden)
    if embed != hidden:
        slots |= _linear("project_in", (hidden,), embed, False) | _linear("project_out", (embed,), hidden, False)
    if config.layer_inputs is not None:
        slots |= _layer_inputs(config, config.layer_inputs)
    for index in range(config.layers):
        layer = _recurrent_layer if index in config.recurrent_layers else _attention_layer
        slots |= _norm(config, f"layers.{index}.attention_norm") | layer(config, index)
        slots |= _mlp(config, index)
        if config.layer_inputs is not None:
            slots |= _gated_inputs(config, f"layers.{index}.", config.layer_inputs.width)
        if config.layer_scale:
            slots[f"layers.{index}.whole.layer_scalar"] = Slot((1,))
    if config.final_norm:
        slots |= _norm(config, "final_norm")
    if config.labels:
        slots |= _linear("score", (len(config.labels),), embed, False)
    return slots | _linear("head", (config.vocab_size,), embed, False) if config.head else slots


def _layer_inputs(config: ModelConfig, spec: LayerInputs) -> dict[str, Slot]:
    every = config.layers * spec.width
    return {
        "layer_embed.weight": Slot((spec.vocab_size,), every),
        "layer_inputs.weight": Slot((every,), config.hidden_size),
        "layer_inputs_norm.weight": Slot((spec.width,)),
    }


def _gated_inputs(config: ModelConfig, prefix: str, width: int) -> dict[str, Slot]:
    gate = _linear(prefix + "input_gate", (width,), config.hidden_size, False)
    out = _linear(prefix + "input_out", (config.hidden_size,), width, False)
    return gate | out | _norm(config, prefix + "input_norm")


def _attention_layer(config: ModelConfig, layer: int) -> dict[str, Slot]:
    prefix, hidden, spec = f"layers.{layer}.", config.hidden_size, config.attention
    dim = spec.shape(layer)[1] if config.recurrent is None else spec.head_dim
    q, *kv = (heads * dim for heads in config.projected_heads(layer))
    slots = _linear(prefix + "qkv", (q * (1 + config.attention_gate), *kv), hidden, config.qkv_bias)
    if config.qk_norm:
        names = ("q_norm", "k_norm") if kv else ("q_norm",)
        widths = (q, *kv[:1]) if config.qk_norm_whole else (dim,) * len(names)
        slots |= {prefix + f"{name}.weight": Slot((n,)) for name, n in zip(names, widths, strict=True)}
    if spec.sinks:
        slots[prefix + "attention.sinks"] = Slot((spec.heads,))
    return slots | _linear(prefix + "out", (hidden,), q, config.out_bias)


def _recurrent_layer(config: ModelConfig, layer: int) -> dict[str, Slot]:
    prefix, spec, hidden = f"layers.{layer}.", config.recurrent, config.hidden_size
    assert spec is not None, "there are recurrent layers"
    return {
        prefix + "mixed.weight": Slot((spec.channels, spec.values), hidden),
        prefix + "gates.weight": Slot((spec.value_heads, spec.value_heads), hidden),
        prefix + "conv.weight": Slot((spec.channels,), spec.kernel, filter=True, wide=True),
        prefix + "delta.A_log": Slot((spec.value_heads,), wide=True),
        prefix + "delta.dt_bias": Slot((spec.value_heads,), wide=True),
        prefix + "delta_norm.weight": Slot((spec.value_dim,), wide=True),
        prefix + "out.weight": Slot((hidden,), spec.values),
    }


def _mlp(config: ModelConfig, layer: int) -> dict[str, Slot]:
    prefix, spec = f"layers.{layer}.", config.experts_of(layer)
    slots = _norm(config, prefix + "mlp_norm") if config.mlp_norm else {}
    if config.block == "sandwich":
        slots |= _norm(config, prefix + "attention_out_norm") | _norm(config, prefix + "mlp_out_norm")
    if spec is None or spec.beside:
        slots |= _up_and_down(config, prefix, config.inner(layer))
    if spec is None:
        return slots
    slots |= _linear(prefix + "router", (spec.count,), config.hidden_size, config.mlp_bias)
    for expert in range(spec.count):
        slots |= _up_and_down(config, expert_prefix(layer, expert), spec.inner)
    if spec.beside:
        slots[prefix + "routing.scale"] = Slot((config.hidden_size,))
        slots[prefix + "routing.per_expert_scale"] = Slot((spec.count,))
        for name in ("dense_out_norm", "experts_norm", "experts_out_norm"):
            slots |= _norm(config, prefix + name)
    if spec.shared and spec.shared_gate:
        slots |= _linear(prefix + "shared_gate", (1,), config.hidden_size, False)
    if spec.shared:
        slots |= _up_and_down(config, prefix + "shared.", spec.shared)
    return slots


def expert_prefix(layer: int, expert: int) -> str:
    """What the names of an expert's matrices begin with."""
    return f"layers.{layer}.experts.{expert}."


def expert_of(name: str) -> tuple[int, int] | None:
    """(Layer, expert) of a tensor of ours that belongs to one; None for others."""
    words = name.split(".")
    return (int(words[1]), int(words[3])) if len(words) > 3 and words[2] == "experts" else None


def is_exact(name: str) -> bool:
    """Whether a matrix of ours is never rounded: one that tells rows their experts, what the shared one counts, how
    much a state forgets, or a text's class. They are small, and what they decide lasts."""
    return name == CLASSIFIER or name.endswith((".router.weight", ".shared_gate.weight", ".gates.weight"))


def in_feed_forward(name: str) -> bool:
    """Whether a matrix of ours is one of a feed-forward layer's, or of an expert's."""
    return name.endswith((".up.weight", ".down.weight"))


def _up_and_down(config: ModelConfig, prefix: str, inner: int) -> dict[str, Slot]:
    hidden, bias = config.hidden_size, config.mlp_bias
    up = _linear(prefix + "up", (inner, inner) if config.gated else (inner,), hidden, bias)
    return up | _linear(prefix + "down", (hidden,), inner, bias)


def _linear(name: str, parts: tuple[int, ...], columns: int, bias: bool) -> dict[str, Slot]:
    weight = {name + ".weight": Slot(parts, columns)}
    return weight | {name + ".bias": Slot(parts)} if bias else weight


def _norm(config: ModelConfig, name: str) -> dict[str, Slot]:
    if not config.norm_affine:
        return {}
    kinds = ("weight", "bias") if config.norm == "layer" else ("weight",)
    return {f"{name}.{kind}": Slot((config.hidden_size,)) for kind in kinds}
