"""Qwen3-VL with experts, of which the text part is computed: Qwen3-MoE's layers. For text the three axes of its
rotation are one and the same.

All experts of a layer lie in one tensor, in published files by inputs [E, H, 2 I], in those that transformers has
written since 5.0 by outputs [E, 2 I, H]. It tells one from the other by their shape, and so does models.checkpoint.
"""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import Family, Names, rope
from headrace.models.families.experts import APART, TOGETHER, mixture, sparse_layers
from headrace.models.families.llama import common, names, uniform_windows
from headrace.models.families.qwen3_next import MULTIMODAL_ROPE
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel


def _facts(config: Any) -> dict[str, Any]:
    if getattr(config, "norm_topk_prob", None) is False:
        raise UnsupportedModel("norm_topk_prob False is not supported; only True is")
    facts = common(config, uniform_windows(config, None), turned=rope(config, ignored=MULTIMODAL_ROPE))
    experts = mixture(config, config.num_experts, config.moe_intermediate_size, True, sparse_layers(config))
    return facts | experts | dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias, qk_norm=True)


def _names(config: ModelConfig) -> Names:
    return {**names(config), **TOGETHER}


def _names_apart(config: ModelConfig) -> Names:
    return {**names(config), **APART}


QWEN3_VL_MOE = Family(
    "qwen3_vl_moe", "transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe:Qwen3VLMoeTextConfig", _facts, _names,
    ("model.language_model.",), other_names=_names_apart, fused_either_way=True, text_type="qwen3_vl_moe_text",
    unread=("model.visual.",),
)  # fmt: skip
