"""Phi-3 and Phi-4: a Llama with q, k, v in one matrix and gate, up in one; longrope; a part of each head rotated.
Phi-1 to Phi-2: parallel blocks of one LayerNorm, biases everywhere, in the head too."""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import Family, Names, layer_normed
from headrace.models.families.llama import PREFIXES, common, names, uniform_windows
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel


def _facts(config: Any) -> dict[str, Any]:
    return common(config, uniform_windows(config, config.sliding_window), partial=True)


def _names(config: ModelConfig) -> Names:
    fused = {"qkv": "self_attn.qkv_proj", "up": "mlp.gate_up_proj"}
    return {**names(config), **{f"layers.{{}}.{ours}": (f"layers.{{}}.{theirs}",) for ours, theirs in fused.items()}}


def _phi(config: Any) -> dict[str, Any]:
    if config.qk_layernorm:
        raise UnsupportedModel("qk_layernorm true is not supported; only false is")
    facts = layer_normed(config, config.layer_norm_eps, config.num_key_value_heads, partial=True)
    bias = dict(qkv_bias=True, out_bias=True, mlp_bias=True, head_bias=True)
    return facts | bias | dict(block="parallel", mlp_norm=False)


def _phi_names(config: ModelConfig) -> Names:
    layer = "layers.{}."
    theirs = {"out": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"}
    return {
        **names(config),
        **{layer + ours: (layer + name,) for ours, name in theirs.items()},
        "final_norm": ("final_layernorm",),
    }


PHI = Family("phi", "transformers.models.phi.configuration_phi:PhiConfig", _phi, _phi_names, PREFIXES)
PHI3 = Family("phi3", "transformers.models.phi3.configuration_phi3:Phi3Config", _facts, _names, PREFIXES)
