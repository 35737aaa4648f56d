"""Trinity (Arcee's AFMoE): gated attention, norms on both sides of attention and MLP, windows in three of
four layers, which alone are rotated; behind the first layers experts chosen by corrected sigmoids, and shared ones.
"""

from __future__ import annotations

from typing import Any

from headrace.config import RoutingSpec
from headrace.config.routing import CORRECTION
from headrace.models.families.base import Family, Names
from headrace.models.families.experts import APART, TOGETHER, given, mixture
from headrace.models.families.glm4_moe import SHARED
from headrace.models.families.llama import GATED_QKV, PREFIXES, common, mixed_windows, names
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel


def _facts(config: Any) -> dict[str, Any]:
    if config.attention_bias:
        raise UnsupportedModel("attention_bias true is not supported; only false is")
    windows = mixed_windows(config)
    return (
        common(config, windows)
        | _experts(config)
        | dict(
            block="sandwich",
            qk_norm=True,
            attention_gate=True,
            gate_apart=True,
            no_rope_layers=tuple(layer for layer, window in enumerate(windows) if window is None),
            embed_scale=config.hidden_size**0.5 if config.mup_enabled else 1.0,
        )
    )


def _experts(config: Any) -> dict[str, Any]:
    inner, dense = given(config, "moe_intermediate_size"), given(config, "num_dense_layers")
    layers = tuple(layer >= dense for layer in range(config.num_hidden_layers))
    routing = RoutingSpec("sigmoid", corrected=True, scale=float(given(config, "route_scale")))
    return mixture(
        config, given(config, "num_experts"), inner, True, layers, inner * given(config, "num_shared_experts"),
        given(config, "num_experts_per_tok"), shared_gate=False, routing=routing,
    )  # fmt: skip


def _names(config: ModelConfig, experts: Names) -> Names:
    layer = "layers.{}."
    theirs = {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_mlp_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
        "router": "mlp.router.gate",
        CORRECTION: "mlp.expert_bias",
    }
    return {
        **names(config),
        **experts,
        **SHARED,
        **GATED_QKV,
        **{layer + ours: (layer + name,) for ours, name in theirs.items()},
    }


def _names_apart(config: ModelConfig) -> Names:
    return _names(config, APART)


def _names_together(config: ModelConfig) -> Names:
    return _names(config, TOGETHER)


AFMOE = Family(
    "afmoe", "transformers.models.afmoe.configuration_afmoe:AfmoeConfig", _facts, _names_apart, PREFIXES,
    other_names=_names_together,
)  # fmt: skip
