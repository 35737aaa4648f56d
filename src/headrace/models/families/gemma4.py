"""Gemma 4, text: local and global layers whose heads differ, keys that are values, layers without keys of their own,
inputs of each layer, experts beside a dense MLP, and a scale of what leaves a layer. Its unified models (12B: images
and sound without towers) have neither inputs of each layer nor experts.

Norms multiply by their weights as they are, values are normed too, and scores are not scaled. Global layers rotate the
first part of each half of a head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.config import AttentionSpec
from headrace.models.families.base import (
    LAYER_TYPES,
    Family,
    Names,
    activation,
    attention,
    rope,
    rope_parameters_of,
    rope_reach,
)
from headrace.models.families.experts import expert_names, mixture
from headrace.models.families.llama import PREFIXES, mixed_windows, names
from headrace.models.layer_parts import LayerInputs
from headrace.models.spec import ModelConfig, RopeSpec
from headrace.types import UnsupportedModel

HEAD_UNIT = 16
"""Head sizes are multiples of this, so that the pools of all layers have one layout (Backend.layout)."""


def _facts(config: Any) -> dict[str, Any]:
    if config.use_bidirectional_attention not in (None, False, "vision"):
        asked = config.use_bidirectional_attention
        raise UnsupportedModel(f"use_bidirectional_attention {asked!r} is not supported; only causal attention is")
    spec = _attention(config)
    turned = _rotation(config, LAYER_TYPES[0])  # the last layer has no window in any model
    local = _rotation(config, LAYER_TYPES[1]) if LAYER_TYPES[1] in config.layer_types else None
    width = getattr(config, "hidden_size_per_layer_input", 0)
    return dict(
        intermediate_size=config.intermediate_size,
        embed_size=config.hidden_size,
        max_model_len=rope_reach(config, turned),
        attention=spec,
        positions="rope",
        rope=turned,
        local_rope=local,
        norm="rms",
        norm_eps=config.rms_norm_eps,
        qk_norm=True,
        value_norm=True,
        keys_as_values=config.attention_k_eq_v,
        activation=activation("hidden_activation", config.hidden_activation, {"gelu_pytorch_tanh": "gelu_tanh"}),
        gated=True,
        block="sandwich",
        embed_scale=config.hidden_size**0.5,
        logit_cap=config.final_logit_softcapping,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        shared_inner=2 * config.intermediate_size if config.use_double_wide_mlp else 0,
        layer_scale=True,
        layer_inputs=LayerInputs(width, config.vocab_size_per_layer_input) if width else None,
        **_experts(config),
    )


def _attention(config: Any) -> AttentionSpec:
    shapes = tuple(
        (own.num_key_value_heads, own.head_dim) for own in map(config.per_layer_config.__getitem__, _layers(config))
    )
    windows = mixed_windows(config)
    for kind in LAYER_TYPES:
        found = {shape for shape, each in zip(shapes, config.layer_types, strict=True) if each == kind}
        if len(found) > 1:
            raise UnsupportedModel(f"layers of type {kind} with different heads are not supported: {sorted(found)}")
    for kv_heads, dim in shapes:
        attention(config, kv_heads=kv_heads, head_dim=dim)  # refuses what does not divide
        if dim % HEAD_UNIT:
            raise UnsupportedModel(f"head_dim {dim} is not supported; multiples of {HEAD_UNIT} are")
    kv_heads, dim = max(shapes, key=shapes.count)
    spec = attention(config, kv_heads=kv_heads, head_dim=dim, windows=windows)
    return replace(spec, scale=1.0, shapes=shapes if len(set(shapes)) > 1 else (), shared=_shared(config))


def _layers(config: Any) -> range:
    return range(config.num_hidden_layers)


def _shared(config: Any) -> tuple[int, ...]:
    """For each of the last layers the last one of its type that has keys and values of its own."""
    first = config.num_hidden_layers - config.num_kv_shared_layers
    own = {kind: layer for layer, kind in enumerate(config.layer_types[: max(0, first)])}
    sharing = config.layer_types[max(0, first) :]
    if first < 1 or not own.keys() >= set(sharing):
        raise UnsupportedModel(
            f"num_kv_shared_layers {config.num_kv_shared_layers} leaves no layer of a type with keys of its own"
        )
    return tuple(own[kind] for kind in sharing)


def _rotation(config: Any, kind: str) -> RopeSpec:
    parameters = rope_parameters_of(config, kind)
    dims = [config.per_layer_config[layer].head_dim for layer in _layers(config) if config.layer_types[layer] == kind]
    partial = parameters.get("rope_type") == "proportional"
    return rope(config, partial, parameters, head_dim=dims[0])


def _experts(config: Any) -> dict[str, Any]:
    if not getattr(config, "enable_moe_block", False):
        return {}
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if not getattr(config, name):
            raise UnsupportedModel(f"{name} is missing, but enable_moe_block asks for experts")
    layers = (True,) * config.num_hidden_layers
    count, inner, chosen = config.num_experts, config.moe_intermediate_size, config.top_k_experts
    found = mixture(config, count, inner, True, layers, chosen=chosen)
    return dict(experts=replace(found["experts"], beside=True))


def _names(config: ModelConfig) -> Names:
    layer = "layers.{}."
    theirs = {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
        "dense_out_norm": "post_feedforward_layernorm_1",
        "experts_norm": "pre_feedforward_layernorm_2",
        "experts_out_norm": "post_feedforward_layernorm_2",
        "routing": "router",
        "input_gate": "per_layer_input_gate",
        "input_out": "per_layer_projection",
        "input_norm": "post_per_layer_input_norm",
    }
    parts = {
        f"layers.{index}.qkv": tuple(f"layers.{index}.self_attn.{part}_proj" for part in "qkv"[: len(heads)])
        for index, heads in enumerate(map(config.projected_heads, range(config.layers)))
    }
    return {
        **names(config),
        **{layer + ours: (layer + name,) for ours, name in theirs.items()},
        **parts,
        **expert_names("router.proj", ("experts.{}.gate_up_proj",), "experts.{}.down_proj"),
        "layers.{}.whole": ("layers.{}",),
        "layer_embed": ("embed_tokens_per_layer",),
        "layer_inputs": ("per_layer_model_projection",),
        "layer_inputs_norm": ("per_layer_projection_norm",),
    }


def _unused(config: ModelConfig) -> frozenset[str]:
    """Projections that published checkpoints have of layers whose keys and values are another layer's."""
    parts = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    sharing = range(config.attention.stored, config.layers)
    return frozenset(f"layers.{layer}.self_attn.{part}" for layer in sharing for part in parts)


