"""Kinds of small models with experts: see tests.support.checkpoints."""

from __future__ import annotations

from typing import Any

from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    ExaoneMoeConfig,
    ExaoneMoeForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    GraniteMoeSWAConfig,
    GraniteMoeSWAForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    HYV3Config,
    HYV3ForCausalLM,
    HYV4Config,
    HYV4ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MellumConfig,
    MellumForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SolarOpenConfig,
    SolarOpenForCausalLM,
)

from tests.support.dense_kinds import HUNYUAN_ROPE
from tests.support.kind_sizes import GQA, LLAMA_SIZES, MULTIPLIERS, NO_TOKEN, SHORT_LENGTH, WINDOW, Build, of, rope


def _qwen3_moe(**fields: Any) -> PreTrainedModel:
    sizes = dict(head_dim=64, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=3)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**LLAMA_SIZES, **GQA, **sizes, **fields}))


def _qwen3_vl_moe(**fields: Any) -> PreTrainedModel:
    sizes = dict(head_dim=64, moe_intermediate_size=192, num_experts=8, num_experts_per_tok=3, mlp_only_layers=[0])
    mrope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[12, 10, 10], mrope_interleaved=True)
    text = {**LLAMA_SIZES, **GQA, **sizes, "rope_parameters": mrope, "tie_word_embeddings": False, **fields}
    vision = dict(hidden_size=32, intermediate_size=64, depth=1, num_heads=2, out_hidden_size=128)
    vision |= dict(num_position_embeddings=16, deepstack_visual_indexes=[0])
    tokens = dict(image_token_id=1, video_token_id=2, vision_start_token_id=3, vision_end_token_id=4)
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, eos_token_id=NO_TOKEN, **tokens)
    return Qwen3VLMoeForConditionalGeneration(config)


_qwen2_moe = of(
    Qwen2MoeForCausalLM, Qwen2MoeConfig, **GQA, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=64,
    shared_expert_intermediate_size=128,
)  # fmt: skip


def _mixtral(**fields: Any) -> PreTrainedModel:
    sizes = dict(intermediate_size=128, num_local_experts=4)
    return MixtralForCausalLM(MixtralConfig(**{**LLAMA_SIZES, **GQA, **sizes, **fields}))


def _olmoe(**fields: Any) -> PreTrainedModel:
    sizes = dict(intermediate_size=64, num_experts=8, num_experts_per_tok=4)
    return OlmoeForCausalLM(OlmoeConfig(**{**LLAMA_SIZES, **sizes, **fields}))


def _gpt_oss(**fields: Any) -> PreTrainedModel:
    sizes = dict(head_dim=64, intermediate_size=64, num_local_experts=8, num_experts_per_tok=3, sliding_window=WINDOW)
    return GptOssForCausalLM(GptOssConfig(**{**LLAMA_SIZES, **GQA, **sizes, **fields}))


GPT_OSS_ROPE = rope("yarn", factor=4.0, original_max_position_embeddings=SHORT_LENGTH, truncate=False)


GRANITE_EXPERTS = dict(intermediate_size=64, num_local_experts=8, num_experts_per_tok=3)


_granite_moe = of(GraniteMoeForCausalLM, GraniteMoeConfig, **MULTIPLIERS, **GRANITE_EXPERTS)


_granite_moe_shared = of(
    GraniteMoeSharedForCausalLM, GraniteMoeSharedConfig, **MULTIPLIERS, **GRANITE_EXPERTS, shared_intermediate_size=128
)


_glm4_moe = of(
    Glm4MoeForCausalLM, Glm4MoeConfig, head_dim=64, num_hidden_layers=3, n_routed_experts=8, num_experts_per_tok=3,
    moe_intermediate_size=64, routed_scaling_factor=2.5,
)  # fmt: skip


