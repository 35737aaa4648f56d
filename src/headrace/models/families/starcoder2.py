"""StarCoder2 and Jais 2: LayerNorm, biases, MLPs without gates, of gelu or of squared relus; StarCoder2 may have a
window."""

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
from headrace.models.families.llama import PREFIXES, names, ungated_names, uniform_windows
from headrace.models.spec import ModelConfig


def _facts(config: Any, window: int | None, norm_eps: float) -> dict[str, Any]:
    turned, windows, kv_heads = rope(config), uniform_windows(config, window), config.num_key_value_heads
    return dict(
        intermediate_size=config.intermediate_size,
        embed_size=config.hidden_size,
        max_model_len=rope_reach(config, turned),
        attention=attention(config, kv_heads=kv_heads, head_dim=head_dim_of(config), windows=windows),
        positions="rope",
        rope=turned,
        norm="layer",
        norm_eps=norm_eps,
        activation=activation("hidden_act", config.hidden_act, PLAIN_ACTIVATIONS),
        gated=False,
    )


def _starcoder2(config: Any) -> dict[str, Any]:
    bias = dict(qkv_bias=config.use_bias, out_bias=config.use_bias, mlp_bias=config.use_bias)
    return _facts(config, config.sliding_window, config.norm_epsilon) | bias


def _jais2(config: Any) -> dict[str, Any]:
    bias = dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias, mlp_bias=config.mlp_bias)
    return _facts(config, None, config.layer_norm_eps) | bias


def _names(config: ModelConfig) -> Names:
    return {**names(config), "layers.{}.up": ("layers.{}.mlp.c_fc",), "layers.{}.down": ("layers.{}.mlp.c_proj",)}


STARCODER2 = Family(
    "starcoder2", "transformers.models.starcoder2.configuration_starcoder2:Starcoder2Config", _starcoder2, _names,
    PREFIXES,
)  # fmt: skip
JAIS2 = Family("jais2", "transformers.models.jais2.configuration_jais2:Jais2Config", _jais2, ungated_names, PREFIXES)
