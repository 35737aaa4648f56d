"""What a decoder is made of, as plain records: read once from config.json, used by every room. Imports no torch.

A new fact of a family is a field of ModelConfig, the tensors that it brings (slots.expected), the family's `facts` that
fill it in, the field of config.json in schema.py, and what layers.py does with it, and what decoder.py hands to C++
(LayerShape.more).

H: hidden size, E: embedding width, I: MLP width, V: vocabulary, Hq, Hkv: query and KV heads, D: head size.
Fused rows: qkv [(Hq + 2 Hkv) D, H] = (q, k, v), with Hq D more that gate the attended heads where the model does that;
up [2 I, H] = (gate, up) where the MLP is gated, else [I, H]. A recurrent layer has mixed [C + Hv V, H] = (q, k, v, z)
and gates [2 Hv, H] = (b, a) in their place, or mixed [3 H, H]: see kernels.gated_delta and kernels.short_conv. Where a
layer has both, what the recurrent one makes goes through recurrent_out [H, Hv V].
Experts: layers.N.router [E, H], and layers.N.experts.e.up and .down in place of layers.N.up and .down; E: experts.
Beside them, in some models, layers.N.shared.up and .down, in most with layers.N.shared_gate [1, H]. Corrections of a
router's scores (RoutingSpec): layers.N.routing.e_score_correction_bias [E], fp32.
Latent attention (LatentSpec; Q: query_rank) has, in place of qkv: layers.N.queries [Hq (rotated + plain), Q or H], in
most models behind query_in [Q, H] and query_norm; latent [rotated + rank, H] and latent_norm; heads
[Hq (plain + value), rank], of each head what makes its keys, then its values. Its out is [H, Hq value].
Inputs of each layer (LayerInputs): layer_embed [V, L P], layer_inputs [L P, H], layers.N.input_gate [P, H] and
layers.N.input_out [H, P]; L: layers, P: their width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from headrace.config import AttentionSpec, RecurrentSpec, RoutingSpec
from headrace.config.routing import SOFTMAX
from headrace.models.layer_parts import HyperSpec, LatentSpec, LayerInputs, Multipliers
from headrace.models.quantised import Scheme

CheckpointDType = Literal["float32", "bfloat16", "float16"]
Norm = Literal["rms", "layer"]
Block = Literal["pre", "post", "parallel", "sandwich", "after"]
"""pre: x + f(norm(x)), attention then MLP. post: norm(x + f(x)). parallel: x + attention(norm(x)) + mlp(norm(x)).
sandwich: x + norm(f(norm(x))), each norm with weights of its own. after: x + norm(f(x)), attention then MLP."""
NORMED_BEHIND: tuple[Block, ...] = ("sandwich", "after")
"""Those that norm what is added to the residual stream."""
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", "swiglu_oai", "swiglu_clamped"]
"""relu2: the square of relu. xielu: of two numbers of each layer, see kernels.ops.xielu. swiglu_oai and
swiglu_clamped, of gated MLPs alone, take both halves: see kernels.gates."""
Positions = Literal["rope", "learned", "alibi"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
LENGTH_DEPENDENT: tuple[RopeKind, ...] = ("dynamic", "longrope")
"""Kinds that rotate a token by the length of its sequence too."""

CLASSIFIER = "score.weight"
"""[labels, E]."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions. `parameters` are transformers' rope_parameters (theta, factor, ...), sorted by name.

    `original_length` is the length up to which the rotation is not stretched: the configuration's
    max_position_embeddings, and for longrope original_max_position_embeddings.

    query_beta: rotated queries are multiplied by 1 + query_beta * ln(1 + floor(position / the original length of the
    `parameters`)), as Llama 4 tempers attention over long contexts; 0: by 1. factor_alone: the factor is for more than
    what is rotated (latent attention), and a column of the table by itself.
    query_ahead: is added to the position in it.
    """

    kind: RopeKind
    parameters: tuple[tuple[str, Any], ...]
    original_length: int
    query_beta: float = 0.0
    factor_alone: bool = False
    query_ahead: int = 0

    def width(self, head_dim: int) -> int:
        """How many elements of a head are rotated, the first ones. proportional: all, the slow ones by nothing."""
        if self.kind == "proportional":
            return head_dim
        return int(head_dim * dict(self.parameters).get("partial_rotary_factor", 1.0))

    def columns(self, head_dim: int) -> int:
        """Elements of its rows in models.rope's table: (cos, sin), and once more for queries where theirs differ, or
        the factor of queries."""
        if self.factor_alone:
            return self.width(head_dim) + 1
        return self.width(head_dim) * (2 if self.query_beta else 1)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Matrices that a checkpoint holds quantised. bytes: of its weights in memory; formats: their names, the most used
    first; scheme: how the tensors of safetensors lie; table: of the bytes those of the table of tokens, where it is
    codes, else 0."""

    bytes: int
    formats: tuple[str, ...]
    scheme: Scheme | None = None
    table: int = 0


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts in place of a layer's MLP: `count` MLPs of the width `inner`, of which a row meets `chosen`.

    The router's scores are taken over all experts, in fp32; then the greatest are chosen, the first of equal ones, as
    far as `routing` says nothing else. normalised: their shares are divided by their sum. layers: which layers have
    experts; the others have a dense MLP.
    shared: width of an MLP that every row meets beside them; 0: none. shared_gate: what that makes is multiplied by the
    sigmoid of its gate. beside: every row meets the layer's dense MLP too; what either makes is normed and added, the
    router's input is normed and scaled, and shares are multiplied by a scale of each expert. activation: theirs, where
    it is not the model's; shared and dense MLPs have that one.
    """

    count: int
    chosen: int
    inner: int
    normalised: bool
    layers: tuple[bool, ...]
    shared: int = 0
    shared_gate: bool = True
    beside: bool = False
    routing: RoutingSpec = SOFTMAX
    activation: Activation | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The facts of one model. Sizes in elements; `embed_size` is the width of the embedding and of the head.

    norm_affine, norm_bias: whether norms have weights, and LayerNorms biases. qk_norm_affine: whether those of queries
    and keys have. qk_norm_local: layers with a window alone norm theirs. out_norm_eps: of norms behind attention and
    MLP, where theirs is not norm_eps. embed_norm: embeddings are normed, without weights. final_offset: norm_offset of
    the last norm, where that differs.
    mlp_bias: of MLPs, and where a layer has experts of each of them and of the router.
    qk_norm: queries and keys are normed, head by head, or with qk_norm_whole all heads of a row together.
    turn_before_norm: they are rotated first.
    local_rope: the rotation in layers with a window, where theirs is another one than `rope`. no_rope_layers: layers
    without rotation. norm_offset: is added to the weights of RMS norms. embed_scale multiplies embeddings,
    residual_scale what attention and MLP add to the residual stream, logit_scale the logits, which are then capped:
    logit_cap * tanh(logit / logit_cap). head: whether there are logits; a checkpoint made for embeddings may have none.
    head_bias: whether it has biases. labels: names of a classifier's outputs, of a checkpoint that has one in place of
    the head.

    attention_gate: the attended heads are multiplied by the sigmoid of gates, which are projected beside q, k and v;
    gate_of_heads: of one gate a head, whose row stands in the matrix once for each number of the head. gate_apart: in
    files gates are a matrix of their own, behind those of q, k and v.
    recurrent: of the layers that have a gated delta net, a Mamba-2 layer or a short convolution in place of attention,
    which `recurrent_layers` numbers; `attention.layers` counts the others alone. side_by_side: all layers have both,
    and add up what they make of the same rows. multipliers: of these; multiplied: the file's matrices are so already.
    tiled_values: the columns of a net's `out` go through all key heads for their first value heads, then for their
    second ones, where rows of other matrices end one key head first. conv_bias: the convolutions of Mamba-2 layers have
    biases.

    without_mlp: layers that attention, or what stands in its place, makes up alone. apart: in files MLPs are layers of
    their own, each behind the one that it belongs to.

    positions_from: the row of a table of learned positions that is the first one's.

    value_norm: values are normed, without weights. keys_as_values: in layers without a window values are the keys
    before their norm. shared_inner: MLP width of layers without keys and values of their own (AttentionSpec.shared); 0:
    as of the others. layer_scale: what leaves a layer is multiplied by a number of its own.

    latent: attention is latent attention. `attention` is then what it becomes where nothing is multiplied out: one KV
    head of rotated + rank numbers, of which keys and values are the same (models.latent).

    text_type: of models with other parts, the model_type of the text part that is computed, which names the family.
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
    norm_bias: bool = True
    mlp_norm: bool = True
    final_norm: bool = True
    qk_norm: bool = False
    qk_norm_whole: bool = False
    qk_norm_affine: bool = True
    qk_norm_local: bool = False
    out_norm_eps: float | None = None
    embed_norm: bool = False
    final_offset: float | None = None
    turn_before_norm: bool = False
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
    head_bias: bool = False
    labels: tuple[str, ...] = ()
    attention_gate: bool = False
    gate_of_heads: bool = False
    gate_apart: bool = False
    recurrent: RecurrentSpec | None = None
    recurrent_layers: tuple[int, ...] = ()
    side_by_side: bool = False
    multipliers: Multipliers | None = None
    multiplied: bool = False
    tiled_values: bool = False
    conv_bias: bool = False
    without_mlp: tuple[int, ...] = ()
    apart: bool = False
    value_norm: bool = False
    keys_as_values: bool = False
    positions_from: int = 0
    shared_inner: int = 0
    layer_scale: bool = False
    layer_inputs: LayerInputs | None = None
    latent: LatentSpec | None = None
    hyper: HyperSpec | None = None
    text_type: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    stored: StoredWeights | None = None

    @property
    def eps_behind(self) -> float:
        """Of norms behind attention and MLP."""
        return self.norm_eps if self.out_norm_eps is None else self.out_norm_eps

    @property
    def stream_size(self) -> int:
        """Numbers of a row that pass from layer to layer."""
        return self.hidden_size * (1 if self.hyper is None else self.hyper.streams)

    @property
    def expert_activation(self) -> Activation:
        """Of experts, of which every row meets some."""
        own = None if self.experts is None else self.experts.activation
        return self.activation if own is None else own

    @property
    def last_offset(self) -> float:
        """What is added to the weights of the last norm."""
        return self.norm_offset if self.final_offset is None else self.final_offset

    def experts_of(self, layer: int) -> ExpertsSpec | None:
        """The experts of a layer; None: it has a dense MLP."""
        return self.experts if self.experts is not None and self.experts.layers[layer] else None

    @property
    def has_dense_mlp(self) -> bool:
        """Whether any layer has."""
        return any(self._has_dense_mlp(layer) for layer in range(self.layers))

    def _has_dense_mlp(self, layer: int) -> bool:
        spec = self.experts_of(layer)
        return (spec is None or spec.beside) and layer not in self.without_mlp

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
    def attended_width(self) -> int:
        """Numbers of a head once it has attended: what `out` takes of it, where layers are alike."""
        return self.attention.own_dim if self.latent is None else self.latent.value

    @property
    def mlp_width(self) -> int:
        """Columns of MLPs that a row meets in a layer: those of its experts, the mean over layers that differ."""
        if self.experts is None or self.experts.beside:
            met = 0 if self.experts is None else self.experts.chosen * self.experts.inner
            return met + sum(map(self.inner, filter(self._has_dense_mlp, range(self.layers)))) // self.layers
        sparse, met = sum(self.experts.layers), self.experts.chosen * self.experts.inner + self.experts.shared
        dense = sum(map(self._has_dense_mlp, range(self.layers)))
        return (sparse * met + dense * self.intermediate_size) // self.layers

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

        (0, 0) for a layer that rotates nothing. Rows hold (cos, sin) of `rope`, then those of queries where they
        differ, then of `local_rope`.
        """
        attends = self.side_by_side or layer not in self.recurrent_layers
        if self.rope is None or layer in self.no_rope_layers or not attends:
            return 0, 0
        dim, local_dim = self.rotated_heads
        width = self.rope.width(dim)
        if self.local_rope is None or self.attention.windows[self.place(layer)] is None:
            return 0, width
        return self.rope.columns(dim), self.local_rope.width(local_dim)

    def query_first(self, layer: int) -> int:
        """Where the rotation of the layer's queries begins, which is as wide as `rotation`."""
        first, width = self.rotation(layer)
        scaled = self.rope is not None and self.rope.query_beta and not self.rope.factor_alone
        return first + width if first == 0 and scaled else first

    def turned_apart(self, layer: int) -> bool:
        """Whether queries and keys of a layer are normed and rotated otherwise than kernels.records.QKRotary says."""
        differ = self.query_first(layer) != self.rotation(layer)[0]
        return self.qk_norm_whole or self.turn_before_norm or differ

    @property
    def rotated_heads(self) -> tuple[int, int]:
        """Head sizes that `rope` and `local_rope` turn."""
        spec = self.attention
        if self.latent is not None:
            return self.latent.rotated, self.latent.rotated
        windowed = {spec.windows[layer] is not None: dim for layer, (_, dim) in enumerate(spec.shapes)}
        return windowed.get(False, spec.own_dim), windowed.get(True, spec.own_dim)

    def first(self, layers: int) -> ModelConfig:
        """The model of the first layers alone."""
        recurrent = tuple(layer for layer in self.recurrent_layers if layer < layers)
        attending, experts = layers - (0 if self.side_by_side else len(recurrent)), self.experts
        return replace(
            self,
            layers=layers,
            attention=self.attention.first(attending),
            recurrent=self.recurrent and replace(self.recurrent, layers=len(recurrent)),
            recurrent_layers=recurrent,
            experts=experts and replace(experts, layers=experts.layers[:layers]),
            without_mlp=tuple(layer for layer in self.without_mlp if layer < layers),
        )

    @property
    def blocks(self) -> int:
        """Layers as the files count them."""
        return self.layers + self.apart * (self.layers - len(self.without_mlp))

    def block_of(self, layer: int) -> int:
        """The number that a layer has in the files, where MLPs are `apart`; its MLP has the next one."""
        return 2 * layer - sum(each < layer for each in self.without_mlp) if self.apart else layer

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
        return self.side_by_side or self.layers - 1 not in self.recurrent_layers

    def place(self, layer: int) -> int:
        """Number of a layer among those of its kind, with attention or recurrent."""
        if self.side_by_side:
            return layer
        before = sum(each < layer for each in self.recurrent_layers)
        return before if layer in self.recurrent_layers else layer - before
