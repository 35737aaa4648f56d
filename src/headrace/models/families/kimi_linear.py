"""Kimi Linear (arXiv 2510.26692): Kimi Delta Attention in three layers of four, latent attention without positions in
the others; experts and a shared one in all layers but the first.
"""

from __future__ import annotations

from typing import Any

from headrace.config import RecurrentSpec
from headrace.models.families.base import Family, Names, behind_convolutions
from headrace.models.families.deepseek import latent_names, latent_rows, unturned_facts
from headrace.models.families.experts import MIXTRALS, corrected, given, kinds_of_mlp, mixture
from headrace.models.families.llama import PREFIXES
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel

KINDS = ("linear_attention", "full_attention")
ONLY: dict[str, Any] = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}
"""Fields of published files that transformers' class does not read, with the one value that is computed."""
NEEDED = (
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "linear_head_dim", "linear_num_heads",
    "linear_conv_kernel_dim", "model_max_length", "num_experts", "num_experts_per_token", "num_shared_experts",
    "moe_intermediate_size", "num_expert_group", "topk_group", "routed_scaling_factor",
)  # fmt: skip
"""Numbers that must not be null."""


def _facts(config: Any) -> dict[str, Any]:
    for name in NEEDED:
        given(config, name)
    for field, value in ONLY.items():
        asked = getattr(config, field, None)
        if asked not in (None, value):
            raise UnsupportedModel(f"{field} {asked!r} is not supported; only {value!r} is")
    for kind in config.layer_types:
        if kind not in KINDS:
            raise UnsupportedModel(f"layer_types with {kind!r} is not supported; supported: {', '.join(KINDS)}")
    if len(config.layer_types) != config.num_hidden_layers:
        told = f"{len(config.layer_types)} layers, num_hidden_layers is {config.num_hidden_layers}"
        raise UnsupportedModel(f"layer_types names {told}")
    linear = tuple(layer for layer, kind in enumerate(config.layer_types) if kind == KINDS[0])
    full = config.num_hidden_layers - len(linear)
    if 0 in (len(linear), full):
        raise UnsupportedModel(f"layer_types without {KINDS[bool(linear)]!r} are not supported")
    if config.linear_conv_kernel_dim < 2:
        raise UnsupportedModel(f"linear_conv_kernel_dim {config.linear_conv_kernel_dim} is not supported; 2 or more is")
    heads, size, inner = config.linear_num_heads, config.linear_head_dim, config.moe_intermediate_size
    facts = unturned_facts(config, paired=False)
    return facts | dict(
        max_model_len=config.max_position_embeddings,
        activation=behind_convolutions(config),
        attention=facts["attention"].first(full),
        rope=None,
        recurrent=RecurrentSpec(len(linear), heads, heads, size, size, config.linear_conv_kernel_dim, "kda"),
        recurrent_layers=linear,
        **mixture(
            config, config.num_experts, inner, bool(config.norm_topk_prob), kinds_of_mlp(config),
            config.num_shared_experts * inner, shared_gate=False, routing=corrected(config),
        ),
    )  # fmt: skip


def _names(config: ModelConfig) -> Names:
    """As the files have them."""
    layer, own, mixture = "layers.{}.", "layers.{}.self_attn.", "layers.{}.block_sparse_moe."
    return {
        **latent_names(config, MIXTRALS),
        layer + "mixed": tuple(own + f"{part}_proj" for part in ("q", "k", "v", "f_a", "g_a")),
        layer + "conv": tuple(own + f"{part}_conv1d" for part in "qkv"),
        layer + "gates": (own + "b_proj",),
        layer + "decays": (own + "f_b_proj",),
        layer + "out_gates": (own + "g_b_proj",),
        layer + "delta": (own.removesuffix("."),),
        layer + "delta_norm": (own + "o_norm",),
        layer + "routing": (mixture + "gate",),
        layer + "shared.up": tuple(mixture + f"shared_experts.{part}_proj" for part in ("gate", "up")),
        layer + "shared.down": (mixture + "shared_experts.down_proj",),
    }


def _names_rewritten(config: ModelConfig) -> Names:
    """As transformers writes them, which calls every MLP as it calls those with experts."""
    dense = "layers.{}.block_sparse_moe."
    up = tuple(dense + f"{part}_proj" for part in ("gate", "up"))
    return {**_names(config), "layers.{}.up": up, "layers.{}.down": (dense + "down_proj",)}


def _names_in_memory(config: ModelConfig) -> Names:
    layer, own, shared = "layers.{}.", "layers.{}.self_attn.", "layers.{}.mlp.shared_experts."
    parts = ("q", "k", "v", "forget_gate.f_a", "g_a")
    return {
        **_names(config),
        layer + "mixed": tuple(own + f"{part}_proj" for part in parts),
        layer + "decays": (own + "forget_gate.f_b_proj",),
        layer + "shared.up": tuple(shared + f"{part}_proj" for part in ("gate", "up")),
        layer + "shared.down": (shared + "down_proj",),
    }


KIMI_LINEAR = Family(
    "kimi_linear", "transformers.models.kimi_linear.configuration_kimi_linear:KimiLinearConfig", _facts, _names,
    PREFIXES, rows=latent_rows, other_names=_names_rewritten, in_memory=_names_in_memory,
    published_as="kimi",
)  # fmt: skip