CONFIGURATION = "transformers.models.gemma4.configuration_gemma4:Gemma4TextConfig"
LAYER_FIELDS = ("head_dim", "num_key_value_heads")
GEMMA4 = Family(
    "gemma4_text", CONFIGURATION, _facts, _names, PREFIXES, layer_fields=LAYER_FIELDS, unused=_unused
)  # fmt: skip
GEMMA4_MULTIMODAL = Family(
    "gemma4", CONFIGURATION, _facts, _names, ("model.language_model.",), layer_fields=LAYER_FIELDS, unused=_unused,
    text_type="gemma4_text",
    unread=("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
)  # fmt: skip
UNIFIED_CONFIGURATION = "transformers.models.gemma4_unified.configuration_gemma4_unified:Gemma4UnifiedTextConfig"
GEMMA4_UNIFIED = replace(GEMMA4, model_type="gemma4_unified_text", configuration=UNIFIED_CONFIGURATION)
GEMMA4_UNIFIED_MULTIMODAL = replace(
    GEMMA4_MULTIMODAL, model_type="gemma4_unified", configuration=UNIFIED_CONFIGURATION,
    text_type="gemma4_unified_text",
    unread=("model.vision_embedder.", "model.embed_vision.", "model.embed_audio."),
)  # fmt: skip
"""Of those with other parts the text is computed; images and sound are refused."""
