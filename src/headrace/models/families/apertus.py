"""Apertus: a Llama with norms of queries and keys, whose MLPs have xIELU and no gates."""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import Family, Names
from headrace.models.families.llama import PREFIXES, common, ungated_names, uniform_windows
from headrace.models.spec import ModelConfig


def _facts(config: Any) -> dict[str, Any]:
    bias = dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    return common(config, uniform_windows(config, None), gated=False) | bias | dict(qk_norm=True)


def _names(config: ModelConfig) -> Names:
    layer = "layers.{}."
    theirs = {
        "attention_norm": "attention_layernorm",
        "mlp_norm": "feedforward_layernorm",
        "activation": "mlp.act_fn",
    }
    return {**ungated_names(config), **{layer + ours: (layer + name,) for ours, name in theirs.items()}}


APERTUS = Family("apertus", "transformers.models.apertus.configuration_apertus:ApertusConfig", _facts, _names, PREFIXES)
