"""Qwen3-Next and Qwen3.5 (text): gated delta nets in most layers, attention with an output gate in the others.

Norms add 1 to their weights, and a part of each head is rotated. Both may have experts in place of MLPs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.config import AttentionSpec, RecurrentSpec
from headrace.models.families.base import Family, Names, attention, behind_convolutions, rope, rope_reach
from headrace.models.families.experts import APART, SHARED, TOGETHER, beside, mixture, sparse_layers
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel

KINDS = ("linear_attention", "full_attention")
MULTIMODAL_ROPE = frozenset({"mrope_section", "mrope_interleaved"})
"""Which axis turns which pair of elements: for text all axes are the position."""


def _facts(config: Any, inner: int) -> dict[str, Any]:
    for kind in config.layer_types:
        if kind not in KINDS:
            raise UnsupportedModel(f"layer_types with {kind!r} is not supported; supported: {', '.join(KINDS)}")
    linear = tuple(layer for layer, kind in enumerate(config.layer_types) if kind == KINDS[0])
    if len(linear) in (0, config.num_hidden_layers):
        raise UnsupportedModel(f"layer_types without {KINDS[bool(linear)]!r} are not supported")
    spec = rope(config, partial=True, ignored=MULTIMODAL_ROPE)
    full = config.num_hidden_layers - len(linear)
    return dict(
        intermediate_size=inner,
        embed_size=config.hidden_size,
        max_model_len=rope_reach(config, spec),
        attention=_attention(config, full),
        recurrent=_recurrent(config, len(linear)),
        recurrent_layers=linear,
        attention_gate=True,
        positions="rope",
        rope=spec,
        norm="rms",
        norm_eps=config.rms_norm_eps,
        norm_offset=1.0,
        qk_norm=True,
        activation=behind_convolutions(config),
        gated=True,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )


def _next_facts(config: Any) -> dict[str, Any]:
    facts = _facts(config, config.intermediate_size)
    return facts | _experts(config, config.norm_topk_prob, sparse_layers(config)) if config.num_experts else facts


def _qwen3_5_facts(config: Any) -> dict[str, Any]:
    if getattr(config, "num_experts", None):
        raise UnsupportedModel(f"num_experts {config.num_experts} is not supported for this architecture")
    return _facts(config, config.intermediate_size)


def _qwen3_5_moe_facts(config: Any) -> dict[str, Any]:
    everywhere = (True,) * config.num_hidden_layers
    return _facts(config, config.moe_intermediate_size) | _experts(config, True, everywhere)


def _experts(config: Any, normalised: bool, layers: tuple[bool, ...]) -> dict[str, Any]:
    """With one beside them that all rows meet."""
    return mixture(config, config.num_experts, config.moe_intermediate_size, normalised, layers, beside(config))


def _attention(config: Any, layers: int) -> AttentionSpec:
    """Of the layers with attention alone."""
    found = attention(config, kv_heads=config.num_key_value_heads, head_dim=config.head_dim)
    return AttentionSpec(layers, found.heads, found.kv_heads, found.head_dim, found.scale, (None,) * layers)


def _recurrent(config: Any, layers: int) -> RecurrentSpec:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        raise UnsupportedModel(f"linear_num_key_heads {keys} does not divide linear_num_value_heads {values}")
    if config.linear_conv_kernel_dim < 2:
        raise UnsupportedModel(f"linear_conv_kernel_dim {config.linear_conv_kernel_dim} is not supported; 2 or more is")
    sizes = (config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim)
    return RecurrentSpec(layers, keys, values, *sizes)


def _names(config: ModelConfig, mixed: tuple[str, ...], gates: tuple[str, ...]) -> Names:
    layer = "layers.{}."
    linear = layer + "linear_attn."
    named = {
        "embed": ("embed_tokens",),
        "final_norm": ("norm",),
        "layers.{}.attention_norm": (layer + "input_layernorm",),
        "layers.{}.qkv": tuple(layer + f"self_attn.{part}_proj" for part in "qkv"),
        "layers.{}.q_norm": (layer + "self_attn.q_norm",),
        "layers.{}.k_norm": (layer + "self_attn.k_norm",),
        "layers.{}.mixed": tuple(linear + part for part in mixed),
        "layers.{}.gates": tuple(linear + part for part in gates),
        "layers.{}.conv": (linear + "conv1d",),
        "layers.{}.delta": (linear.removesuffix("."),),
        "layers.{}.delta_norm": (linear + "norm",),
        "layers.{}.mlp_norm": (layer + "post_attention_layernorm",),
        "layers.{}.up": (layer + "mlp.gate_proj", layer + "mlp.up_proj"),
        "layers.{}.down": (layer + "mlp.down_proj",),
    }
    outs = {f"layers.{index}.out": (f"layers.{index}.self_attn.o_proj",) for index in range(config.layers)}
    return named | outs | {f"layers.{i}.out": (f"layers.{i}.linear_attn.out_proj",) for i in config.recurrent_layers}


def _next_names(config: ModelConfig) -> Names:
    return {**_names(config, ("in_proj_qkvz",), ("in_proj_ba",)), **APART, **SHARED}


def _next_names_together(config: ModelConfig) -> Names:
    return {**_next_names(config), **TOGETHER}


def _qwen3_5_names(config: ModelConfig) -> Names:
    return {**_names(config, ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")), **APART, **SHARED}


def _qwen3_5_names_together(config: ModelConfig) -> Names:
    return {**_qwen3_5_names(config), **TOGETHER}


def qkv_rows(config: ModelConfig) -> list[int]:
    """Rows of (q and its gate by head, k, v) as (q, k, v, gates)."""
    spec, dim = config.attention, config.attention.head_dim
    queries = [2 * head * dim + row for head in range(spec.heads) for row in range(dim)]
    first = 2 * spec.heads * dim
    return [*queries, *range(first, first + 2 * spec.kv_heads * dim), *(row + dim for row in queries)]


def next_rows(config: ModelConfig, name: str) -> list[int] | None:
    """Qwen3-Next's rows of a recurrent layer go by key head, each with what belongs to its value heads."""
    spec = config.recurrent
    assert spec is not None, "this family has recurrent layers"
    shared = spec.value_heads // spec.key_heads
    if name.endswith(".mixed.weight"):
        return by_head(spec.key_heads, (spec.key_dim, spec.key_dim, *(shared * spec.value_dim,) * 2))
    return by_head(spec.key_heads, (shared, shared)) if name.endswith(".gates.weight") else None


