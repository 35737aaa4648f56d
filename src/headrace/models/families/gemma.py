"""Gemma 1 to 3, text: norms that multiply by 1 + weight, scaled embeddings; from 2 on sandwich norms, and windows in
most layers.

Gemma 2 caps scores and logits; Gemma 3 norms queries and keys, and rotates layers with a window by a base of their own.
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
    ropes_by_kind,
)
from headrace.models.families.llama import PREFIXES, common, mixed_windows, names, uniform_windows
from headrace.models.spec import ModelConfig, RopeSpec
from headrace.types import UnsupportedModel


def _refuse_both_ways(config: Any) -> None:
    if config.use_bidirectional_attention:
        raise UnsupportedModel("use_bidirectional_attention is not supported; only causal attention is")


def _gemma(config: Any) -> dict[str, Any]:
    _refuse_both_ways(config)
    bias = dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    facts = common(config, uniform_windows(config, None)) | bias
    return facts | dict(norm_offset=1.0, embed_scale=config.hidden_size**0.5)


def sandwiched(config: Any, turned: RopeSpec) -> dict[str, Any]:
    """What models with such norms on both sides of attention and MLP have in common."""
    windows, kv_heads = mixed_windows(config), config.num_key_value_heads
    spec = attention(config, kv_heads=kv_heads, head_dim=head_dim_of(config), windows=windows)
    return dict(
        intermediate_size=config.intermediate_size,
        embed_size=config.hidden_size,
        max_model_len=rope_reach(config, turned),
        attention=spec,
        positions="rope",
        rope=turned,
        norm="rms",
        norm_eps=config.rms_norm_eps,
        norm_offset=1.0,
        activation=activation("hidden_activation", config.hidden_activation, GATED_ACTIVATIONS),
        gated=True,
        block="sandwich",
        logit_cap=config.final_logit_softcapping,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )


def _common(config: Any, turned: RopeSpec) -> dict[str, Any]:
    _refuse_both_ways(config)
    facts = sandwiched(config, turned)
    spec = replace(facts["attention"], scale=config.query_pre_attn_scalar**-0.5)
    return facts | dict(attention=spec, embed_scale=config.hidden_size**0.5)


def _gemma2(config: Any) -> dict[str, Any]:
    facts = _common(config, rope(config))
    return facts | dict(attention=replace(facts["attention"], score_cap=config.attn_logit_softcapping))


def _gemma3(config: Any) -> dict[str, Any]:
    turned, local = ropes_by_kind(config)
    return _common(config, turned) | dict(local_rope=local, qk_norm=True)


def sandwich_names(config: ModelConfig) -> Names:
    """Names of a model with norms on both sides of attention and MLP."""
    layer = "layers.{}."
    theirs = {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }
    return {**names(config), **{layer + ours: (layer + name,) for ours, name in theirs.items()}}


GEMMA = Family("gemma", "transformers.models.gemma.configuration_gemma:GemmaConfig", _gemma, names, PREFIXES)
GEMMA2 = Family(
    "gemma2", "transformers.models.gemma2.configuration_gemma2:Gemma2Config", _gemma2, sandwich_names, PREFIXES
)
GEMMA3_CONFIGURATION = "transformers.models.gemma3.configuration_gemma3:Gemma3TextConfig"
GEMMA3 = Family("gemma3_text", GEMMA3_CONFIGURATION, _gemma3, sandwich_names, PREFIXES)
GEMMA3_WITH_VISION = Family(
    "gemma3",
    GEMMA3_CONFIGURATION,
    _gemma3,
    sandwich_names,
    ("model.language_model.", "language_model.model."),
    text_type="gemma3_text",
    unread=("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector."),
)
"""Of which the text part is computed, and images are refused."""
