"""DeepSeek-V2, V3, Kimi K2, GLM-4.7-Flash and Mistral 4: latent attention, experts and a shared one in all layers but
the first.

The norms of latents have an epsilon of their own, and scores a scale that follows from the rotation where that is
stretched (yarn's mscale_all_dim).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from headrace.config.routing import RoutingSpec
from headrace.models.families.base import (
    GATED_ACTIVATIONS,
    Family,
    Names,
    activation,
    attention,
    rope,
    rope_reach,
    tempered,
    tied_unless_told,
)
from headrace.models.families.experts import APART, TOGETHER, corrected, given, kinds_of_mlp, mixture
from headrace.models.families.llama import PREFIXES, names
from headrace.models.layer_parts import LatentSpec
from headrace.models.spec import ModelConfig, RopeSpec
from headrace.types import UnsupportedModel


def latent_facts(
    config: Any,
    paired: bool,
    scores: str = "sigmoid",
    turned: RopeSpec | None = None,
    ignored: Set[str] = frozenset(),
) -> dict[str, Any]:
    """What models with latent attention have in common. paired: whether neighbours are rotated; scores: what the router
    makes of logits, in the words of the field that says so in published files; turned: the rotation, where it is not
    simply what rope_parameters say: of a part of each head; ignored: of rope_parameters, beside what all models do."""
    if config.qk_rope_head_dim < 1:
        raise UnsupportedModel(f"qk_rope_head_dim {config.qk_rope_head_dim} is not supported; 2 or more is")
    known = {"scoring_func": scores, "moe_layer_freq": 1, "num_key_value_heads": config.num_attention_heads}
    known["head_dim"] = config.qk_rope_head_dim + (0 if turned is None else config.qk_nope_head_dim)
    for name, only in known.items():
        if getattr(config, name, None) not in (None, only):
            raise UnsupportedModel(f"{name} {getattr(config, name)!r} is not supported; {only} is")
    turned = rope(config, ignored=ignored, head_dim=config.qk_rope_head_dim) if turned is None else turned
    facts = unturned_facts(config, paired, _stretched(dict(turned.parameters)))
    return facts | dict(max_model_len=rope_reach(config, turned), rope=turned)


def unturned_facts(config: Any, paired: bool, stretch: float = 1.0) -> dict[str, Any]:
    """Those of them that do not follow from the rotation, if there is one. stretch: of the scores' scale."""
    dim = config.qk_rope_head_dim
    latent = LatentSpec(
        config.kv_lora_rank, dim, config.qk_nope_head_dim, config.v_head_dim, config.q_lora_rank, paired
    )
    spec = attention(config, kv_heads=1, head_dim=dim + latent.rank)
    return dict(
        intermediate_size=config.intermediate_size,
        embed_size=config.hidden_size,
        attention=replace(spec, scale=float(latent.query**-0.5 * stretch * stretch), once=True),
        latent=latent,
        positions="rope",
        norm="rms",
        norm_eps=config.rms_norm_eps,
        activation=activation("hidden_act", config.hidden_act, GATED_ACTIVATIONS),
        gated=True,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )


def _stretched(parameters: Mapping[str, Any]) -> float:
    """What a stretched rotation multiplies queries and keys by."""
    every = parameters.get("mscale_all_dim") or 0.0
    return 0.1 * every * math.log(parameters["factor"]) + 1.0 if every and parameters["factor"] > 1 else 1.0


def _v2(config: Any) -> dict[str, Any]:
    """Its router never divides shares by their sum, whatever norm_topk_prob says."""
    if config.mlp_bias:
        raise UnsupportedModel("mlp_bias true is not supported for deepseek_v2")
    if config.topk_method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(f"topk_method {config.topk_method!r} is not supported; greedy, group_limited_greedy are")
    grouped = config.topk_method != "greedy"
    groups = (given(config, "n_group"), given(config, "topk_group")) if grouped else (1, 1)
    routing = RoutingSpec(groups=groups[0], met_groups=groups[1], scale=given(config, "routed_scaling_factor"))
    return latent_facts(config, True, "softmax") | _mixture(config, _behind_dense(config), False, routing)


def _v3(config: Any) -> dict[str, Any]:
    return routed_by_sigmoids(config, _behind_dense(config), bool(config.rope_interleave))


def _glm_lite(config: Any) -> dict[str, Any]:
    return routed_by_sigmoids(config, kinds_of_mlp(config), bool(config.rope_interleave))


def routed_by_sigmoids(
    config: Any, layers: tuple[bool, ...], paired: bool, ignored: Set[str] = frozenset()
) -> dict[str, Any]:
    """Of DeepSeek-V3 and those that are routed alike. layers: which have experts; the others: see latent_facts."""
    for name in ("n_group", "topk_group", "routed_scaling_factor"):
        given(config, name)
    mixed = _mixture(config, layers, bool(config.norm_topk_prob), corrected(config))
    return latent_facts(config, paired, ignored=ignored) | mixed


