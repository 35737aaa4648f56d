"""LFM2 and LFM3 (Liquid): short convolutions between two gates in most layers, attention in the others.

Queries and keys are normed. LFM2-8B-A1B has experts behind its first layers, chosen by sigmoids and corrections. LFM3
has windows in some layers, which are rotated by a base of their own, one gate for each attended head, and norms behind
what a layer makes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.config import AttentionSpec, RecurrentSpec, RoutingSpec
from headrace.config.routing import CORRECTION
from headrace.models.families.base import (
    LAYER_TYPES,
    Family,
    Names,
    attention,
    head_dim_of,
    rope,
    rope_parameters_of,
    rope_reach,
)
from headrace.models.families.experts import expert_names, mixture
from headrace.models.spec import ModelConfig, RopeSpec
from headrace.types import UnsupportedModel

KINDS = ("conv", "full_attention")
LFM3_KINDS = ("conv", *LAYER_TYPES)


def _facts(config: Any, inner: int, kinds: tuple[str, ...] = KINDS) -> dict[str, Any]:
    """What all have, and what LFM2's attention is."""
    convolutions = _convolutions(config, kinds)
    full = config.num_hidden_layers - len(convolutions)
    found = attention(config, kv_heads=config.num_key_value_heads, head_dim=head_dim_of(config))
    if config.conv_bias:
        raise UnsupportedModel("conv_bias true is not supported; only false is")
    if config.conv_L_cache < 2:
        raise UnsupportedModel(f"conv_L_cache {config.conv_L_cache} is not supported; 2 or more is")
    return dict(
        intermediate_size=inner,
        embed_size=config.hidden_size,
        attention=AttentionSpec(full, found.heads, found.kv_heads, found.head_dim, found.scale, (None,) * full),
        recurrent=RecurrentSpec.short_convolutions(len(convolutions), config.hidden_size, config.conv_L_cache),
        recurrent_layers=convolutions,
        positions="rope",
        norm="rms",
        norm_eps=config.norm_eps,
        qk_norm=True,
        activation="silu",
        gated=True,
    )


def _convolutions(config: Any, kinds: tuple[str, ...]) -> tuple[int, ...]:
    """The layers that convolve."""
    if config.layer_types is None:
        raise UnsupportedModel("layer_types is missing")
    for kind in config.layer_types:
        if kind not in kinds:
            raise UnsupportedModel(f"layer_types with {kind!r} is not supported; supported: {', '.join(kinds)}")
    found = tuple(layer for layer, kind in enumerate(config.layer_types) if kind == kinds[0])
    if len(found) in (0, config.num_hidden_layers):
        raise UnsupportedModel(f"layer_types without {kinds[bool(found)]!r} are not supported")
    return found


def _turned(config: Any, inner: int) -> dict[str, Any]:
    spec = rope(config)
    return _facts(config, inner) | dict(rope=spec, max_model_len=rope_reach(config, spec))


def _lfm2(config: Any) -> dict[str, Any]:
    return _turned(config, _adjusted(config) if config.block_auto_adjust_ff_dim else config.intermediate_size)


def _lfm3(config: Any) -> dict[str, Any]:
    facts = _facts(config, config.intermediate_size, LFM3_KINDS)
    kinds = [kind for kind in config.layer_types if kind != KINDS[0]]
    turned, local = (_rotation(config, kind) for kind in LAYER_TYPES)
    if LAYER_TYPES[1] in kinds and (config.sliding_window is None or config.sliding_window < 1):
        raise UnsupportedModel(f"sliding_window {config.sliding_window} is not supported; 1 or more is")
    windows = tuple(config.sliding_window if kind == LAYER_TYPES[1] else None for kind in kinds)
    return facts | dict(
        attention=replace(facts["attention"], windows=windows),
        max_model_len=rope_reach(config, turned),
        rope=turned,
        local_rope=local,
        attention_gate=config.use_attention_gate,
        gate_of_heads=config.use_attention_gate,
        block="sandwich" if config.use_sandwich_norm else "pre",
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )


def _rotation(config: Any, kind: str) -> RopeSpec:
    parameters = rope_parameters_of(config, kind)
    return rope(config, parameters.get("rope_type") == "proportional", parameters)


