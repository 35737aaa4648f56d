"""HunYuan: a Llama whose queries and keys are normed after their rotation, whose base may be stretched once.
HunYuan-A13B has experts and a shared one in all layers. Hy3: Qwen3's attention beside experts that are chosen by
sigmoids and corrections.

Their files name routers, corrections and shared experts otherwise than transformers does in memory.
"""

from __future__ import annotations

from typing import Any

from headrace.config import RoutingSpec
from headrace.models.families.base import Family, Names, head_dim_of, rope, rope_parameters, rope_theta
from headrace.models.families.experts import APART, TOGETHER, everywhere, given, kinds_of_mlp, mixture
from headrace.models.families.glm4_moe import behind_the_last, routed_names_together
from headrace.models.families.llama import PREFIXES, common, names, uniform_windows
from headrace.models.spec import ModelConfig, RopeSpec
from headrace.types import UnsupportedModel


def _facts(config: Any) -> dict[str, Any]:
    bias = dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    facts = common(config, uniform_windows(config, None), turned=_rope(config))
    return facts | bias | dict(qk_norm=True, turn_before_norm=True)


def _rope(config: Any) -> RopeSpec:
    """Files call it dynamic where `alpha` stretches the base, whatever the length: other numbers count for nothing."""
    given, dim = rope_parameters(config), head_dim_of(config)
    if given["rope_type"] != "dynamic" or not given.get("alpha"):
        return rope(config)
    if dim < 4:
        raise UnsupportedModel(f"head_dim {dim} is not supported with rope_parameters.alpha; 4 or more is")
    base = rope_theta(given) * given["alpha"] ** (dim / (dim - 2))
    return RopeSpec("default", (("rope_theta", base),), config.max_position_embeddings)


def _names(config: ModelConfig) -> Names:
    layer = "layers.{}."
    theirs = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
    return {**names(config), **{layer + ours: (f"{layer}self_attn.{name}",) for ours, name in theirs.items()}}


def _one_of_all(config: Any, name: str) -> int:
    """A number of experts, which may be told layer by layer."""
    told = getattr(config, name)
    each = set(told) if isinstance(told, list) else {told}
    if len(each) != 1:
        raise UnsupportedModel(f"{name} that differs from layer to layer is not supported")
    return int(each.pop())


def _moe(config: Any) -> dict[str, Any]:
    inner, chosen = config.intermediate_size, _one_of_all(config, "moe_topk")
    experts = mixture(config, config.num_experts, inner, True, everywhere(config), inner, chosen, shared_gate=False)
    return _facts(config) | experts


def _hy3(config: Any) -> dict[str, Any]:
    inner, shared = config.moe_intermediate_size, config.moe_intermediate_size * given(config, "num_shared_experts")
    routing = RoutingSpec("sigmoid", corrected=True, scale=float(config.router_scaling_factor))
    experts = mixture(
        config, given(config, "num_experts"), inner, True, kinds_of_mlp(config), shared,
        given(config, "num_experts_per_tok"), shared_gate=False, routing=routing,
    )  # fmt: skip
    bias = dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias, mlp_bias=config.mlp_bias)
    return common(config, uniform_windows(config, None)) | bias | experts | dict(qk_norm=True)


SHARED: Names = {
    "layers.{}.shared.up": ("layers.{}.mlp.shared_mlp.gate_proj", "layers.{}.mlp.shared_mlp.up_proj"),
    "layers.{}.shared.down": ("layers.{}.mlp.shared_mlp.down_proj",),
}
ROUTER: Names = {"layers.{}.router": ("layers.{}.mlp.gate.wg",)}


def _moe_names(config: ModelConfig) -> Names:
    return {**_names(config), **APART, **SHARED, **ROUTER}


def _moe_names_together(config: ModelConfig) -> Names:
    return {**_names(config), **TOGETHER, **SHARED, **ROUTER}


CORRECTION = "routing.e_score_correction_bias"


def _hy3_names(config: ModelConfig) -> Names:
    router = {"layers.{}.router": ("layers.{}.mlp.router.gate",)}
    return {**names(config), **APART, **SHARED, **router, f"layers.{{}}.{CORRECTION}": ("layers.{}.mlp.expert_bias",)}


def _hy3_names_together(config: ModelConfig) -> Names:
    return {**routed_names_together(config), "layers.{}.routing": ("layers.{}.mlp",)}


HUNYUAN_MOE = Family(
    "hunyuan_v1_moe", "transformers.models.hunyuan_v1_moe.configuration_hunyuan_v1_moe:HunYuanMoEV1Config", _moe,
    _moe_names, PREFIXES, other_names=_moe_names_together, published_as="hunyuan",
)  # fmt: skip
HY3 = Family(
    "hy_v3", "transformers.models.hy_v3.configuration_hy_v3:HYV3Config", _hy3, _hy3_names, PREFIXES,
    other_names=_hy3_names_together, unused=behind_the_last,
)  # fmt: skip
HUNYUAN_DENSE = Family(
    "hunyuan_v1_dense", "transformers.models.hunyuan_v1_dense.configuration_hunyuan_v1_dense:HunYuanDenseV1Config",
    _facts, _names, PREFIXES,
)  # fmt: skip
