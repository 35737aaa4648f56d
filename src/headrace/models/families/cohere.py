"""Command R and Aya (Cohere): parallel blocks of one LayerNorm without biases, all heads rotated by neighbours."""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import Family, attention, head_dim_of, paired_rows, rope, rope_reach
from headrace.models.families.cohere2 import blocks
from headrace.models.families.llama import PREFIXES, names
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel


def _facts(config: Any) -> dict[str, Any]:
    if config.use_qk_norm:
        raise UnsupportedModel("use_qk_norm true is not supported for cohere (Command R+); false is")
    turned = rope(config)
    return blocks(config) | dict(
        max_model_len=rope_reach(config, turned),
        attention=attention(config, kv_heads=config.num_key_value_heads, head_dim=head_dim_of(config)),
        rope=turned,
    )


def _rows(config: ModelConfig) -> list[int]:
    return paired_rows(config.attention, config.attention.head_dim)


COHERE = Family(
    "cohere", "transformers.models.cohere.configuration_cohere:CohereConfig", _facts, names, PREFIXES, qkv_rows=_rows
)
