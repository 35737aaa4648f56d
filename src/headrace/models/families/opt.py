"""OPT: learned positions, LayerNorm, biases. The 350m variant norms after the residual and embeds at another width."""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import PLAIN_ACTIVATIONS, Family, Names, activation, attention
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel


def _facts(config: Any) -> dict[str, Any]:
    heads = config.num_attention_heads
    if config.hidden_size % heads:
        raise UnsupportedModel(f"hidden_size {config.hidden_size} is not a multiple of num_attention_heads {heads}")
    return dict(
        intermediate_size=config.ffn_dim,
        embed_size=config.word_embed_proj_dim,
        max_model_len=config.max_position_embeddings,
        attention=attention(config, kv_heads=heads, head_dim=config.hidden_size // heads),
        positions="learned",
        positions_from=2,  # the first two rows are no position's
        norm="layer",
        norm_eps=1e-5,
        norm_affine=config.layer_norm_elementwise_affine,
        activation=activation("activation_function", config.activation_function, PLAIN_ACTIVATIONS),
        gated=False,
        block="pre" if config.do_layer_norm_before else "post",
        final_norm=config.do_layer_norm_before and not config._remove_final_layer_norm,
        qkv_bias=config.enable_bias,
        out_bias=config.enable_bias,
        mlp_bias=config.enable_bias,
    )


def _names(config: ModelConfig) -> Names:
    layer = "layers.{}."
    return {
        "embed": ("embed_tokens",),
        "positions": ("embed_positions",),
        "project_in": ("project_in",),
        "project_out": ("project_out",),
        "final_norm": ("final_layer_norm",),
        "layers.{}.attention_norm": (layer + "self_attn_layer_norm",),
        "layers.{}.qkv": tuple(layer + f"self_attn.{part}_proj" for part in "qkv"),
        "layers.{}.out": (layer + "self_attn.out_proj",),
        "layers.{}.mlp_norm": (layer + "final_layer_norm",),
        "layers.{}.up": (layer + "fc1",),
        "layers.{}.down": (layer + "fc2",),
    }


OPT = Family(
    "opt", "transformers.models.opt.configuration_opt:OPTConfig", _facts, _names, ("model.decoder.", "decoder.", "")
)
