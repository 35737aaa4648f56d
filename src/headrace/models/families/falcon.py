"""Falcon: LayerNorm, plain GELU MLP, q k v in one matrix. 7B: parallel block, MQA. RW: ALiBi, sequential. 40B: GQA."""

from __future__ import annotations

from typing import Any

from headrace.config import AttentionSpec
from headrace.models.families.base import PLAIN_ACTIVATIONS, Family, Names, activation, attention, rope, rope_reach
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel


def _facts(config: Any) -> dict[str, Any]:
    heads, norms = config.num_attention_heads, _check(config)
    spec = None if config.alibi else rope(config)
    head_dim = config.hidden_size // heads
    return dict(
        intermediate_size=config.ffn_hidden_size,
        embed_size=config.hidden_size,
        max_model_len=rope_reach(config, spec) if spec else config.max_position_embeddings,
        attention=attention(config, kv_heads=_kv_heads(config), head_dim=head_dim, alibi=bool(config.alibi)),
        positions="rope" if spec else "alibi",
        rope=spec,
        norm="layer",
        norm_eps=config.layer_norm_epsilon,
        activation=activation("activation", config.activation, PLAIN_ACTIVATIONS),
        gated=False,
        block="parallel" if config.parallel_attn else "pre",
        mlp_norm=norms == 2,
        qkv_bias=config.bias,
        out_bias=config.bias,
        mlp_bias=config.bias,
    )


def _check(config: Any) -> int:
    """Refuses combinations that transformers' own class cannot run. Returns the number of norms in a layer."""
    if config.hidden_size % config.num_attention_heads:
        raise UnsupportedModel(f"hidden_size {config.hidden_size} is not a multiple of num_attention_heads")
    if getattr(config, "apply_residual_connection_post_layernorm", False):
        raise UnsupportedModel("apply_residual_connection_post_layernorm is not supported")
    if config.new_decoder_architecture and not config.parallel_attn:
        raise UnsupportedModel("parallel_attn false is not supported with new_decoder_architecture")
    norms = config.num_ln_in_parallel_attn or (2 if config.new_decoder_architecture else 1)
    if norms not in (1, 2) or (norms == 2 and config.parallel_attn and not config.new_decoder_architecture):
        raise UnsupportedModel(f"num_ln_in_parallel_attn {norms} is not supported with this decoder architecture")
    return norms if config.parallel_attn else 2


def _kv_heads(config: Any) -> int:
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    if config.multi_query:
        return 1
    if config.num_kv_heads != config.num_attention_heads:
        raise UnsupportedModel(
            f"num_kv_heads {config.num_kv_heads} is not supported without new_decoder_architecture or multi_query"
        )
    return int(config.num_attention_heads)


def _names(config: ModelConfig) -> Names:
    two = config.block == "parallel" and config.mlp_norm
    first, second = ("ln_attn", "ln_mlp") if two else ("input_layernorm", "post_attention_layernorm")
    layer = "h.{}."
    return {
        "embed": ("word_embeddings",),
        "final_norm": ("ln_f",),
        "layers.{}.attention_norm": (layer + first,),
        "layers.{}.qkv": (layer + "self_attention.query_key_value",),
        "layers.{}.out": (layer + "self_attention.dense",),
        "layers.{}.mlp_norm": (layer + second,),
        "layers.{}.up": (layer + "mlp.dense_h_to_4h",),
        "layers.{}.down": (layer + "mlp.dense_4h_to_h",),
    }


def qkv_rows(spec: AttentionSpec) -> list[int]:
    """Rows of the fused matrix in our order. It goes by KV head: its query heads, its key, its value.

    This one rule covers all variants: with one KV head it is (all queries, k, v), with as many as heads (q, k, v) each.
    """
    width = spec.group + 2
    heads = [kv * width + slot for kv in range(spec.kv_heads) for slot in range(spec.group)]
    heads += [kv * width + spec.group for kv in range(spec.kv_heads)]
    heads += [kv * width + spec.group + 1 for kv in range(spec.kv_heads)]
    return [head * spec.head_dim + row for head in heads for row in range(spec.head_dim)]


FALCON = Family(
    "falcon",
    "transformers.models.falcon.configuration_falcon:FalconConfig",
    _facts,
    _names,
    ("transformer.", ""),
    qkv_rows=lambda config: qkv_rows(config.attention),
)
