"""StarCoder2: LayerNorm, biases, an MLP of gelu without gates; in some models a window."""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import (
    PLAIN_ACTIVATIONS,
    Family,
    Names,
    activation,
    attention,
    head_dim_of,
    rope,
    rope_reach,
)
from headrace.models.families.llama import PREFIXES, names, uniform_windows
from headrace.models.spec import ModelConfig


def _facts(config: Any) -> dict[str, Any]:
    turned, windows, kv_heads = rope(config), uniform_windows(config, config.sliding_window), config.num_key_value_heads
    return dict(
        intermediate_size=config.intermediate_size,
        embed_size=config.hidden_size,
        max_model_len=rope_reach(config, turned),
        attention=attention(config, kv_heads=kv_heads, head_dim=head_dim_of(config), windows=windows),
        positions="rope",
        rope=turned,
        norm="layer",
        norm_eps=config.norm_epsilon,
        activation=activation("hidden_act", config.hidden_act, PLAIN_ACTIVATIONS),
        gated=False,
        qkv_bias=config.use_bias,
        out_bias=config.use_bias,
        mlp_bias=config.use_bias,
    )


def _names(config: ModelConfig) -> Names:
    return {**names(config), "layers.{}.up": ("layers.{}.mlp.c_fc",), "layers.{}.down": ("layers.{}.mlp.c_proj",)}


STARCODER2 = Family(
    "starcoder2", "transformers.models.starcoder2.configuration_starcoder2:Starcoder2Config", _facts, _names, PREFIXES
)
