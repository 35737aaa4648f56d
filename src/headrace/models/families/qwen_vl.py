"""Qwen2.5-VL and Qwen3-VL, of which the text part is computed: Qwen2's or Qwen3's layers, and images are refused.

Positions have three parts, for time, height and width, which are one and the same in text: `mrope_section`, which says
what part of a head each of them turns, makes no difference then.
"""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import Family, rope
from headrace.models.families.llama import common, mixed_windows, names, uniform_windows
from headrace.models.families.qwen3_next import MULTIMODAL_ROPE


def _qwen2_5(config: Any) -> dict[str, Any]:
    turned = rope(config, ignored=MULTIMODAL_ROPE)
    return common(config, mixed_windows(config), turned=turned) | dict(qkv_bias=True)


def _qwen3(config: Any) -> dict[str, Any]:
    turned = rope(config, ignored=MULTIMODAL_ROPE)
    bias = dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    return common(config, uniform_windows(config, None), turned=turned) | bias | dict(qk_norm=True)


def _completed(raw: dict[str, Any]) -> dict[str, Any]:
    """Published files of Qwen2.5-VL have fields of the text part beside vision_config, and a rotation named mrope."""
    text = raw.get("text_config") or raw | {"model_type": "qwen2_5_vl_text"}
    for name in ("rope_scaling", "rope_parameters"):
        given = text.get(name) or {}
        if given.get("rope_type", given.get("type")) == "mrope":
            text = text | {name: given | {"rope_type": "default"}}
    tied = {"tie_word_embeddings": True} if text.get("tie_word_embeddings") else {}
    return raw | tied | {"text_config": text}


QWEN2_5_VL = Family(
    "qwen2_5_vl", "transformers.models.qwen2_5_vl.configuration_qwen2_5_vl:Qwen2_5_VLTextConfig", _qwen2_5, names,
    ("model.", "model.language_model."), text_type="qwen2_5_vl_text", unread=("visual.", "model.visual."),
    completed=_completed,
)  # fmt: skip
QWEN3_VL = Family(
    "qwen3_vl", "transformers.models.qwen3_vl.configuration_qwen3_vl:Qwen3VLTextConfig", _qwen3, names,
    ("model.language_model.",), text_type="qwen3_vl_text", unread=("model.visual.",),
)  # fmt: skip