def by_head(heads: int, sizes: tuple[int, ...]) -> list[int]:
    """Rows that lie as (each part of head 0, each part of head 1, ...) in the order of the parts."""
    width = sum(sizes)
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    parts = zip(starts, sizes, strict=True)
    return [head * width + start + row for start, size in parts for head in range(heads) for row in range(size)]


PREFIXES = ("model.", "")
QWEN3_NEXT = Family(
    "qwen3_next", "transformers.models.qwen3_next.configuration_qwen3_next:Qwen3NextConfig", _next_facts, _next_names,
    PREFIXES, qkv_rows, next_rows, other_names=_next_names_together,
)  # fmt: skip
QWEN3_5 = Family(
    "qwen3_5_text", "transformers.models.qwen3_5.configuration_qwen3_5:Qwen3_5TextConfig", _qwen3_5_facts,
    _qwen3_5_names, PREFIXES, qkv_rows,
)  # fmt: skip
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text", "transformers.models.qwen3_5_moe.configuration_qwen3_5_moe:Qwen3_5MoeTextConfig",
    _qwen3_5_moe_facts, _qwen3_5_names, PREFIXES, qkv_rows, other_names=_qwen3_5_names_together,
)  # fmt: skip


def _with_vision(text: Family) -> Family:
    """Of which the text part is computed, and images are refused."""
    whole = text.model_type.removesuffix("_text")
    prefixes, unread = ("model.language_model.",), ("model.visual.",)
    return replace(text, model_type=whole, text_type=text.model_type, prefixes=prefixes, unread=unread)


QWEN3_5_WITH_VISION, QWEN3_5_MOE_WITH_VISION = map(_with_vision, (QWEN3_5, QWEN3_5_MOE))