def _adjusted(config: Any) -> int:
    """The MLP's width where the file gives that of one without gates: two thirds of it, in whole blocks."""
    inner = int(config.block_ffn_dim_multiplier * int(2 * config.intermediate_size / 3))
    return -(-inner // config.block_multiple_of) * config.block_multiple_of


def _lfm2_moe(config: Any) -> dict[str, Any]:
    routing = RoutingSpec("sigmoid", corrected=config.use_expert_bias, scale=float(config.routed_scaling_factor))
    layers = tuple(layer >= config.num_dense_layers for layer in range(config.num_hidden_layers))
    experts = mixture(
        config, config.num_experts, config.moe_intermediate_size, config.norm_topk_prob, layers, routing=routing
    )
    return _turned(config, config.intermediate_size) | experts


def _names(config: ModelConfig) -> Names:
    layer = "layers.{}."
    named = {
        "embed": ("embed_tokens",),
        "final_norm": ("embedding_norm",),
        "layers.{}.attention_norm": (layer + "operator_norm",),
        "layers.{}.qkv": tuple(layer + f"self_attn.{part}_proj" for part in "qkv"),
        "layers.{}.q_norm": (layer + "self_attn.q_layernorm",),
        "layers.{}.k_norm": (layer + "self_attn.k_layernorm",),
        "layers.{}.out": (layer + "self_attn.out_proj",),
        "layers.{}.mixed": (layer + "conv.in_proj",),
        "layers.{}.conv": (layer + "conv.conv",),
        "layers.{}.mlp_norm": (layer + "ffn_norm",),
        "layers.{}.up": (layer + "feed_forward.w1", layer + "feed_forward.w3"),
        "layers.{}.down": (layer + "feed_forward.w2",),
    }
    return named | {f"layers.{i}.out": (f"layers.{i}.conv.out_proj",) for i in config.recurrent_layers}


_EXPERT = "feed_forward.experts.{}."
APART = expert_names("feed_forward.gate", (_EXPERT + "w1", _EXPERT + "w3"), _EXPERT + "w2")
TOGETHER = expert_names("feed_forward.gate", (_EXPERT + "gate_up_proj",), _EXPERT + "down_proj")
CORRECTIONS: Names = {f"layers.{{}}.{CORRECTION}": ("layers.{}.feed_forward.expert_bias",)}


def _names_apart(config: ModelConfig) -> Names:
    return {**_names(config), **APART, **CORRECTIONS}


def _names_together(config: ModelConfig) -> Names:
    return {**_names(config), **TOGETHER, **CORRECTIONS}


def _lfm3_names(config: ModelConfig, gate: str = "gate_proj") -> Names:
    layer, own = "layers.{}.", "layers.{}.self_attn."
    gates = (own + gate,) if config.attention_gate else ()
    theirs = {
        "layers.{}.qkv": (*(f"{own}{part}_proj" for part in "qkv"), *gates),
        "layers.{}.q_norm": (own + "q_norm",),
        "layers.{}.k_norm": (own + "k_norm",),
        "layers.{}.attention_out_norm": (layer + "post_operator_norm",),
        "layers.{}.mlp_out_norm": (layer + "post_ffn_norm",),
    }
    return {**_names(config), **theirs, "layers.{}.out": (own + "o_proj",)}


def _lfm3_names_in_memory(config: ModelConfig) -> Names:
    return _lfm3_names(config, "g_proj")


def _lfm3_rows(config: ModelConfig, name: str) -> list[int] | None:
    """Of queries, keys and values as they are; of the gates each as often as a head has numbers."""
    if ".qkv." not in name or not config.gate_of_heads:
        return None
    spec = config.attention
    first = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    return [*range(first), *(first + head for head in range(spec.heads) for _ in range(spec.head_dim))]


PREFIXES = ("model.", "")
LFM3 = Family(
    "lfm3", "transformers.models.lfm3.configuration_lfm3:Lfm3Config", _lfm3, _lfm3_names, PREFIXES, rows=_lfm3_rows,
    other_names=_lfm3_names_in_memory,
)  # fmt: skip
LFM2 = Family("lfm2", "transformers.models.lfm2.configuration_lfm2:Lfm2Config", _lfm2, _names, PREFIXES)
LFM2_MOE = Family(
    "lfm2_moe", "transformers.models.lfm2_moe.configuration_lfm2_moe:Lfm2MoeConfig", _lfm2_moe, _names_apart, PREFIXES,
    other_names=_names_together,
)  # fmt: skip
LFM2_WITH_VISION = replace(
    LFM2, model_type="lfm2_vl", text_type="lfm2", prefixes=("model.language_model.",),
    unread=("model.vision_tower.", "model.multi_modal_projector."),
)  # fmt: skip
"""Of which the text part is computed, and images are refused."""
