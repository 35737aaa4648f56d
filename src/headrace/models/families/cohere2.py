"""Command R7B, A and Aya (Cohere2): parallel blocks of one LayerNorm without biases, windows in three of four layers.

Layers with a window rotate pairs of neighbours, the others nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.models.families.base import (
    GATED_ACTIVATIONS,
    Family,
    activation,
    attention,
    head_dim_of,
    paired_rows,
    rope,
    rope_reach,
    tied_unless_told,
)
from headrace.models.families.llama import PREFIXES, mixed_windows, names
from headrace.models.spec import ModelConfig


def _facts(config: Any) -> dict[str, Any]:
    windows, turned, kv_heads = mixed_windows(config), rope(config), config.num_key_value_heads
    return blocks(config) | dict(
        max_model_len=rope_reach(config, turned),
        attention=attention(config, kv_heads=kv_heads, head_dim=head_dim_of(config), windows=windows),
        rope=turned,
        no_rope_layers=tuple(layer for layer, window in enumerate(windows) if window is None),
    )


def blocks(config: Any) -> dict[str, Any]:
    """What Cohere's models have in common, beside heads and their rotation."""
    return dict(
        intermediate_size=config.intermediate_size,
        embed_size=config.hidden_size,
        positions="rope",
        norm="layer",
        norm_eps=config.layer_norm_eps,
        norm_bias=False,
        activation=activation("hidden_act", config.hidden_act, GATED_ACTIVATIONS),
        gated=True,
        block="parallel",
        mlp_norm=False,
        logit_scale=config.logit_scale,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )


def _rows(config: ModelConfig) -> list[int]:
    """In all layers alike: to those that rotate nothing, the order of a head's elements is one and the same."""
    return paired_rows(config.attention, config.attention.head_dim)


COHERE2 = Family(
    "cohere2", "transformers.models.cohere2.configuration_cohere2:Cohere2Config", _facts, names, PREFIXES,
    qkv_rows=_rows,
)  # fmt: skip


def _with_vision(model_type: str) -> Family:
    """Of which the text part is computed, and images are refused."""
    unread = ("vision_tower.", "multi_modal_projector.")
    return replace(
        COHERE2, model_type=model_type, text_type="cohere2", completed=tied_unless_told,
        prefixes=("language_model.model.", "model.language_model."),
        unread=(*unread, *(f"model.{name}" for name in unread)),
    )  # fmt: skip


COHERE2_VISION, AYA_VISION = map(_with_vision, ("cohere2_vision", "aya_vision"))