def _mistral4(config: Any) -> dict[str, Any]:
    """Queries are multiplied by a factor that grows with their position, as Ministral 3's."""
    rotated, query = config.qk_rope_head_dim, config.qk_rope_head_dim + config.qk_nope_head_dim
    if int(config.rope_parameters.get("partial_rotary_factor", rotated / query) * query) != rotated:
        raise UnsupportedModel("rope_parameters.partial_rotary_factor does not fit qk_rope_head_dim")
    turned = replace(tempered(config, {"partial_rotary_factor"}, rotated), factor_alone=True)
    routing = RoutingSpec(
        groups=given(config, "n_group"), met_groups=given(config, "topk_group"),
        summed=2 if config.n_group > 1 else 1, scale=given(config, "routed_scaling_factor"),
    )  # fmt: skip
    mixed = _mixture(config, _behind_dense(config), bool(config.norm_topk_prob), routing)
    return latent_facts(config, bool(config.rope_interleave), "softmax", turned) | mixed


def _behind_dense(config: Any) -> tuple[bool, ...]:
    first = config.first_k_dense_replace or 0
    return tuple(layer >= first for layer in range(config.num_hidden_layers))


def _mixture(config: Any, layers: tuple[bool, ...], normalised: bool, routing: RoutingSpec) -> dict[str, Any]:
    count, inner, chosen = (
        given(config, name) for name in ("n_routed_experts", "moe_intermediate_size", "num_experts_per_tok")
    )
    shared = given(config, "n_shared_experts") * inner
    return mixture(config, count, inner, normalised, layers, shared, chosen=chosen, shared_gate=False, routing=routing)


def latent_names(config: ModelConfig, experts: Names | None = None) -> Names:
    layer = "layers.{}."
    assert config.latent is not None, "the family has latent attention"
    theirs = {
        "queries": "self_attn.q_proj" if config.latent.query_rank is None else "self_attn.q_b_proj",
        "query_in": "self_attn.q_a_proj",
        "query_norm": "self_attn.q_a_layernorm",
        "latent": "self_attn.kv_a_proj_with_mqa",
        "latent_norm": "self_attn.kv_a_layernorm",
        "heads": "self_attn.kv_b_proj",
        "routing": "mlp.gate",
        "shared.down": "mlp.shared_experts.down_proj",
    }
    return {
        **names(config),
        **{layer + ours: (layer + name,) for ours, name in theirs.items()},
        **(experts or {}),
        layer + "shared.up": tuple(layer + f"mlp.shared_experts.{part}_proj" for part in ("gate", "up")),
    }


def _apart(config: ModelConfig) -> Names:
    return latent_names(config, APART)


def _together(config: ModelConfig) -> Names:
    return latent_names(config, TOGETHER)


def latent_rows(config: ModelConfig, name: str) -> list[int] | None:
    """The checkpoint's rows in our order: what is rotated comes first, the two halves one after another."""
    latent, heads = config.latent, config.attention.heads
    assert latent is not None, "the family has latent attention"
    turned = [*range(0, latent.rotated, 2), *range(1, latent.rotated, 2)] if latent.paired else range(latent.rotated)
    if ".latent." in name:
        return [*(latent.rank + row for row in turned), *range(latent.rank)]
    if ".queries." not in name:
        return None
    own = [*(latent.plain + row for row in turned), *range(latent.plain)]
    return [head * latent.query + row for head in range(heads) for row in own]


def unused(config: ModelConfig) -> frozenset[str]:
    """The layer behind the last one, which published checkpoints have to guess a further token."""
    return frozenset((f"layers.{config.layers}.",))


def _family(model_type: str, configuration: str, facts: Any) -> Family:
    module = f"transformers.models.{model_type}.configuration_{model_type}:{configuration}"
    return Family(
        model_type, module, facts, _apart, PREFIXES, rows=latent_rows, other_names=_together, unused=unused,
        published_as="deepseek",
    )  # fmt: skip


DEEPSEEK_V2 = _family("deepseek_v2", "DeepseekV2Config", _v2)
DEEPSEEK_V3 = replace(_family("deepseek_v3", "DeepseekV3Config", _v3), also_called="kimi_k2")
GLM_LITE = _family("glm4_moe_lite", "Glm4MoeLiteConfig", _glm_lite)
MISTRAL4 = _family("mistral4", "Mistral4Config", _mistral4)


KIMI_VISION = replace(
    DEEPSEEK_V3, model_type="kimi_k25", text_type="deepseek_v3", completed=tied_unless_told,
    prefixes=("language_model.model.", "model.language_model."),
    unread=("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector."),
    renamed=(("language_model.model.blocks.", "language_model.model.layers."),),
)  # fmt: skip
"""Of which the text part is computed, and images are refused. What transformers 5.24 writes has blocks for layers."""
