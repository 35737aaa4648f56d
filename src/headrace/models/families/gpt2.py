"""GPT-2: learned positions, LayerNorm, biases, q, k and v in one matrix. Its matrices lie as [inputs, outputs]."""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import PLAIN_ACTIVATIONS, Family, Names, activation, attention
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel


def _facts(config: Any) -> dict[str, Any]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    if hidden % heads:
        raise UnsupportedModel(f"n_embd {hidden} is not a multiple of n_head {heads}")
    if not config.scale_attn_weights:
        raise UnsupportedModel("scale_attn_weights false is not supported; only true is")
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if getattr(config, name):
            raise UnsupportedModel(f"{name} true is not supported; only false is")
    return dict(
        intermediate_size=config.n_inner or 4 * hidden,
        embed_size=hidden,
        max_model_len=config.max_position_embeddings,
        attention=attention(config, kv_heads=heads, head_dim=hidden // heads),
        positions="learned",
        norm="layer",
        norm_eps=config.layer_norm_epsilon,
        activation=activation("activation_function", config.activation_function, PLAIN_ACTIVATIONS),
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


def _names(config: ModelConfig) -> Names:
    layer = "h.{}."
    return {
        "embed": ("wte",),
        "positions": ("wpe",),
        "final_norm": ("ln_f",),
        "layers.{}.attention_norm": (layer + "ln_1",),
        "layers.{}.qkv": (layer + "attn.c_attn",),
        "layers.{}.out": (layer + "attn.c_proj",),
        "layers.{}.mlp_norm": (layer + "ln_2",),
        "layers.{}.up": (layer + "mlp.c_fc",),
        "layers.{}.down": (layer + "mlp.c_proj",),
    }


def _masks(config: ModelConfig) -> frozenset[str]:
    """Which keys a row sees, as old files have it."""
    return frozenset(f"h.{layer}.attn.bias" for layer in range(config.layers))


GPT2 = Family(
    "gpt2", "transformers.models.gpt2.configuration_gpt2:GPT2Config", _facts, _names, ("transformer.", ""),
    by_inputs=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"), unused=_masks,
)  # fmt: skip
