"""GLM-4.5 to 4.7 (Glm4Moe): experts chosen by sigmoids and corrections, shared ones beside them without a gate, dense
layers first, half of each head rotated, in some models norms of queries and keys.

Published checkpoints carry a layer behind the last one, which guesses further tokens; it is left unread.
"""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import Family, Names
from headrace.models.families.experts import APART, TOGETHER, corrected, mixture
from headrace.models.families.llama import PREFIXES, common, names, uniform_windows
from headrace.models.spec import ModelConfig

SHARED: Names = {
    "layers.{}.routing": ("layers.{}.mlp.gate",),
    "layers.{}.shared.up": ("layers.{}.mlp.shared_experts.gate_proj", "layers.{}.mlp.shared_experts.up_proj"),
    "layers.{}.shared.down": ("layers.{}.mlp.shared_experts.down_proj",),
}
"""Shared experts, which are as one that is so much wider, and the router's corrections."""


def _facts(config: Any) -> dict[str, Any]:
    inner, shared = config.moe_intermediate_size, config.moe_intermediate_size * config.n_shared_experts
    layers = tuple(layer >= config.first_k_dense_replace for layer in range(config.num_hidden_layers))
    experts = mixture(
        config, config.n_routed_experts, inner, config.norm_topk_prob, layers, shared, shared_gate=False,
        routing=corrected(config),
    )  # fmt: skip
    facts = common(config, uniform_windows(config, None), partial=True)
    return facts | experts | dict(qkv_bias=config.attention_bias, qk_norm=config.use_qk_norm)


def routed_names(config: ModelConfig) -> Names:
    return {**names(config), **APART, **SHARED}


def routed_names_together(config: ModelConfig) -> Names:
    return {**names(config), **TOGETHER, **SHARED}


def behind_the_last(config: ModelConfig) -> frozenset[str]:
    """The layer that guesses further tokens, as checkpoints number it."""
    return frozenset({f"layers.{config.layers}."})


GLM4_MOE = Family(
    "glm4_moe", "transformers.models.glm4_moe.configuration_glm4_moe:Glm4MoeConfig", _facts, routed_names, PREFIXES,
    other_names=routed_names_together, unused=behind_the_last,
)  # fmt: skip
