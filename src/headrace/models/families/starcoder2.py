"""StarCoder2 and Jais 2: LayerNorm, biases, MLPs without gates, of gelu or of squared relus; StarCoder2 may have a
window."""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import Family, Names, layer_normed
from headrace.models.families.llama import PREFIXES, names, ungated_names, uniform_windows
from headrace.models.spec import ModelConfig


def _starcoder2(config: Any) -> dict[str, Any]:
    bias = dict(qkv_bias=config.use_bias, out_bias=config.use_bias, mlp_bias=config.use_bias)
    windows = uniform_windows(config, config.sliding_window)
    return layer_normed(config, config.norm_epsilon, config.num_key_value_heads, windows) | bias


def _jais2(config: Any) -> dict[str, Any]:
    bias = dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias, mlp_bias=config.mlp_bias)
    windows = uniform_windows(config, None)
    return layer_normed(config, config.layer_norm_eps, config.num_key_value_heads, windows) | bias


def _names(config: ModelConfig) -> Names:
    return {**names(config), "layers.{}.up": ("layers.{}.mlp.c_fc",), "layers.{}.down": ("layers.{}.mlp.c_proj",)}


STARCODER2 = Family(
    "starcoder2", "transformers.models.starcoder2.configuration_starcoder2:Starcoder2Config", _starcoder2, _names,
    PREFIXES,
)  # fmt: skip
JAIS2 = Family("jais2", "transformers.models.jais2.configuration_jais2:Jais2Config", _jais2, ungated_names, PREFIXES)