ROUTED = dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=64, routed_scaling_factor=2.5)
_dots1 = of(Dots1ForCausalLM, Dots1Config, **GQA, **ROUTED, n_shared_experts=2, sliding_window=None)
_solar_open = of(SolarOpenForCausalLM, SolarOpenConfig, **GQA, **ROUTED, head_dim=32)


MIXED = dict(sliding_window=WINDOW, layer_types=["full_attention", "sliding_attention", "full_attention"])
CHOSEN = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=64, num_hidden_layers=3)
_exaone_moe = of(ExaoneMoeForCausalLM, ExaoneMoeConfig, head_dim=64, **CHOSEN, **MIXED)
_hunyuan_moe = of(
    HunYuanMoEV1ForCausalLM, HunYuanMoEV1Config, head_dim=64, num_experts=8, moe_topk=3, intermediate_size=64,
    **HUNYUAN_ROPE,
)  # fmt: skip
_hy3 = of(HYV3ForCausalLM, HYV3Config, head_dim=64, **CHOSEN)
_mellum = of(MellumForCausalLM, MellumConfig, head_dim=64, **CHOSEN, **MIXED, rope_parameters=None)
_afmoe = of(AfmoeForCausalLM, AfmoeConfig, head_dim=64, **CHOSEN, **MIXED, mup_enabled=True)
_granite_moe_swa = of(
    GraniteMoeSWAForCausalLM, GraniteMoeSWAConfig, **MULTIPLIERS, **GRANITE_EXPERTS, num_hidden_layers=3, **MIXED
)


_ernie_moe = of(
    Ernie4_5_MoeForCausalLM, Ernie4_5_MoeConfig, num_hidden_layers=3, moe_num_experts=8, moe_k=3,
    moe_intermediate_size=64, moe_layer_end_index=1, eos_token_id=NO_TOKEN,
)  # fmt: skip


_minimax_m2 = of(
    MiniMaxM2ForCausalLM, MiniMaxM2Config, head_dim=64, rotary_dim=32, num_local_experts=8, num_experts_per_tok=3,
    intermediate_size=64,
)  # fmt: skip


LATENT = dict(
    kv_lora_rank=48, q_lora_rank=None, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=48, num_key_value_heads=4,
    num_hidden_layers=3, first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=64,
    n_shared_experts=2,
)  # fmt: skip


LATENT_YARN = rope("yarn", factor=4.0, original_max_position_embeddings=SHORT_LENGTH, mscale=0.7, mscale_all_dim=0.9)


_deepseek_v3 = of(DeepseekV3ForCausalLM, DeepseekV3Config, **LATENT)


_glm_lite = of(Glm4MoeLiteForCausalLM, Glm4MoeLiteConfig, **LATENT, mlp_layer_types=["dense", "sparse", "sparse"])


INDEXED = LATENT | dict(
    q_lora_rank=64, index_topk=40, index_head_dim=32, index_n_heads=16, n_group=1, topk_group=1,
)  # fmt: skip
_deepseek_v32 = of(DeepseekV32ForCausalLM, DeepseekV32Config, **INDEXED)


_glm_dsa = of(GlmMoeDsaForCausalLM, GlmMoeDsaConfig, **INDEXED, indexer_types=["full", "shared", "full"])


_hy4 = of(
    HYV4ForCausalLM, HYV4Config, **{name: value for name, value in INDEXED.items() if name != "first_k_dense_replace"},
    mlp_layer_types=["dense", "sparse", "sparse"], indexer_types=["full", "shared", "full"], hc_mult=3, hc_eps=1e-3,
)  # fmt: skip


_deepseek_v2 = of(DeepseekV2ForCausalLM, DeepseekV2Config, **LATENT)


_mistral4 = of(Mistral4ForCausalLM, Mistral4Config, **LATENT)
TEMPERED = rope(
    "yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
    mscale_all_dim=1.0, llama_4_scaling_beta=0.5,
)  # fmt: skip


