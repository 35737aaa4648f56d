"""GLM-4: half of each head rotated, by pairs of neighbours; gate and up in one matrix; glm4: sandwich norms."""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import Family, Names, paired_rows
from headrace.models.families.llama import PREFIXES, common, names, uniform_windows
from headrace.models.spec import ModelConfig


def _glm(config: Any) -> dict[str, Any]:
    facts = common(config, uniform_windows(config, None), partial=True)
    return facts | dict(qkv_bias=config.attention_bias)


def _glm4(config: Any) -> dict[str, Any]:
    return _glm(config) | dict(block="sandwich")


def _names(config: ModelConfig) -> Names:
    layer = "layers.{}."
    found = {**names(config), layer + "up": (layer + "mlp.gate_up_proj",)}
    if config.block == "sandwich":
        found[layer + "attention_out_norm"] = (layer + "post_self_attn_layernorm",)
        found[layer + "mlp_out_norm"] = (layer + "post_mlp_layernorm",)
    return found


def _rows(config: ModelConfig) -> list[int]:
    return paired_rows(config.attention, config.rotation(0)[1])


GLM = Family("glm", "transformers.models.glm.configuration_glm:GlmConfig", _glm, _names, PREFIXES, qkv_rows=_rows)
GLM4 = Family("glm4", "transformers.models.glm4.configuration_glm4:Glm4Config", _glm4, _names, PREFIXES, qkv_rows=_rows)
