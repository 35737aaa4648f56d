"""The tensors that a decoder is made of, by name: their shapes follow from the model's facts (models.spec) alone.

Names and letters are those at the head of models.spec.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.config.routing import CORRECTION
from headrace.models.layer_parts import LatentSpec, LayerInputs
from headrace.models.spec import CLASSIFIER, NORMED_BEHIND, ModelConfig

OF_HEADS = re.compile(r"layers\.\d+\.(heads|(keys|values)\.\d+)\.weight$")


@dataclass(frozen=True, slots=True)
class Slot:
    """Shape that one of our tensors must have: the row counts of its parts, and the columns (None for a vector).

    filter: a convolution's, [rows, 1, columns]. wide: kept in fp32, whatever is computed in. of: rows of the
    checkpoint's tensor, where this is some of them alone and others are another tensor of ours; 0: all. told: rows of
    each of the checkpoint's tensors, where ours has some of them several times; else `parts`.
    """

    parts: tuple[int, ...]
    columns: int | None = None
    filter: bool = False
    wide: bool = False
    of: int = 0
    told: tuple[int, ...] = ()

    def rows_of(self, sources: int) -> tuple[int, ...]:
        """Rows of the checkpoint's tensors, of which there are so many."""
        return (self.told or self.parts) if sources > 1 else (self.of or sum(self.parts),)

    def shape(self, rows: int) -> tuple[int, ...]:
        if self.columns is None:
            return (rows,)
        return (rows, 1, self.columns) if self.filter else (rows, self.columns)

    @property
    def count(self) -> int:
        """Numbers in the tensor."""
        return sum(self.told or self.parts) * (self.columns or 1)


def expected(config: ModelConfig) -> dict[str, Slot]:
    """Our tensors and their shapes, from the model's facts alone."""
    hidden, embed = config.hidden_size, config.embed_size
    slots = {"embed.weight": Slot((config.vocab_size,), embed)}
    if config.positions == "learned":
        slots["positions.weight"] = Slot((config.max_model_len + config.positions_from,), hidden)
    if embed != hidden:
        slots |= _linear("project_in", (hidden,), embed, False) | _linear("project_out", (embed,), hidden, False)
    if config.layer_inputs is not None:
        slots |= _layer_inputs(config, config.layer_inputs)
    for index in range(config.layers):
        slots |= _norm(config, f"layers.{index}.attention_norm") if config.block != "after" else {}
        slots |= _mixer(config, index)
        slots |= _mlp(config, index)
        if config.hyper is not None:
            for half in ("attention", "mlp"):
                slots |= _streams(f"layers.{index}.{half}_streams", config.stream_size, config.hyper.outputs)
        if config.activation == "xielu":
            slots |= {f"layers.{index}.activation.alpha_{each}": Slot((1,), wide=True) for each in "pn"}
        if config.layer_inputs is not None:
            slots |= _gated_inputs(config, f"layers.{index}.", config.layer_inputs.width)
        if config.layer_scale:
            slots[f"layers.{index}.whole.layer_scalar"] = Slot((1,))
    if config.hyper is not None and config.hyper.learned_end:
        slots |= _streams("streams", config.stream_size, (config.hyper.streams,))
    if config.final_norm:
        slots |= _norm(config, "final_norm")
    if config.labels:
        slots |= _linear("score", (len(config.labels),), embed, False)
    return slots | _linear("head", (config.vocab_size,), embed, config.head_bias) if config.head else slots


def _streams(name: str, size: int, parts: tuple[int, ...]) -> dict[str, Slot]:
    """What streams of so many numbers together are read by, and added to. parts: streams, once for each."""
    vectors = {f"{name}.base": Slot(parts, wide=True), f"{name}.scale": Slot((1,) * len(parts), wide=True)}
    return {f"{name}.fn": Slot(parts, size, wide=True), **vectors}


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


def _mixer(config: ModelConfig, layer: int) -> dict[str, Slot]:
    """What mixes the rows of a layer."""
    if config.side_by_side:
        return _attention_layer(config, layer) | _recurrent_layer(config, layer, "recurrent_out")
    if layer in config.recurrent_layers:
        return _recurrent_layer(config, layer)
    if config.latent is not None:
        return _latent_layer(config, config.latent, f"layers.{layer}.") | _indexer(config, layer)
    return _attention_layer(config, layer) | _indexer(config, layer)


def _latent_layer(config: ModelConfig, spec: LatentSpec, prefix: str) -> dict[str, Slot]:
    heads, hidden, width = config.attention.heads, config.hidden_size, spec.query_rank
    slots = _linear(prefix + "queries", (heads * spec.query,), width or hidden, False)
    if width is not None:
        slots |= _linear(prefix + "query_in", (width,), hidden, config.qkv_bias)
        slots[prefix + "query_norm.weight"] = Slot((width,))
    slots |= _linear(prefix + "latent", (spec.rotated + spec.rank,), hidden, config.qkv_bias)
    slots[prefix + "latent_norm.weight"] = Slot((spec.rank,))
    slots |= _linear(prefix + "heads", (heads * (spec.plain + spec.value),), spec.rank, False)
    if config.attention_gate:
        slots |= _linear(prefix + "attention_gates", (heads * spec.value,), hidden, False)
    if config.attention.sinks:
        slots[prefix + "attention.sinks"] = Slot((heads,))
    return slots | _linear(prefix + "out", (hidden,), heads * spec.value, config.out_bias)


