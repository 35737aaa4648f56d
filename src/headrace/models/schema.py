"""The fields of config.json and generation_config.json that are read, with their types and ranges.

A model folder comes from somewhere else. Whatever stands in it is checked here, before transformers or any arithmetic
sees it: a number of layers of 10^9, an epsilon of NaN or a list in place of a string ends with the file, the field and
what is allowed there. Fields that are not named here are not read.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from headrace.logs import shown
from headrace.models.files import is_gguf

MAX_LENGTH = 1 << 30
"""Positions that a model may reach, however its rotation is stretched."""

Count = Annotated[int, Meta(ge=1, le=1 << 16)] | None | UnsetType
Part = Annotated[int, Meta(ge=0, le=1 << 16)] | None | UnsetType
Layers = Annotated[int, Meta(ge=1, le=4096)] | None | UnsetType
WideCount = Annotated[int, Meta(ge=1, le=1 << 24)] | None | UnsetType
Counts = Annotated[list[Annotated[int, Meta(ge=1, le=1 << 24)]], Meta(max_length=4096)]
Length = Annotated[int, Meta(ge=1, le=MAX_LENGTH)] | None | UnsetType
Small = Annotated[int, Meta(ge=-1, le=1 << 30)]
Epsilon = Annotated[float, Meta(gt=0, le=1)] | None | UnsetType
Theta = Annotated[float, Meta(gt=0, le=1e15)] | None | UnsetType
Thetas = Annotated[list[Annotated[float, Meta(ge=0, le=1e15)]], Meta(max_length=4096)] | UnsetType | None
Factor = Annotated[float, Meta(gt=0, le=1e6)] | None | UnsetType
Scale = Annotated[float, Meta(ge=0, le=1e6)] | None | UnsetType
Bound = Annotated[float, Meta(ge=-1e6, le=1e6)] | None | UnsetType
Factors = Annotated[list[Annotated[float, Meta(gt=0, le=1e6)]], Meta(max_length=4096)] | None | UnsetType
Flag = bool | None | UnsetType
Flags = Annotated[list[Annotated[int, Meta(ge=0, le=1)]], Meta(max_length=4096)]
ShortText = Annotated[str, Meta(max_length=200)] | None | UnsetType
Label = Annotated[str, Meta(max_length=200)]
Tokens = Small | Annotated[list[Small], Meta(max_length=1024)] | None | UnsetType


class SparseFields(msgspec.Struct):
    """sparse_attention_config, of MiniMax-M3."""

    sparse_num_index_heads: Count = UNSET
    sparse_index_dim: Count = UNSET
    sparse_block_size: Count = UNSET
    sparse_topk_blocks: Count = UNSET
    sparse_local_block: Small | UnsetType | None = UNSET
    sparse_attention_freq: Flags | UnsetType | None = UNSET


class DeltaFields(msgspec.Struct):
    """linear_attn_config, of Kimi Linear, whose layers are counted from 1, and of GLM-5.3-Flash."""

    full_attn_layers: Counts | UnsetType | None = UNSET
    kda_layers: Counts | UnsetType | None = UNSET
    head_dim: Count = UNSET
    num_heads: Count = UNSET
    short_conv_kernel_size: Count = UNSET
    gate_lower_bound: Bound = UNSET
    safe_gate: Flag = UNSET


class RopeFields(msgspec.Struct):
    """rope_parameters, or rope_scaling as it was called."""

    rope_type: ShortText = UNSET
    type: ShortText = UNSET
    rope_theta: Theta = UNSET
    factor: Factor = UNSET
    original_max_position_embeddings: Length = UNSET
    low_freq_factor: Factor = UNSET
    high_freq_factor: Factor = UNSET
    attention_factor: Scale = UNSET
    beta_fast: Factor = UNSET
    beta_slow: Factor = UNSET
    mscale: Scale = UNSET
    mscale_all_dim: Scale = UNSET
    partial_rotary_factor: Factor = UNSET
    truncate: Flag = UNSET
    short_factor: Factors = UNSET
    long_factor: Factors = UNSET
    full_attention: RopeFields | UnsetType | None = UNSET
    sliding_attention: RopeFields | UnsetType | None = UNSET
    mrope_section: Annotated[list[Small], Meta(max_length=16)] | UnsetType | None = UNSET
    mrope_interleaved: Flag = UNSET
    llama_4_scaling_beta: Scale = UNSET
    alpha: Scale = UNSET
    max_position_embeddings: Length = UNSET


class LayerFields(msgspec.Struct):
    """What one layer has of its own. Others are refused by name."""

    head_dim: Count = UNSET
    num_key_value_heads: Count = UNSET


LayerNumber = Annotated[str, Meta(pattern="^[0-9]{1,4}$")]


class ConfigFields(msgspec.Struct):
    """config.json, of all families together."""

    architectures: Annotated[list[Annotated[str, Meta(max_length=200)]], Meta(max_length=16)] | UnsetType | None = UNSET
    model_type: ShortText = UNSET
    dtype: ShortText = UNSET
    torch_dtype: ShortText = UNSET
    text_config: ConfigFields | UnsetType | None = UNSET
    auto_map: dict[str, Any] | UnsetType | None = UNSET
    is_causal: Flag = UNSET
    num_labels: Count = UNSET
    id2label: Annotated[dict[str, Label], Meta(max_length=4096)] | UnsetType | None = UNSET
    vocab_size: WideCount = UNSET
    hidden_size: WideCount = UNSET
    n_embed: WideCount = UNSET
    n_embd: WideCount = UNSET
    n_layer: Layers = UNSET
    n_head: Count = UNSET
    n_positions: Length = UNSET
    n_inner: WideCount = UNSET
    scale_attn_weights: Flag = UNSET
    scale_attn_by_inverse_layer_idx: Flag = UNSET
    add_cross_attention: Flag = UNSET
    use_parallel_residual: Flag = UNSET
    rotary_pct: Factor = UNSET
    rotary_emb_base: Theta = UNSET
    intermediate_size: WideCount = UNSET
    ffn_hidden_size: WideCount = UNSET
    ffn_dim: WideCount = UNSET
    word_embed_proj_dim: WideCount = UNSET
    num_hidden_layers: Layers = UNSET
    num_attention_heads: Count = UNSET
    num_key_value_heads: Count = UNSET
    num_kv_heads: Count = UNSET
    head_dim: Part = UNSET
    max_position_embeddings: Length = UNSET
    rms_norm_eps: Epsilon = UNSET
    norm_eps: Epsilon = UNSET
    layer_norm_epsilon: Epsilon = UNSET
    layer_norm_eps: Epsilon = UNSET
    norm_epsilon: Epsilon = UNSET
    hidden_act: ShortText = UNSET
    activation: ShortText = UNSET
    activation_function: ShortText = UNSET
    attention_bias: Flag = UNSET
    qkv_bias: Flag = UNSET
    attention_out_bias: Flag = UNSET
    mlp_bias: Flag = UNSET
    use_bias: Flag = UNSET
    bias: Flag = UNSET
    enable_bias: Flag = UNSET
    alibi: Flag = UNSET
    parallel_attn: Flag = UNSET
    new_decoder_architecture: Flag = UNSET
    multi_query: Flag = UNSET
    num_ln_in_parallel_attn: Small | UnsetType | None = UNSET
    apply_residual_connection_post_layernorm: Flag = UNSET
    layer_norm_elementwise_affine: Flag = UNSET
    do_layer_norm_before: Flag = UNSET
    _remove_final_layer_norm: Flag = UNSET
    tie_word_embeddings: Flag = UNSET
    use_sliding_window: Flag = UNSET
    sliding_window: Small | UnsetType | None = UNSET
    max_window_layers: Small | UnsetType | None = UNSET
    num_experts: Annotated[int, Meta(ge=0, le=1 << 16)] | UnsetType | None = UNSET
    num_local_experts: Annotated[int, Meta(ge=0, le=1 << 16)] | UnsetType | None = UNSET
    num_experts_per_tok: Part = UNSET
    moe_intermediate_size: Annotated[int, Meta(ge=0, le=1 << 24)] | Counts | UnsetType | None = UNSET
    n_routed_experts: Count = UNSET
    n_shared_experts: Count = UNSET
    num_shared_experts: Annotated[int, Meta(ge=0, le=1 << 16)] | UnsetType | None = UNSET
    router_scaling_factor: Factor = UNSET
    moe_topk: Annotated[int, Meta(ge=1, le=1 << 16)] | Counts | UnsetType | None = UNSET
    n_group: Count = UNSET
    topk_group: Count = UNSET
    routed_scaling_factor: Factor = UNSET
    first_k_dense_replace: Annotated[int, Meta(ge=0, le=4096)] | UnsetType | None = UNSET
    moe_num_experts: Count = UNSET
    moe_num_shared_experts: Annotated[int, Meta(ge=0, le=1 << 16)] | UnsetType | None = UNSET
    moe_k: Count = UNSET
    moe_layer_start_index: Small | UnsetType | None = UNSET
    moe_layer_end_index: Small | UnsetType | None = UNSET
    moe_layer_interval: Count = UNSET
    use_qk_norm: Flag = UNSET
    qk_layernorm: Flag = UNSET
    use_qkv_bias: Flag = UNSET
    qk_norm_type: ShortText = UNSET
    scoring_func: ShortText = UNSET
    use_routing_bias: Flag = UNSET
    rotary_dim: Count = UNSET
    attn_type_list: Annotated[list[Small], Meta(max_length=4096)] | UnsetType | None = UNSET
    shared_expert_intermediate_size: Annotated[int, Meta(ge=0, le=1 << 24)] | UnsetType | None = UNSET
    shared_intermediate_size: Annotated[int, Meta(ge=0, le=1 << 24)] | UnsetType | None = UNSET
    norm_topk_prob: Flag = UNSET
    decoder_sparse_step: Count = UNSET
    mlp_only_layers: Annotated[list[Small], Meta(max_length=4096)] | UnsetType | None = UNSET
    topk_method: ShortText = UNSET
    moe_layer_freq: Count | Flags = UNSET
    sparse_attention_config: SparseFields | UnsetType | None = UNSET
    dense_intermediate_size: WideCount = UNSET
    index_block_size: Count = UNSET
    index_topk_blocks: Count = UNSET
    index_local_blocks: Small | UnsetType | None = UNSET
    mlp_layer_types: Annotated[list[ShortText], Meta(max_length=4096)] | UnsetType | None = UNSET
    kv_lora_rank: Count = UNSET
    q_lora_rank: Count = UNSET
    qk_nope_head_dim: Count = UNSET
    qk_rope_head_dim: Part = UNSET
    v_head_dim: Count = UNSET
    rope_interleave: Flag = UNSET
    index_topk: Count = UNSET
    index_head_dim: Count = UNSET
    index_n_heads: Count = UNSET
    index_topk_freq: Count = UNSET
    index_skip_topk_offset: Count = UNSET
    index_topk_pattern: Annotated[str, Meta(max_length=4096)] | list[ShortText] | UnsetType | None = UNSET
    indexer_types: Annotated[list[ShortText], Meta(max_length=4096)] | UnsetType | None = UNSET
    indexer_rope_interleave: Flag = UNSET
    hc_mult: Count = UNSET
    hc_eps: Scale = UNSET
    hc_magnitude: Factor = UNSET
    hc_sinkhorn_iters: Count = UNSET
    index_kpool: Count = UNSET
    index_kpool_always_select_tail: Flag = UNSET
    linear_lower_bound: Bound = UNSET
    clip_qkv: Factor = UNSET
    swiglu_alpha: Factor = UNSET
    swiglu_limit: Factor = UNSET
    layer_types: Annotated[list[Annotated[str, Meta(max_length=200)]], Meta(max_length=4096)] | UnsetType | None = UNSET
    no_rope_layers: Annotated[list[Annotated[int, Meta(ge=0, le=1)]], Meta(max_length=4096)] | UnsetType | None = UNSET
    no_rope_layer_interval: Count = UNSET
    attention_chunk_size: Length = UNSET
    attn_temperature_tuning: Flag | Small = UNSET
    floor_scale: Length = UNSET
    attn_scale: Scale = UNSET
    intermediate_size_mlp: WideCount = UNSET
    moe_layers: Annotated[list[Small], Meta(max_length=4096)] | UnsetType | None = UNSET
    interleave_moe_layer_step: Count = UNSET
    hidden_activation: ShortText = UNSET
    embedding_multiplier: Factor = UNSET
    scale_emb: Factor = UNSET
    scale_depth: Factor = UNSET
    dim_model_base: WideCount = UNSET
    position_embedding_type: ShortText = UNSET
    mamba_n_heads: Count = UNSET
    mamba_n_groups: Count = UNSET
    mamba_d_state: Count = UNSET
    mamba_d_conv: Count = UNSET
    mamba_conv_bias: Flag = UNSET
    mamba_proj_bias: Flag = UNSET
    mamba_d_head: Annotated[int, Meta(ge=1, le=1 << 16)] | ShortText = UNSET
    mamba_expand: Count = UNSET
    mamba_d_ssm: WideCount = UNSET
    mamba_rms_norm: Flag = UNSET
    mamba_norm_before_gate: Flag = UNSET
    projectors_bias: Flag = UNSET
    lm_head_multiplier: Factor = UNSET
    mlp_multipliers: Factors = UNSET
    key_multiplier: Factor = UNSET
    attention_in_multiplier: Factor = UNSET
    attention_out_multiplier: Factor = UNSET
    ssm_multipliers: Factors = UNSET
    ssm_in_multiplier: Factor = UNSET
    ssm_out_multiplier: Factor = UNSET
    hybrid_override_pattern: Annotated[str, Meta(max_length=4096)] | UnsetType | None = UNSET
    layers_block_type: Annotated[list[Label], Meta(max_length=4096)] | UnsetType | None = UNSET
    mamba_num_heads: Count = UNSET
    mamba_head_dim: Count = UNSET
    mamba_hidden_act: ShortText = UNSET
    ssm_state_size: Count = UNSET
    n_groups: Count = UNSET
    conv_kernel: Count = UNSET
    use_conv_bias: Flag = UNSET
    mlp_hidden_act: ShortText = UNSET
    moe_shared_expert_intermediate_size: WideCount = UNSET
    moe_latent_size: WideCount = UNSET
    attention_multiplier: Factor = UNSET
    residual_multiplier: Factor = UNSET
    logits_scaling: Factor = UNSET
    logit_scale: Factor = UNSET
    query_pre_attn_scalar: Factor = UNSET
    attn_logit_softcapping: Factor = UNSET
    final_logit_softcapping: Factor = UNSET
    use_bidirectional_attention: bool | Annotated[str, Meta(max_length=200)] | UnsetType | None = UNSET
    per_layer_config: dict[LayerNumber, LayerFields] | UnsetType | None = UNSET
    global_head_dim: Count = UNSET
    num_global_key_value_heads: Count = UNSET
    attention_k_eq_v: Flag = UNSET
    num_kv_shared_layers: Annotated[int, Meta(ge=0, le=4096)] | UnsetType | None = UNSET
    use_double_wide_mlp: Flag = UNSET
    hidden_size_per_layer_input: Annotated[int, Meta(ge=0, le=1 << 16)] | UnsetType | None = UNSET
    vocab_size_per_layer_input: WideCount = UNSET
    enable_moe_block: Flag = UNSET
    top_k_experts: Count = UNSET
    rope_local_base_freq: Theta = UNSET
    sliding_window_pattern: Annotated[int, Meta(ge=0, le=1 << 16)] | ShortText = UNSET
    full_attention_interval: Count = UNSET
    conv_L_cache: Count = UNSET
    conv_bias: Flag = UNSET
    use_sandwich_norm: Flag = UNSET
    use_attention_gate: Flag = UNSET
    full_attn_idxs: Annotated[list[Small], Meta(max_length=4096)] | UnsetType | None = UNSET
    tie_embedding: Flag = UNSET
    block_ff_dim: WideCount = UNSET
    block_auto_adjust_ff_dim: Flag = UNSET
    block_ffn_dim_multiplier: Factor = UNSET
    block_multiple_of: Count = UNSET
    num_dense_layers: Annotated[int, Meta(ge=0, le=4096)] | UnsetType | None = UNSET
    use_expert_bias: Flag = UNSET
    route_scale: Factor = UNSET
    global_attn_every_n_layers: Count = UNSET
    mup_enabled: Flag = UNSET
    use_post_norm: Flag = UNSET
    qk_scale_factor: Factor = UNSET
    output_multiplier: Factor = UNSET
    post_norm_eps: Epsilon = UNSET
    linear_conv_kernel_dim: Count = UNSET
    linear_head_dim: Count = UNSET
    linear_num_heads: Count = UNSET
    linear_attn_config: DeltaFields | UnsetType | None = UNSET
    model_max_length: Length = UNSET
    num_expert_group: Count = UNSET
    num_experts_per_token: Count = UNSET
    moe_renormalize: Flag = UNSET
    moe_router_activation_func: ShortText = UNSET
    mla_use_nope: Flag = UNSET
    linear_key_head_dim: Count = UNSET
    linear_value_head_dim: Count = UNSET
    linear_num_key_heads: Count = UNSET
    linear_num_value_heads: Count = UNSET
    pretraining_tp: Small | UnsetType | None = UNSET
    rope_theta: Theta = UNSET
    layer_rope_theta: Thetas = UNSET
    partial_rotary_factor: Factor = UNSET
    original_max_position_embeddings: Length = UNSET
    rope_parameters: RopeFields | UnsetType | None = UNSET
    rope_scaling: RopeFields | UnsetType | None = UNSET
    bos_token_id: Tokens = UNSET
    eos_token_id: Tokens = UNSET
    pad_token_id: Tokens = UNSET


class GenerationConfig(msgspec.Struct):
    """generation_config.json."""

    eos_token_id: Tokens = UNSET


def check(raw: dict[str, Any], schema: type[msgspec.Struct], path: Path) -> None:
    """Raises ValueError naming file and field where a value has another type than is read, or is out of range."""
    try:
        checked = msgspec.convert(raw, schema)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {_told(str(error), is_gguf(path))}") from None
    for part in (checked, getattr(checked, "text_config", UNSET)):
        if isinstance(part, ConfigFields) and part.head_dim == 0 and part.qk_rope_head_dim != 0:
            raise ValueError(f"{path}: {_told('Expected `int` >= 1 - at `$.head_dim`', is_gguf(path))}")
    for name, value in _floats(checked):
        if not math.isfinite(value):
            raise ValueError(f"{path}: {name} is {value}, a finite number is needed; download the file again")


def _told(error: str, gguf: bool) -> str:
    """What is wrong, and the remedy. gguf: the fields are made of the metadata of such a file."""
    if not gguf:
        return f"{shown(error)}; correct the field, or download the file again"
    wrong, _, field = error.partition(" - at `$.")
    name = shown(field.removesuffix("`"))
    return f"its metadata give a wrong value of what config.json calls {name}: {shown(wrong)}; download it again"


def _floats(record: msgspec.Struct, prefix: str = "") -> list[tuple[str, float]]:
    found = []
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, msgspec.Struct):
            found += _floats(value, f"{name}.")
        else:
            numbers = value if isinstance(value, list) else [value]
            found += [(prefix + name, number) for number in numbers if isinstance(number, float)]
    return found


def known(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields that are read."""
    return {name: value for name, value in raw.items() if name in ConfigFields.__struct_fields__}
