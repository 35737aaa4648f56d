"""dots.llm1 and Solar Open: Qwen3's attention, or Llama's, beside experts that are routed as DeepSeek-V3's."""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import Family
from headrace.models.families.experts import corrected, mixture
from headrace.models.families.glm4_moe import routed_names, routed_names_together
from headrace.models.families.llama import PREFIXES, common, mixed_windows, uniform_windows
from headrace.types import UnsupportedModel


def _mixture(config: Any, dense: int) -> dict[str, Any]:
    """In all layers but the first `dense`, with a shared one."""
    for name in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok"):
        if getattr(config, name) is None:
            raise UnsupportedModel(f"{name} is null; download the file again")
    layers = tuple(layer >= dense for layer in range(config.num_hidden_layers))
    inner, shared = config.moe_intermediate_size, config.moe_intermediate_size * config.n_shared_experts
    return mixture(
        config, config.n_routed_experts, inner, bool(config.norm_topk_prob), layers, shared, shared_gate=False,
        routing=corrected(config),
    )  # fmt: skip


def _dots1(config: Any) -> dict[str, Any]:
    bias = dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    experts = _mixture(config, config.first_k_dense_replace or 0)
    return common(config, mixed_windows(config)) | bias | experts | dict(qk_norm=True)


def _solar_open(config: Any) -> dict[str, Any]:
    facts = common(config, uniform_windows(config, None), partial=True, inner=config.moe_intermediate_size)
    return facts | _mixture(config, 0) | dict(qkv_bias=config.attention_bias)


def _family(model_type: str, configuration: str, facts: Any) -> Family:
    module = f"transformers.models.{model_type}.configuration_{model_type}:{configuration}"
    return Family(model_type, module, facts, routed_names, PREFIXES, other_names=routed_names_together)


DOTS1 = _family("dots1", "Dots1Config", _dots1)
SOLAR_OPEN = _family("solar_open", "SolarOpenConfig", _solar_open)
