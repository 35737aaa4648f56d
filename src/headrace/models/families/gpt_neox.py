"""GPT-NeoX and Pythia: LayerNorm and biases, attention and MLP beside each other, a part of each head rotated, q, k and
v in one matrix, head by head."""

from __future__ import annotations

from typing import Any

from headrace.models.families import falcon
from headrace.models.families.base import Family, Names, layer_normed
from headrace.models.spec import ModelConfig


def _facts(config: Any) -> dict[str, Any]:
    bias = dict(qkv_bias=config.attention_bias, out_bias=config.attention_bias, mlp_bias=True)
    facts = layer_normed(config, config.layer_norm_eps, config.num_attention_heads, partial=True)
    return facts | bias | dict(block="parallel" if config.use_parallel_residual else "pre")


def _names(config: ModelConfig) -> Names:
    """Of published files."""
    return {**_in_memory(config), "head": ("embed_out",)}


def _in_memory(config: ModelConfig) -> Names:
    layer = "layers.{}."
    return {
        "embed": ("embed_in",),
        "final_norm": ("final_layer_norm",),
        "layers.{}.attention_norm": (layer + "input_layernorm",),
        "layers.{}.qkv": (layer + "attention.query_key_value",),
        "layers.{}.out": (layer + "attention.dense",),
        "layers.{}.mlp_norm": (layer + "post_attention_layernorm",),
        "layers.{}.up": (layer + "mlp.dense_h_to_4h",),
        "layers.{}.down": (layer + "mlp.dense_4h_to_h",),
    }


def _masks(config: ModelConfig) -> frozenset[str]:
    """Which keys a row sees, as old files have it."""
    return frozenset(f"layers.{layer}.attention.bias" for layer in range(config.layers))


GPT_NEOX = Family(
    "gpt_neox", "transformers.models.gpt_neox.configuration_gpt_neox:GPTNeoXConfig", _facts, _names, ("gpt_neox.", ""),
    qkv_rows=lambda config: falcon.qkv_rows(config.attention), other_names=_in_memory, unused=_masks,
)  # fmt: skip
