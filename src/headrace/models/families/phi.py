"""Phi-3 and Phi-4: a Llama with q, k, v in one matrix and gate, up in one; longrope; a part of each head rotated."""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import Family, Names
from headrace.models.families.llama import PREFIXES, common, names, uniform_windows
from headrace.models.spec import ModelConfig


def _facts(config: Any) -> dict[str, Any]:
    return common(config, uniform_windows(config, config.sliding_window), partial=True)


def _names(config: ModelConfig) -> Names:
    fused = {"qkv": "self_attn.qkv_proj", "up": "mlp.gate_up_proj"}
    return {**names(config), **{f"layers.{{}}.{ours}": (f"layers.{{}}.{theirs}",) for ours, theirs in fused.items()}}


PHI3 = Family("phi3", "transformers.models.phi3.configuration_phi3:Phi3Config", _facts, _names, PREFIXES)
