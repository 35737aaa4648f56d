"""SmolLM3: a Llama in which every fourth layer or so has no positions. Windows are where layer_types names
them, whatever use_sliding_window says: so transformers masks keys."""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import Family
from headrace.models.families.llama import PREFIXES, common, mixed_windows, names
from headrace.types import UnsupportedModel


def _facts(config: Any) -> dict[str, Any]:
    turned = config.no_rope_layers
    if len(turned) < config.num_hidden_layers:
        raise UnsupportedModel(
            f"no_rope_layers names {len(turned)} layers, num_hidden_layers is {config.num_hidden_layers}"
        )
    return common(config, mixed_windows(config)) | dict(
        no_rope_layers=tuple(layer for layer in range(config.num_hidden_layers) if not turned[layer]),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


SMOLLM3 = Family("smollm3", "transformers.models.smollm3.configuration_smollm3:SmolLM3Config", _facts, names, PREFIXES)
