"""LFM2 (Liquid): short convolutions between two gates in most layers, attention in the others.

Queries and keys are normed. LFM2-8B-A1B has experts behind its first layers, chosen by sigmoids and corrections.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.config import AttentionSpec, RecurrentSpec, RoutingSpec
from headrace.config.routing import CORRECTION
from headrace.models.families.base import Family, Names, attention, head_dim_of, rope, rope_reach
from headrace.models.families.experts import expert_names, mixture
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel

KINDS = ("conv", "full_attention")


def _facts(config: Any, inner: int) -> dict[str, Any]:
    if config.conv_bias:
        raise UnsupportedModel("conv_bias true is not supported; only false is")
    if config.conv_L_cache < 2:
        raise UnsupportedModel(f"conv_L_cache {config.conv_L_cache} is not supported; 2 or more is")
    convolutions = _convolutions(config)
    spec, full = rope(config), config.num_hidden_layers - len(convolutions)
    found = attention(config, kv_heads=config.num_key_value_heads, head_dim=head_dim_of(config))
    return dict(
        intermediate_size=inner,
        embed_size=config.hidden_size,
        max_model_len=rope_reach(config, spec),
        attention=AttentionSpec(full, found.heads, found.kv_heads, found.head_dim, found.scale, (None,) * full),
        recurrent=RecurrentSpec.short_convolutions(len(convolutions), config.hidden_size, config.conv_L_cache),
        recurrent_layers=convolutions,
        positions="rope",
        rope=spec,
        norm="rms",
        norm_eps=config.norm_eps,
        qk_norm=True,
        activation="silu",
        gated=True,
    )


def _convolutions(config: Any) -> tuple[int, ...]:
    """The layers that convolve."""
    if config.layer_types is None:
        raise UnsupportedModel("layer_types is missing")
    for kind in config.layer_types:
        if kind not in KINDS:
            raise UnsupportedModel(f"layer_types with {kind!r} is not supported; supported: {', '.join(KINDS)}")
    found = tuple(layer for layer, kind in enumerate(config.layer_types) if kind == KINDS[0])
    if len(found) in (0, config.num_hidden_layers):
        raise UnsupportedModel(f"layer_types without {KINDS[bool(found)]!r} are not supported")
    return found


def _lfm2(config: Any) -> dict[str, Any]:
    return _facts(config, _adjusted(config) if config.block_auto_adjust_ff_dim else config.intermediate_size)


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
    return _facts(config, config.intermediate_size) | experts


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


PREFIXES = ("model.", "")
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
