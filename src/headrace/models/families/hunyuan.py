"""HunYuan, dense: a Llama whose queries and keys are normed after their rotation, whose base may be stretched once."""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import Family, Names, head_dim_of, rope
from headrace.models.families.llama import PREFIXES, common, names, uniform_windows
from headrace.models.spec import ModelConfig, RopeSpec


def _facts(config: Any) -> dict[str, Any]:
    bias = dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    facts = common(config, uniform_windows(config, None), turned=_rope(config))
    return facts | bias | dict(qk_norm=True, turn_before_norm=True)


def _rope(config: Any) -> RopeSpec:
    """Files call it dynamic where `alpha` stretches the base, whatever the length: other numbers count for nothing."""
    given, dim = config.rope_parameters, head_dim_of(config)
    if given["rope_type"] != "dynamic" or not given.get("alpha"):
        return rope(config)
    base = given["rope_theta"] * given["alpha"] ** (dim / (dim - 2))
    return RopeSpec("default", (("rope_theta", base),), config.max_position_embeddings)


def _names(config: ModelConfig) -> Names:
    layer = "layers.{}."
    theirs = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
    return {**names(config), **{layer + ours: (f"{layer}self_attn.{name}",) for ours, name in theirs.items()}}


HUNYUAN_DENSE = Family(
    "hunyuan_v1_dense", "transformers.models.hunyuan_v1_dense.configuration_hunyuan_v1_dense:HunYuanDenseV1Config",
    _facts, _names, PREFIXES,
)  # fmt: skip
