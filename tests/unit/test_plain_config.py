"""config.json read without transformers, against transformers' own reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.models.config import read_config
from headrace.models.families import FAMILIES
from headrace.models.plain_config import plain_config
from headrace.types import UnsupportedModel

pytestmark = pytest.mark.unit

LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
WINDOWS = dict(use_sliding_window=True, sliding_window=64, num_hidden_layers=3)
LONGROPE = dict(short_factor=[1.0, 1.5, 2.0, 2.5], long_factor=[1, 2, 4, 8])
SMALL = dict(hidden_size=32, num_attention_heads=4, original_max_position_embeddings=64, max_position_embeddings=512)
GPT_OSS_ROPE = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096
)
MINISTRAL3_ROPE = dict(
    type="yarn", rope_type="yarn", factor=16.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1, original_max_position_embeddings=16384,
)  # fmt: skip
HUNYUAN_ROPE = dict(type="dynamic", alpha=1000.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0)
FULL = ["full_attention"] * 3
NEXT, QWEN3_5, QWEN3_5_MOE = "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
GEMMA4, GLM_MOE = "Gemma4ForCausalLM", "Glm4MoeForCausalLM"
DOTS, QWEN2_MOE = "Dots1ForCausalLM", "Qwen2MoeForCausalLM"
ROUTED = dict(n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3)
ERNIE_MOE = "Ernie4_5_MoeForCausalLM"
MINIMAX, VL_MOE = "MiniMaxM2ForCausalLM", "Qwen3VLMoeForConditionalGeneration"
MROPE = dict(rope_type="default", mrope_section=[24, 20, 20], mrope_interleaved=True)
QWEN2_5_VL = "Qwen2_5_VLForConditionalGeneration"
GRANITE4, ATTENTION = "GraniteMoeHybridForCausalLM", dict(layer_types=["attention"] * 3, num_hidden_layers=3)
MELLUM, EXAONE_MOE, HUNYUAN_MOE = "MellumForCausalLM", "ExaoneMoeForCausalLM", "HunYuanMoEV1ForCausalLM"
GRANITE_SWA = "GraniteSWAForCausalLM"
NEMOTRON = "NemotronHForCausalLM"
MAMBA = dict(layer_types=["mamba", "attention", "mamba"], num_hidden_layers=3)
LFM2, CONVOLUTIONS = "Lfm2ForCausalLM", dict(layer_types=["conv", "full_attention", "conv"], num_hidden_layers=3)
GIVEN: list[dict[str, Any]] = [
    *(dict(architectures=[name]) for name in FAMILIES),
    dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=[3, 4]),
    dict(head_dim=None, num_key_value_heads=None, dtype="float16"),
    dict(rope_theta=5e5, max_position_embeddings=4096, torch_dtype="float32"),
    dict(rope_theta=5e5, rope_scaling=dict(type="linear", factor=2.0)),
    dict(rope_scaling=dict(rope_type="dynamic", factor=2)),
    dict(rope_parameters=dict(rope_type="llama3", rope_theta=5e5, **LLAMA3)),
    dict(rope_scaling=dict(rope_type="yarn", factor=4.0)),
    dict(rope_scaling=dict(rope_type="yarn", factor=4.0), original_max_position_embeddings=512),
    dict(rope_parameters=dict(rope_type="default"), partial_rotary_factor=0.5),
    dict(rope_parameters=dict(rope_type="su", factor=2.0)),
    dict(architectures=["MistralForCausalLM"], sliding_window=None),
    dict(architectures=["Qwen2ForCausalLM"], max_window_layers=1, **WINDOWS),
    dict(architectures=["Qwen3ForCausalLM"], layer_types=["full_attention"] * 2 + ["sliding_attention"], **WINDOWS),
    dict(architectures=["OPTForCausalLM"], word_embed_proj_dim=512, do_layer_norm_before=False, enable_bias=False),
    dict(architectures=["FalconForCausalLM"], n_embed=256, num_attention_heads=4, alibi=True, ffn_hidden_size=100),
    dict(architectures=["FalconForCausalLM"], new_decoder_architecture=True, num_kv_heads=71),
    dict(architectures=["Phi3ForCausalLM"], rope_scaling=dict(type="longrope", **LONGROPE), **SMALL),
    dict(architectures=["Phi3ForCausalLM"], rope_scaling=dict(type="su", **LONGROPE), **SMALL, sliding_window=64),
    dict(
        architectures=["Phi3ForCausalLM"],
        rope_scaling=dict(type="longrope", **LONGROPE),
        **SMALL | dict(hidden_size=64),
        partial_rotary_factor=0.5,
    ),
    dict(architectures=["Phi3ForCausalLM"], rope_scaling=dict(type="longrope"), **SMALL),
    dict(rope_scaling=dict(rope_type="longrope", **LONGROPE), **SMALL),
    dict(rope_scaling=dict(rope_type="longrope", **LONGROPE), **SMALL | dict(hidden_size=64)),
    dict(architectures=["SmolLM3ForCausalLM"], no_rope_layer_interval=2, num_hidden_layers=3, rope_theta=5e6),
    dict(architectures=["SmolLM3ForCausalLM"], no_rope_layers=[1, 0], num_hidden_layers=3, layer_types=FULL),
    dict(architectures=["SmolLM3ForCausalLM"], no_rope_layers=[1, 0, 0], **WINDOWS),
    dict(architectures=["GraniteForCausalLM"], embedding_multiplier=12, logits_scaling=8.0, attention_multiplier=0.1),
    dict(architectures=["GraniteMoeForCausalLM"], logits_scaling=None),
    dict(architectures=["GraniteMoeForCausalLM"], num_local_experts=40, num_experts=3, residual_multiplier=0.22),
    dict(architectures=["GraniteMoeForCausalLM"], num_experts_per_tok=9, shared_intermediate_size=64),
    dict(architectures=["GraniteMoeSharedForCausalLM"], shared_intermediate_size=64, attention_multiplier=0.015625),
    dict(architectures=["GraniteMoeSharedForCausalLM"], attention_bias=True, mlp_bias=True, logits_scaling=6),
    dict(architectures=[GRANITE4], num_local_experts=0, position_embedding_type="rope", **ATTENTION),
    dict(architectures=[GRANITE4], position_embedding_type="nope", shared_intermediate_size=512, **ATTENTION),
    dict(architectures=[GRANITE4], layer_types=["full_attention"] * 2, num_hidden_layers=2),
    dict(architectures=[GRANITE4], layer_types=["mamba", "attention"], num_hidden_layers=2),
    dict(architectures=[GRANITE4], mamba_n_heads=64, mamba_n_groups=2, mamba_d_state=128, **MAMBA),
    dict(architectures=[GRANITE4], mamba_d_head=64, mamba_d_conv=3, mamba_conv_bias=False, **MAMBA),
    dict(architectures=[GRANITE4], time_step_limit=[0.0, dict(__float__="Infinity")], num_local_experts=0, **MAMBA),
    dict(architectures=[GRANITE4], time_step_limit=[0.001, 0.1], **MAMBA),
    dict(architectures=[GRANITE4], mamba_n_groups=3, **MAMBA),
    dict(architectures=[GRANITE4], mamba_n_groups=None, **MAMBA),
    dict(architectures=[GRANITE4], mamba_proj_bias=True, **MAMBA),
    dict(architectures=[GRANITE4], mamba_d_conv=1, **MAMBA),
    dict(architectures=[GRANITE4], layer_types=["mamba", "conv"], num_hidden_layers=2),
    dict(architectures=[GRANITE4], layer_types=["mamba"] * 2, num_hidden_layers=2),
    dict(architectures=[GRANITE4], shared_intermediate_size=0, **ATTENTION),
    dict(architectures=[GRANITE4], position_embedding_type="alibi", **ATTENTION),
    dict(architectures=["GlmForCausalLM"], partial_rotary_factor=0.25, eos_token_id=[3]),
    dict(architectures=["Glm4ForCausalLM"], attention_bias=False, hidden_act="gelu"),
    dict(architectures=["Gemma2ForCausalLM"], attn_logit_softcapping=None, query_pre_attn_scalar=144),
    dict(architectures=["Gemma2ForCausalLM"], layer_types=FULL, num_hidden_layers=3, hidden_activation="relu"),
    dict(architectures=["Gemma2ForCausalLM"], use_bidirectional_attention=True),
    dict(architectures=["Gemma3ForCausalLM"], rope_scaling=dict(rope_type="linear", factor=8.0), rope_theta=2e6),
    dict(architectures=["Gemma3ForCausalLM"], sliding_window_pattern=3, rope_local_base_freq=5e3, sliding_window=512),
    dict(
        architectures=["Gemma3ForCausalLM"], rope_parameters=dict(full_attention=dict(rope_type="linear", factor=2.0))
    ),
    dict(architectures=["Gemma3ForConditionalGeneration"], num_hidden_layers=7, eos_token_id=[1, 106], dtype="float16"),
    dict(architectures=["Gemma3ForConditionalGeneration"], text_config=dict(model_type="gemma2")),
    dict(architectures=[GEMMA4], attention_k_eq_v=True, num_global_key_value_heads=2, hidden_size_per_layer_input=0),
    dict(architectures=[GEMMA4], num_kv_shared_layers=10, use_double_wide_mlp=True, num_hidden_layers=20),
    dict(architectures=[GEMMA4], num_kv_shared_layers=2, num_hidden_layers=7),
    dict(architectures=[GEMMA4], num_kv_shared_layers=3, num_hidden_layers=3),
    dict(architectures=[GEMMA4], enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=64),
    dict(architectures=[GEMMA4], enable_moe_block=True, num_experts=8, top_k_experts=9, moe_intermediate_size=64),
    dict(architectures=[GEMMA4], enable_moe_block=True, num_experts=8),
    dict(architectures=[GEMMA4], use_bidirectional_attention="vision", final_logit_softcapping=30.0),
    dict(architectures=[GEMMA4], use_bidirectional_attention="all"),
    dict(architectures=[GEMMA4], global_head_dim=72),
    dict(architectures=[GEMMA4], hidden_activation="silu"),
    dict(architectures=[GEMMA4], layer_types=FULL, num_hidden_layers=3),
    dict(architectures=[GEMMA4], num_hidden_layers=2, per_layer_config={"1": dict(head_dim=64, num_key_value_heads=2)}),
    dict(architectures=[GEMMA4], num_hidden_layers=3, per_layer_config={"1": dict(head_dim=64)}),
    dict(architectures=[GEMMA4], num_hidden_layers=2, per_layer_config={"1": dict(hidden_size=64)}),
    dict(architectures=["Gemma3ForCausalLM"], per_layer_config={"1": dict(head_dim=64)}),
    dict(
        architectures=[GEMMA4],
        rope_parameters=dict(
            full_attention=dict(rope_type="proportional", partial_rotary_factor=0.5, rope_theta=1e6, factor=8.0),
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
        ),
    ),
    dict(architectures=["Gemma4ForConditionalGeneration"], num_hidden_layers=7, eos_token_id=[1, 106]),
    dict(architectures=["Gemma4UnifiedForConditionalGeneration"], num_hidden_layers=7, attention_k_eq_v=True),
    dict(architectures=["Gemma4UnifiedForCausalLM"], num_global_key_value_heads=2, num_kv_shared_layers=10),
    dict(architectures=["Gemma4UnifiedForCausalLM"], use_bidirectional_attention="all", global_head_dim=128),
    dict(architectures=[NEXT], num_experts=0, num_hidden_layers=4),
    dict(architectures=[NEXT], num_experts=16, num_hidden_layers=8, decoder_sparse_step=2, norm_topk_prob=False),
    dict(architectures=[NEXT], num_experts_per_tok=513),
    dict(architectures=[QWEN3_5], num_experts=8),
    dict(architectures=[QWEN3_5_MOE], num_experts=16, num_local_experts=4, num_hidden_layers=8, intermediate_size=99),
    dict(architectures=[QWEN3_5_MOE], num_experts=0),
    dict(architectures=["Qwen3_5MoeForConditionalGeneration"], full_attention_interval=2, tie_word_embeddings=True),
    dict(architectures=[NEXT], mlp_only_layers=[0, 1], num_hidden_layers=2, full_attention_interval=2),
    dict(architectures=[QWEN3_5], full_attention_interval=2, partial_rotary_factor=0.5, num_hidden_layers=5),
    dict(architectures=[QWEN3_5], layer_types=["linear_attention"] * 3, num_hidden_layers=3),
    dict(architectures=[QWEN3_5], linear_num_key_heads=3),
    dict(
        architectures=[QWEN3_5],
        rope_parameters=dict(
            rope_type="default",
            rope_theta=1e7,
            mrope_section=[11, 11, 10],
            mrope_interleaved=True,
            partial_rotary_factor=0.25,
        ),
    ),
    dict(architectures=[LFM2], full_attn_idxs=[2, 5], num_hidden_layers=7, block_ff_dim=6656, tie_embedding=False),
    dict(architectures=[LFM2], block_auto_adjust_ff_dim=False, intermediate_size=100, **CONVOLUTIONS),
    dict(architectures=[LFM2], block_ffn_dim_multiplier=1.3, block_multiple_of=64, rope_theta=5e5, **CONVOLUTIONS),
    dict(architectures=[LFM2], conv_L_cache=4, norm_eps=1e-6, **CONVOLUTIONS),
    dict(architectures=[LFM2], conv_bias=True, **CONVOLUTIONS),
    dict(architectures=[LFM2], conv_L_cache=1, **CONVOLUTIONS),
    dict(architectures=[LFM2], layer_types=["conv"] * 3, num_hidden_layers=3),
    dict(architectures=[LFM2], layer_types=["conv", "sliding_attention"], num_hidden_layers=2),
    dict(
        architectures=["Lfm2MoeForCausalLM"], num_experts=16, tie_embedding=False, norm_topk_prob=False, **CONVOLUTIONS
    ),
    dict(architectures=["Lfm2MoeForCausalLM"], use_expert_bias=False, routed_scaling_factor=2.5, **CONVOLUTIONS),
    dict(architectures=["Lfm2MoeForCausalLM"], num_dense_layers=3, num_experts_per_tok=33, **CONVOLUTIONS),
    dict(architectures=["Lfm2VlForConditionalGeneration"], block_ff_dim=12288, num_key_value_heads=16, **CONVOLUTIONS),
    dict(architectures=[NEMOTRON], hybrid_override_pattern="M-M-M*-M"),
    dict(architectures=[NEMOTRON], hybrid_override_pattern="MEM*E", n_group=2, routed_scaling_factor=2.5),
    dict(architectures=[NEMOTRON], layers_block_type=["mamba", "moe", "attention"], num_local_experts=16),
    dict(architectures=[NEMOTRON], layers_block_type=["linear_attention", "full_attention"], num_hidden_layers=9),
    dict(architectures=[NEMOTRON], hybrid_override_pattern="-M*"),
    dict(architectures=[NEMOTRON], hybrid_override_pattern="M--*"),
    dict(architectures=[NEMOTRON], hybrid_override_pattern="M-M-"),
    dict(architectures=[NEMOTRON], hybrid_override_pattern="*-"),
    dict(architectures=[NEMOTRON], n_groups=3, hybrid_override_pattern="M*"),
    dict(architectures=[NEMOTRON], moe_latent_size=64),
    dict(architectures=[NEMOTRON], use_bias=True),
    dict(architectures=[NEMOTRON], sliding_window=64),
    dict(architectures=[NEMOTRON], mlp_bias=True),
    dict(architectures=[NEMOTRON], mlp_bias=True, hybrid_override_pattern="M-*-", mlp_hidden_act="gelu"),
    dict(architectures=[NEMOTRON], mlp_hidden_act="silu"),
    dict(architectures=[NEMOTRON], num_experts_per_tok=9),
    dict(architectures=["Qwen3MoeForCausalLM"], num_experts=16, mlp_only_layers=[1], decoder_sparse_step=2, **WINDOWS),
    dict(architectures=["Qwen3MoeForCausalLM"], num_local_experts=16, num_experts_per_tok=17),
    dict(architectures=["MixtralForCausalLM"], num_local_experts=4, sliding_window=64, rope_theta=5e5),
    dict(architectures=["MixtralForCausalLM"], num_experts=4, num_local_experts=3),
    dict(architectures=["OlmoeForCausalLM"], num_local_experts=16, norm_topk_prob=True, attention_bias=True),
    dict(architectures=["OlmoeForCausalLM"], clip_qkv=8.0),
    dict(architectures=["GptOssForCausalLM"], num_hidden_layers=3, num_experts=16, rope_theta=1e5),
    dict(architectures=["GptOssForCausalLM"], rope_scaling=GPT_OSS_ROPE, rope_theta=150000, sliding_window=64),
    dict(architectures=["GptOssForCausalLM"], num_experts=8, attention_bias=False),
    dict(architectures=["GptOssForCausalLM"], layer_types=FULL, num_hidden_layers=3, swiglu_limit=8.0),
    dict(architectures=[GLM_MOE], head_dim=128, n_group=8, topk_group=4, routed_scaling_factor=2.5, use_qk_norm=True),
    dict(architectures=[GLM_MOE], head_dim=128, num_local_experts=16, first_k_dense_replace=3, n_shared_experts=2),
    dict(architectures=[GLM_MOE], head_dim=128, first_k_dense_replace=46, attention_bias=True, rope_theta=1e6),
    dict(architectures=[GLM_MOE], head_dim=128, partial_rotary_factor=0.25, norm_topk_prob=False, eos_token_id=[3, 4]),
    dict(architectures=[GLM_MOE], head_dim=128, n_group=5),
    dict(architectures=[GLM_MOE], head_dim=128, n_group=8, topk_group=9),
    dict(architectures=[GLM_MOE], head_dim=128, n_group=64, topk_group=3),
    dict(architectures=[GLM_MOE], head_dim=128, n_group=128, topk_group=64),
    dict(architectures=[GLM_MOE]),
    dict(architectures=[MINIMAX], rotary_dim=64, num_experts=16, rope_theta=1e6, scoring_func="sigmoid"),
    dict(architectures=[MINIMAX], rotary_dim=64, partial_rotary_factor=0.25, num_experts_per_tok=4, use_qk_norm=True),
    dict(architectures=[MINIMAX], scoring_func="softmax"),
    dict(architectures=[MINIMAX], qk_norm_type="per_head"),
    dict(architectures=[MINIMAX], use_routing_bias=False),
    dict(architectures=[MINIMAX], shared_intermediate_size=64),
    dict(architectures=[MINIMAX], attn_type_list=[1, 0], num_hidden_layers=2),
    dict(architectures=[VL_MOE], num_experts=128, mlp_only_layers=[0], decoder_sparse_step=2, norm_topk_prob=True),
    dict(architectures=[VL_MOE], num_local_experts=16, rope_theta=5e6, tie_word_embeddings=False, eos_token_id=[3, 4]),
    dict(architectures=[VL_MOE], norm_topk_prob=False),
    dict(architectures=[VL_MOE], head_dim=128, attention_bias=True, rope_scaling=MROPE),
    dict(architectures=[ERNIE_MOE], num_experts=16, num_experts_per_tok=4, moe_num_experts=8, head_dim=64),
    dict(architectures=[ERNIE_MOE], moe_layer_start_index=3, moe_layer_end_index=9, moe_layer_interval=2),
    dict(architectures=[ERNIE_MOE], moe_num_shared_experts=0, tie_word_embeddings=False, rope_theta=1e6),
    dict(architectures=[ERNIE_MOE], moe_k=65),
    dict(architectures=[ERNIE_MOE], moe_k=None),
    dict(architectures=[ERNIE_MOE], moe_layer_end_index=None),
    dict(architectures=[ERNIE_MOE], use_bias=True),
    dict(architectures=["Ministral3ForCausalLM"], rope_scaling=MINISTRAL3_ROPE, rope_theta=1e6, sliding_window=64),
    dict(architectures=["Ministral3ForCausalLM"], rope_parameters=MINISTRAL3_ROPE | dict(llama_4_scaling_beta=None)),
    dict(architectures=["Mistral3ForConditionalGeneration"], num_hidden_layers=7, rope_theta=1e9, head_dim=128),
    dict(architectures=["Mistral3ForConditionalGeneration"], tie_word_embeddings=False, sliding_window=None),
    dict(architectures=["Mistral3ForConditionalGeneration"], text_config=dict(model_type="ministral3")),
    dict(architectures=["Mistral3ForConditionalGeneration"], text_config=dict(model_type="llama")),
    dict(architectures=[QWEN2_5_VL], rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]), rope_theta=1e6),
    dict(architectures=[QWEN2_5_VL], rope_scaling=dict(type="yarn", mrope_section=[16, 24, 24], factor=4.0)),
    dict(architectures=[QWEN2_5_VL], max_window_layers=1, **WINDOWS),
    dict(architectures=[QWEN2_5_VL], text_config=None, hidden_size=128, num_attention_heads=4, num_key_value_heads=2),
    dict(architectures=[QWEN2_5_VL], tie_word_embeddings=True, hidden_size=1024, num_hidden_layers=3),
    dict(
        architectures=["Qwen3VLForConditionalGeneration"],
        attention_bias=True,
        tie_word_embeddings=True,
        rope_scaling=dict(rope_type="default", mrope_section=[24, 20, 20], mrope_interleaved=True),
        rope_theta=5e6,
    ),
    dict(
        architectures=["SeedOssForCausalLM"], attention_bias=False, attention_out_bias=True, mlp_bias=True, head_dim=64
    ),
    dict(architectures=["ArceeForCausalLM"], mlp_bias=True, rope_scaling=dict(rope_type="yarn", factor=20.0)),
    dict(architectures=["ArceeForCausalLM"], hidden_act="silu"),
    dict(architectures=["Ernie4_5ForCausalLM"], use_bias=True, rope_theta=1e6, tie_word_embeddings=False),
    dict(architectures=["Ernie4_5ForCausalLM"], use_bias=None, num_key_value_heads=None),
    dict(architectures=["HunYuanDenseV1ForCausalLM"], rope_scaling=HUNYUAN_ROPE, head_dim=128, attention_bias=True),
    dict(architectures=["HunYuanDenseV1ForCausalLM"], rope_scaling=HUNYUAN_ROPE | dict(alpha=None), head_dim=128),
    dict(architectures=["HunYuanDenseV1ForCausalLM"], rope_scaling=dict(type="dynamic", factor=2.0), head_dim=64),
    dict(architectures=["Olmo2ForCausalLM"], rope_theta=5e5, attention_bias=True, num_key_value_heads=8),
    dict(architectures=["Olmo3ForCausalLM"], rope_scaling=dict(rope_type="yarn", factor=8.0), rope_theta=6e5),
    dict(architectures=["Olmo3ForCausalLM"], rope_parameters=dict(rope_type="yarn", factor=8.0)),
    dict(architectures=["Gemma3ForCausalLM"], rope_parameters=dict(rope_theta=5e5)),
    dict(architectures=["Olmo3ForCausalLM"], layer_types=FULL, num_hidden_layers=3, sliding_window=None),
    dict(
        architectures=["Olmo3ForCausalLM"], rope_parameters=dict(sliding_attention=dict(rope_type="linear", factor=2.0))
    ),
    dict(architectures=["Exaone4ForCausalLM"], num_hidden_layers=7, sliding_window_pattern=3, head_dim=128),
    dict(architectures=["Exaone4ForCausalLM"], num_hidden_layers=3, layer_types=FULL, sliding_window=None),
    dict(architectures=["Exaone4ForCausalLM"], num_hidden_layers=3, layer_types=FULL, sliding_window_pattern="LLLG"),
    dict(architectures=["CohereForCausalLM"], num_key_value_heads=8, logit_scale=0.5, max_position_embeddings=131072),
    dict(architectures=["CohereForCausalLM"], rope_theta=8e6, attention_bias=True, tie_word_embeddings=False),
    dict(architectures=["Starcoder2ForCausalLM"], sliding_window=4096, norm_epsilon=1e-6, use_bias=False),
    dict(architectures=["Starcoder2ForCausalLM"], hidden_act="gelu", rope_theta=999999.4420358813),
    dict(architectures=["MiniCPM3ForCausalLM"], v_head_dim=32, scale_depth=1, dim_model_base=None, q_lora_rank=None),
    dict(architectures=["MiniCPM3ForCausalLM"], scale_depth=None, scale_emb=1, mlp_bias=True, attention_bias=True),
    dict(architectures=["MiniCPM3ForCausalLM"], rope_scaling=dict(type="longrope", **LONGROPE), qk_rope_head_dim=8),
    dict(architectures=["Mistral4ForCausalLM"], rope_parameters=MINISTRAL3_ROPE | dict(rope_theta=1e6)),
    dict(architectures=["Mistral4ForCausalLM"], rope_parameters=MINISTRAL3_ROPE | dict(partial_rotary_factor=0.25)),
    dict(architectures=["Mistral4ForCausalLM"], first_k_dense_replace=1, n_group=4, topk_group=2, norm_topk_prob=False),
    dict(architectures=["Mistral4ForCausalLM"], q_lora_rank=None, rope_interleave=False, num_key_value_heads=None),
    dict(architectures=[DOTS], **ROUTED, first_k_dense_replace=1, sliding_window=None, use_sliding_window=False),
    dict(architectures=[DOTS], **ROUTED, num_hidden_layers=3, max_window_layers=1, norm_topk_prob=True),
    dict(architectures=[DOTS], **ROUTED, num_key_value_heads=None, n_group=4, topk_group=2, routed_scaling_factor=2.5),
    dict(architectures=["SolarOpenForCausalLM"], partial_rotary_factor=0.5, routed_scaling_factor=2.5, head_dim=64),
    dict(architectures=["SolarOpenForCausalLM"], attention_bias=True, n_shared_experts=2, norm_topk_prob=False),
    dict(architectures=[QWEN2_MOE], mlp_only_layers=[0], norm_topk_prob=True, qkv_bias=False),
    dict(architectures=[QWEN2_MOE], **WINDOWS, max_window_layers=2),
    dict(architectures=[QWEN2_MOE], layer_types=FULL, num_hidden_layers=3, decoder_sparse_step=2),
    dict(architectures=["GemmaForCausalLM"], hidden_act="gelu", num_key_value_heads=1, head_dim=256, rope_theta=5e4),
    dict(architectures=["GemmaForCausalLM"], use_bidirectional_attention=True),
    dict(architectures=["CwmForCausalLM"], num_hidden_layers=5, rope_scaling=dict(rope_type="llama3", **LLAMA3)),
    dict(architectures=["CwmForCausalLM"], layer_types=FULL, num_hidden_layers=3, eos_token_id=7),
    dict(architectures=["MinistralForCausalLM"], sliding_window=None, num_key_value_heads=4, num_hidden_layers=2),
    dict(architectures=["MinistralForCausalLM"], layer_types=[*FULL[1:], "sliding_attention"], num_hidden_layers=3),
    dict(architectures=["YoutuForCausalLM"], q_lora_rank=None, v_head_dim=64, rope_interleave=False),
    dict(architectures=["YoutuForCausalLM"], rope_theta=1.6e6, attention_bias=True, tie_word_embeddings=False),
    dict(architectures=[MELLUM], layer_types=[*FULL[1:], "sliding_attention"], num_hidden_layers=3, num_experts=16),
    dict(architectures=[MELLUM], mlp_layer_types=["dense", "sparse"], num_hidden_layers=2, norm_topk_prob=False),
    dict(architectures=[EXAONE_MOE], num_hidden_layers=6, first_k_dense_replace=2, num_experts=16, n_group=4),
    dict(architectures=[EXAONE_MOE], sliding_window_pattern=3, num_hidden_layers=5, num_experts_per_tok=2),
    dict(architectures=[HUNYUAN_MOE], num_experts=64, moe_topk=[8] * 32, rope_scaling=HUNYUAN_ROPE),
    dict(architectures=[HUNYUAN_MOE], num_experts=64, moe_topk=8, moe_intermediate_size=[3072] * 32, head_dim=128),
    dict(architectures=[HUNYUAN_MOE], num_experts=64, moe_topk=[8, 4], num_hidden_layers=2),
    dict(architectures=[HUNYUAN_MOE], num_local_experts=16, num_experts_per_tok=2, attention_bias=True),
    dict(architectures=["HYV3ForCausalLM"], router_scaling_factor=1.5, num_shared_experts=2, num_hidden_layers=3),
    dict(architectures=["HYV3ForCausalLM"], num_experts=16, attention_bias=True, rope_theta=1e6, mlp_bias=True),
    dict(architectures=[GRANITE_SWA], layer_rope_theta=[0, 1e4, 1e4, 1e4], num_hidden_layers=4, rope_theta=5e5),
    dict(architectures=[GRANITE_SWA], layer_rope_theta=[5e5, 0, 0, 0], num_hidden_layers=4, sliding_window=64),
    dict(architectures=[GRANITE_SWA], layer_rope_theta=[5e5, 1e4, 1e5, 0], num_hidden_layers=4),
    dict(architectures=[GRANITE_SWA], layer_rope_theta=[0, 0, 0], num_hidden_layers=3, logits_scaling=8),
    dict(architectures=["GraniteMoeSWAForCausalLM"], shared_intermediate_size=64, num_local_experts=40),
    dict(architectures=["GraniteMoeSWAForCausalLM"], layer_types=FULL, num_hidden_layers=3, rope_theta=1e6),
    dict(architectures=["Lfm3ForCausalLM"], num_hidden_layers=7, use_attention_gate=False, head_dim=64),
    dict(architectures=["Lfm3ForCausalLM"], layer_types=["conv", "sliding_attention"], num_hidden_layers=2),
    dict(architectures=["Lfm3ForCausalLM"], layer_types=["conv", "chunked_attention"], num_hidden_layers=2),
    dict(architectures=["Lfm3ForCausalLM"], sliding_window=None, use_sandwich_norm=False, conv_L_cache=3),
    dict(architectures=["Lfm3ForCausalLM"], rope_parameters=dict(full_attention=dict(rope_type="default"))),
    dict(architectures=["Lfm3ForCausalLM"], conv_bias=True),
    dict(architectures=["Cohere2ForCausalLM"], sliding_window_pattern=2, rope_theta=5e4, num_key_value_heads=8),
    dict(architectures=["Cohere2ForCausalLM"], layer_types=FULL, num_hidden_layers=3, logit_scale=0.5, head_dim=256),
    dict(num_attention_heads=4, num_key_value_heads=3),
    dict(architectures=["GPT2LMHeadModel"]),
    dict(pretraining_tp=2),
    dict(hidden_act="gelu"),
    dict(quantization_config=dict(bits=4)),
]


def written(folder: Path, given: dict[str, Any]) -> Path:
    raw = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **given}
    family = FAMILIES.get(raw["architectures"][0])
    raw["model_type"] = family.model_type if family else "other"
    if family and family.text_type and "text_config" not in given:
        raw["text_config"] = given | {"model_type": family.text_type}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_it_reads_and_refuses_what_transformers_does(given: dict[str, Any], tmp_path: Path) -> None:
    folder = written(tmp_path, given)
    try:
        theirs: Any = read_config(folder)
    except UnsupportedModel as error:
        with pytest.raises(UnsupportedModel) as refused:
            plain_config(folder)
        assert str(refused.value) == str(error)
    else:
        assert plain_config(folder) == theirs


def test_quantisation_stands_beside_the_text_part(tmp_path: Path) -> None:
    given = dict(architectures=["Qwen3_5ForConditionalGeneration"], text_config=dict(model_type="qwen3_5_text"))
    folder = written(tmp_path, given | dict(quantization_config=dict(quant_method="gptq", bits=3)))
    for read in (read_config, plain_config):
        with pytest.raises(UnsupportedModel, match="gptq of 3 bits"):
            read(folder)


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([0.0, float("inf")], None),
        (None, None),
        ([0.001, 0.1], r"time_step_limit \[0.001, 0.1\]"),
        (3, "time_step_limit 3"),
    ],
)
def test_steps_of_mamba_layers_have_no_limits(steps: Any, told: str | None, tmp_path: Path) -> None:
    folder = written(tmp_path, dict(architectures=[GRANITE4], time_step_limit=steps, **MAMBA))
    for read in (read_config, plain_config):
        if told is None:
            assert read(folder).recurrent is not None
            continue
        with pytest.raises(UnsupportedModel, match=told):
            read(folder)


@pytest.mark.parametrize(
    "given",
    [
        dict(architectures=["Exaone4ForCausalLM"], sliding_window=None),
        dict(architectures=["ExaoneMoeForCausalLM"], sliding_window=None),
        dict(architectures=["Exaone4ForCausalLM"], sliding_window_pattern="LLLG"),
        dict(architectures=["Cohere2ForCausalLM"], sliding_window_pattern=0),
        dict(architectures=["Gemma3ForCausalLM"], sliding_window_pattern=0),
    ],
)
def test_layers_that_nothing_tells_apart(given: dict[str, Any], tmp_path: Path) -> None:
    folder = written(tmp_path, given)
    for read, told in ((read_config, "transformers does not accept"), (plain_config, "layer_types is missing")):
        with pytest.raises(UnsupportedModel, match=told):
            read(folder)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (dict(layers_block_type=["mamba", "sliding_attention"]), "layers_block_type with 'sliding_attention'"),
        (dict(hybrid_override_pattern="M?*"), "hybrid_override_pattern is no pattern of M, E, \\* and -"),
        (dict(architectures=[MELLUM], mlp_layer_types=["dense"]), "names 1 layers, num_hidden_layers is 28"),
        (dict(architectures=[EXAONE_MOE], mlp_layer_types=["dense", "routed"]), "mlp_layer_types with 'routed'"),
    ],
)
def test_kinds_of_layers_that_no_such_model_has(given: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = written(tmp_path, dict(architectures=[NEMOTRON]) | given)
    for read, expected in ((read_config, "transformers does not accept"), (plain_config, told)):
        with pytest.raises(UnsupportedModel, match=expected):
            read(folder)


@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_null_where_a_number_is_needed(architecture: str, name: str, tmp_path: Path) -> None:
    folder = written(tmp_path, {"architectures": [architecture], name: None})
    with pytest.raises(UnsupportedModel, match=rf"config.json: {name} is null; download the file again"):
        plain_config(folder)
