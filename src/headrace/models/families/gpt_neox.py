"""GPT-NeoX and Pythia: LayerNorm and biases, attention and MLP beside each other, a part of each head rotated, q, k and
v in one matrix, head by head."""

from __future__ import annotations

from typing import Any

from headrace.models.families import falcon
from headrace.models.families.base import PLAIN_ACTIVATIONS, Family, Names, activation, attention, rope, rope_reach
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel


def _facts(config: Any) -> dict[str, Any]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    if hidden % heads:
        raise UnsupportedModel(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    spec = rope(config, partial=True)
    return dict(
        intermediate_size=config.intermediate_size,
        embed_size=hidden,
        max_model_len=rope_reach(config, spec),
        attention=attention(config, kv_heads=heads, head_dim=hidden // heads),
        positions="rope",
        rope=spec,
        norm="layer",
        norm_eps=config.layer_norm_eps,
        activation=activation("hidden_act", config.hidden_act, PLAIN_ACTIVATIONS),
        gated=False,
        block="parallel" if config.use_parallel_residual else "pre",
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        mlp_bias=True,
    )


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