def _indexer(config: ModelConfig, layer: int) -> dict[str, Slot]:
    spec, prefix = config.attention.index, f"layers.{layer}.index_"
    if spec is None or not spec.own[config.place(layer)]:
        return {}
    hidden = config.hidden_size
    narrow = hidden if config.latent is None else config.latent.query_rank
    assert narrow is not None, "an indexer has the queries' way"
    slots = _linear(prefix + "queries", (spec.heads * spec.size,), narrow, False)
    slots |= _linear(prefix + "keys", (spec.size,) * (spec.stored // spec.size), hidden, False)
    if spec.pool > 1:
        slots[f"layers.{layer}.index.places"] = Slot((spec.pool,), spec.size, wide=True)
    if spec.block > 1:
        return slots | {prefix + f"{part}_norm.weight": Slot((spec.size,)) for part in "qk"}
    slots |= _linear(prefix + "weights", (spec.heads,), hidden, False)
    return slots | {prefix + f"norm.{kind}": Slot((spec.size,)) for kind in ("weight", "bias")}


def _attention_layer(config: ModelConfig, layer: int) -> dict[str, Slot]:
    prefix, hidden, spec = f"layers.{layer}.", config.hidden_size, config.attention
    dim = spec.shape(layer)[1] - spec.index_width if config.recurrent is None else spec.head_dim
    q, *kv = (heads * dim for heads in config.projected_heads(layer))
    parts = (q, *kv, q) if config.gate_apart else (q * (1 + config.attention_gate), *kv)
    slots = _linear(prefix + "qkv", parts, hidden, config.qkv_bias)
    if config.gate_of_heads:
        slots[prefix + "qkv.weight"] = Slot((q, *kv, q), hidden, told=(q, *kv, spec.heads))
    if config.qk_norm and config.qk_norm_affine:
        names = ("q_norm", "k_norm") if kv else ("q_norm",)
        widths = (q, *kv[:1]) if config.qk_norm_whole else (dim,) * len(names)
        slots |= {prefix + f"{name}.weight": Slot((n,)) for name, n in zip(names, widths, strict=True)}
    if spec.sinks:
        slots[prefix + "attention.sinks"] = Slot((spec.heads,))
    return slots | _linear(prefix + "out", (hidden,), q, config.out_bias)


def _recurrent_layer(config: ModelConfig, layer: int, out: str = "out") -> dict[str, Slot]:
    prefix, spec, hidden = f"layers.{layer}.", config.recurrent, config.hidden_size
    assert spec is not None, "there are recurrent layers"
    together = sum(spec.mixed) + spec.gate_rows if spec.kind == "mamba2" else 0
    slots = {
        prefix + "mixed.weight": Slot(spec.mixed, hidden, of=together),
        prefix + "conv.weight": Slot(spec.channel_parts, spec.kernel, filter=True, wide=True),
        f"{prefix}{out}.weight": Slot((hidden,), spec.values),
    }
    if spec.kind == "conv":
        return slots
    for name in ("A_log", "dt_bias", *(("D",) if spec.kind == "mamba2" else ())):
        slots[prefix + f"delta.{name}"] = Slot((spec.value_heads,), wide=True)
    if spec.kind == "kda":
        slots[prefix + "delta.dt_bias"] = Slot((spec.keys,), wide=True)
        slots |= _linear(prefix + "decays", (spec.keys,), spec.key_dim, False)
        slots |= _linear(prefix + "out_gates", (spec.values,), spec.key_dim, False)
    if spec.kind == "mamba2" and config.conv_bias:
        slots[prefix + "conv.bias"] = Slot((spec.channels,), wide=True)
    if spec.normed:
        normed = spec.values if spec.kind == "mamba2" else spec.value_dim
        slots[prefix + "delta_norm.weight"] = Slot((normed,), wide=True)
    gates = (spec.value_heads,) * (spec.gate_rows // spec.value_heads)
    return slots | {prefix + "gates.weight": Slot(gates, hidden, of=together)}


def _mlp(config: ModelConfig, layer: int) -> dict[str, Slot]:
    prefix, spec = f"layers.{layer}.", config.experts_of(layer)
    if layer in config.without_mlp:
        return {}
    slots = _norm(config, prefix + "mlp_norm") if config.mlp_norm and config.block != "after" else {}
    if config.block in NORMED_BEHIND:
        slots |= _norm(config, prefix + "attention_out_norm") | _norm(config, prefix + "mlp_out_norm")
    if spec is None or spec.beside:
        slots |= _up_and_down(config, prefix, config.inner(layer))
    if spec is None:
        return slots
    slots |= _linear(prefix + "router", (spec.count,), config.hidden_size, config.mlp_bias)
    for expert in range(spec.count):
        slots |= _up_and_down(config, expert_prefix(layer, expert), spec.inner)
    if spec.routing.corrected:
        slots[prefix + CORRECTION] = Slot((spec.count,), wide=True)
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
    much a state forgets, what an indexer's heads count, a text's class, or what heads make of latents. They are small,
    and what they decide lasts."""
    exact = (".router.weight", ".shared_gate.weight", ".gates.weight", ".decays.weight", ".index_weights.weight")
    return name == CLASSIFIER or name.endswith(exact) or is_of_heads(name)


def is_of_heads(name: str) -> bool:
    """Whether a matrix of ours is what latent attention multiplies each head by, all heads together or one by one. It
    is used transposed too, so it is multiplied out where a file has it as codes."""
    return OF_HEADS.match(name) is not None


def is_mixing(name: str) -> bool:
    """Whether a weight of ours is a matrix by its shape alone, which rows are not multiplied by as by others: what
    hyper-connections read streams by, and what places count in an indexer's pool."""
    return name.endswith(("streams.fn", ".index.places"))


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
    kinds = ("weight", "bias") if config.norm == "layer" and config.norm_bias else ("weight",)
    return {f"{name}.{kind}": Slot((config.hidden_size,)) for kind in kinds}