_granite4 = of(
    GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig, **MULTIPLIERS, **GRANITE_EXPERTS | dict(num_local_experts=0),
    shared_intermediate_size=192, layer_types=["attention"] * 2,
)  # fmt: skip

_llama4 = of(
    Llama4ForCausalLM, Llama4TextConfig, head_dim=64, num_hidden_layers=3, no_rope_layers=[1, 0, 1], moe_layers=[1, 2],
    num_local_experts=4, intermediate_size=128, intermediate_size_mlp=192, attention_chunk_size=128, floor_scale=50,
    attn_scale=0.3,
)  # fmt: skip
"""Blocks of two chunks of the pool, and factors of queries that change every 50 tokens."""
EXPERTS: dict[str, tuple[Build, dict[str, Any]]] = {
    "qwen3_moe": (_qwen3_moe, dict(norm_topk_prob=True)),
    "qwen3_moe_mixed": (_qwen3_moe, dict(num_hidden_layers=3, mlp_only_layers=[1], attention_bias=True)),
    "qwen3_vl_moe": (_qwen3_vl_moe, {}),
    "qwen2_moe": (_qwen2_moe, dict(mlp_only_layers=[0], use_sliding_window=True, sliding_window=WINDOW)),
    "dots1": (_dots1, dict(first_k_dense_replace=1, n_group=4, topk_group=2, attention_bias=True)),
    "solar_open": (_solar_open, dict(attention_bias=True)),
    "exaone_moe": (_exaone_moe, dict(n_group=4, topk_group=2)),
    "hunyuan_moe": (_hunyuan_moe, dict(attention_bias=True)),
    "hy3": (_hy3, dict(num_shared_experts=2)),
    "mellum": (_mellum, dict(mlp_layer_types=["sparse", "dense", "sparse"], attention_bias=True)),
    "afmoe": (_afmoe, dict(route_scale=1.5)),
    "granite_moe_swa": (_granite_moe_swa, dict(layer_rope_theta=[0.0, 1e4, 0.0])),
    "mixtral": (_mixtral, dict(sliding_window=WINDOW)),
    "olmoe": (_olmoe, GQA),
    "gpt_oss": (_gpt_oss, GPT_OSS_ROPE),
    "granite_moe": (_granite_moe, dict(tie_word_embeddings=True)),
    "granite_moe_shared": (_granite_moe_shared, dict(attention_bias=True)),
    "granite4": (_granite4, {}),
    "granite4_experts": (_granite4, dict(num_local_experts=8, position_embedding_type="rope")),
    "glm4_moe": (_glm4_moe, dict(use_qk_norm=True, attention_bias=True)),
    "glm4_moe_groups": (_glm4_moe, dict(n_group=4, topk_group=2, norm_topk_prob=False, n_shared_experts=2)),
    "llama4": (_llama4, dict(num_experts_per_tok=2)),
    "minimax_m2": (_minimax_m2, {}),
    "ernie_moe": (_ernie_moe, {}),
    "deepseek_v2": (_deepseek_v2, LATENT_YARN),
    "deepseek_v2_groups": (_deepseek_v2, dict(topk_method="group_limited_greedy", n_group=4, topk_group=2)),
    "deepseek_v3": (_deepseek_v3, LATENT_YARN | dict(q_lora_rank=64, n_group=4, topk_group=2)),
    "deepseek_v32": (_deepseek_v32, LATENT_YARN | dict(n_group=4, topk_group=2)),
    "glm_dsa": (_glm_dsa, dict(attention_bias=True)),
    "hy4": (_hy4, dict(hc_magnitude=1.5, n_shared_experts=1)),
    "mistral4": (_mistral4, TEMPERED | dict(q_lora_rank=64, n_group=4, topk_group=2)),
    "glm_lite": (_glm_lite, dict(n_group=1, topk_group=1, rope_interleave=False)),
    "deepseek_v2_lora": (_deepseek_v2, dict(q_lora_rank=64, attention_bias=True)),
}
"""Every kind with experts, as (constructor, its fields)."""
