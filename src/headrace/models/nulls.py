"""Numbers that config.json leaves null, or out, where a model needs them: which ones they are, and how they are refused
by name. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, get_args, get_type_hints

from headrace.logs import shown
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel

NEVER_NULL = (
    "vocab_size", "hidden_size", "intermediate_size", "ffn_dim", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "max_window_layers", "num_experts", "num_local_experts",
    "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
    "decoder_sparse_step", "n_routed_experts", "n_shared_experts", "n_group", "topk_group", "routed_scaling_factor",
    "first_k_dense_replace", "num_shared_experts", "router_scaling_factor", "moe_topk", "moe_num_experts",
    "moe_num_shared_experts", "moe_k", "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval",
    "conv_L_cache", "block_multiple_of", "block_ffn_dim_multiplier", "num_dense_layers", "mamba_n_heads",
    "mamba_expand", "mamba_d_head", "rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon",
    "post_norm_eps", "logit_scale", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "no_rope_layer_interval", "interleave_moe_layer_step", "intermediate_size_mlp",
    "dense_intermediate_size", "num_kv_shared_layers", "query_pre_attn_scalar", "qk_scale_factor", "output_multiplier",
    "scale_emb", "index_topk", "index_head_dim", "index_n_heads", "index_block_size", "index_topk_blocks",
    "index_local_blocks", "swiglu_alpha", "swiglu_limit", "route_scale", "floor_scale", "attn_scale",
    "hc_mult", "hc_eps", "hc_magnitude", "hc_sinkhorn_iters", "index_kpool", "linear_head_dim", "linear_num_heads",
)  # fmt: skip
"""Where the class of a model has them, with a number in place of what config.json leaves out."""
NULLABLE = {
    "num_key_value_heads": (
        "deepseek_v3", "dots1", "ernie4_5", "falcon_h1", "granite_swa", "kimi_linear", "minicpm3", "mistral4", "qwen2",
        "qwen2_5_vl_text", "qwen3", "qwen3_vl_text", "seed_oss", "smollm3",
    ),
    "max_window_layers": ("dots1", "qwen2_5_vl_text"),
    "num_hidden_layers": ("nemotron_h",),
    "first_k_dense_replace": ("deepseek_v3", "dots1", "mistral4"),
    "num_experts": ("qwen3_5_text",),
    "num_local_experts": ("granitemoehybrid",),
    "num_experts_per_tok": ("granitemoehybrid", "qwen3_5_text"),
    "moe_intermediate_size": ("qwen3_5_text",),
    "shared_expert_intermediate_size": ("qwen3_5_text",),
    "decoder_sparse_step": ("qwen3_5_text", "qwen3_5_moe_text"),
    "intermediate_size": ("qwen3_5_moe_text",),
    "mamba_expand": ("falcon_h1",),
}  # fmt: skip
"""Of these the fields that some model_types need not have: they are counted from others, or not read."""
UNREADABLE = (KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError)
"""What arithmetic with fields raises that are null, missing or do not fit each other."""


class _Watched:
    """A configuration that remembers which of these numbers was the last one to be read as null."""

    def __init__(self, config: Any) -> None:
        self._config, self._null = config, ""

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        if value is None and name in NEVER_NULL:
            self._null = name
        return value


def facts_of(config: Any, facts: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """facts(config), which are fields of ModelConfig. Raises UnsupportedModel where a null keeps them from being worked
    out, or is left where ModelConfig has none."""
    watched = _Watched(config)
    try:
        found = facts(watched)
    except UNREADABLE as error:
        null = watched._null if "NoneType" in str(error) else ""
        raise UnsupportedModel(f"{null} is null; download the file again" if null else _told(error)) from error
    left = next(_left(ModelConfig, found), None)
    if left is not None:
        raise UnsupportedModel(f"{watched._null or left} is null; download the file again")
    return found


def readable(made: Callable[..., Any], *given: Any) -> Any:
    """made(*given). Raises UnsupportedModel where fields cannot be computed with."""
    try:
        return made(*given)
    except UNREADABLE as error:
        raise UnsupportedModel(_told(error)) from error


def _told(error: Exception) -> str:
    what = f"{error} is missing" if isinstance(error, KeyError) else shown(error)
    return f"a field is null or missing, or does not fit the others ({what}); download the file again"


def _left(kind: type, values: Mapping[str, Any]) -> Iterator[str]:
    """Names of values, and of those in their records, that are null and must not be in such a record."""
    for name, value in values.items():
        if value is None and NoneType not in get_args(_hints(kind)[name]):
            yield name
        if is_dataclass(value):
            yield from _left(type(value), {field.name: getattr(value, field.name) for field in fields(value)})


_hints = cache(get_type_hints)
