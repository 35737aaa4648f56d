"""Muse Glimmer, of which the text part is computed: Gemma 2's sandwich of norms, gates, attended heads behind gates.

Queries and keys are normed without weights, and so are embeddings. Norms behind attention and MLP have an epsilon of
their own, and the last norm multiplies by its weight, not by 1 + weight. Layers without a window rotate nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.models.families.base import (
    GATED_ACTIVATIONS,
    Family,
    Names,
    activation,
    attention,
    head_dim_of,
    rope,
    rope_reach,
)
from headrace.models.families.gemma import sandwich_names
from headrace.models.families.llama import mixed_windows
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel


def _facts(config: Any) -> dict[str, Any]:
    for name in ("attention_bias", "tie_word_embeddings"):
        if getattr(config, name):
            raise UnsupportedModel(f"{name} true is not supported; only false is")
    turned, windows, kv_heads = rope(config), mixed_windows(config), config.num_key_value_heads
    spec = attention(config, kv_heads=kv_heads, head_dim=head_dim_of(config), windows=windows)
    return dict(
        intermediate_size=config.intermediate_size,
        embed_size=config.hidden_size,
        max_model_len=rope_reach(config, turned),
        attention=replace(spec, scale=spec.scale * config.qk_scale_factor),
        positions="rope",
        rope=turned,
        no_rope_layers=_unturned(config),
        norm="rms",
        norm_eps=config.rms_norm_eps,
        out_norm_eps=config.post_norm_eps,
        norm_offset=1.0,
        final_offset=0.0,
        embed_norm=True,
        qk_norm=True,
        qk_norm_affine=False,
        attention_gate=True,
        gate_apart=True,
        activation=activation("hidden_activation", config.hidden_activation, GATED_ACTIVATIONS),
        gated=True,
        block="sandwich",
        logit_scale=config.output_multiplier,
        logit_cap=config.final_logit_softcapping,
    )


def _unturned(config: Any) -> tuple[int, ...]:
    """Layers that rotate nothing: those of base 0. The others have the base of rope_parameters, as in transformers."""
    bases, own = config.layer_rope_theta, config.rope_parameters["rope_theta"]
    if len(bases) != config.num_hidden_layers:
        told = f"{len(bases)} layers, num_hidden_layers is {config.num_hidden_layers}"
        raise UnsupportedModel(f"layer_rope_theta names {told}")
    for base in bases:
        if base not in (0, own):
            raise UnsupportedModel(f"layer_rope_theta with {base} is not supported; 0 and rope_theta {own} are")
    return tuple(layer for layer, base in enumerate(bases) if not base)


def _names(config: ModelConfig) -> Names:
    parts = (f"layers.{{}}.self_attn.{part}_proj" for part in ("q", "k", "v", "gate"))
    return {**sandwich_names(config), "layers.{}.qkv": tuple(parts)}


MUSE_GLIMMER = Family(
    "muse_glimmer", "transformers.models.muse_glimmer.configuration_muse_glimmer:MuseGlimmerTextConfig", _facts, _names,
    ("model.language_model.",), text_type="muse_glimmer_text",
    unread=("model.vision_tower.", "model.vision_adapter.", "model.vision_projection."),
)  # fmt: skip
"""Images are refused."""
