"""What transformers' configuration classes put where config.json says nothing, of models with experts: data of
plain_config.

tests/unit/test_plain_config.py compares it with the classes.
"""

from __future__ import annotations

from typing import Any

from headrace.models.plain_defaults import COMMON, GLM, GRANITE, LATENT, LFM2, LLAMA, QWEN

INDEXED: dict[str, Any] = LATENT | dict(
    bos_token_id=0, eos_token_id=1, n_routed_experts=256, n_shared_experts=1, routed_scaling_factor=2.5,
    norm_topk_prob=True, num_experts_per_tok=8, moe_intermediate_size=2048, mlp_layer_types=None,
    first_k_dense_replace=3, index_topk=2048, index_head_dim=128,
)  # fmt: skip
HY4: dict[str, Any] = LATENT | dict(
    vocab_size=120832, hidden_size=2816, intermediate_size=6912, moe_intermediate_size=768, num_hidden_layers=34,
    num_attention_heads=32, max_position_embeddings=262144, rms_norm_eps=1e-5, bos_token_id=120000, eos_token_id=120025,
    n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, routed_scaling_factor=2.827, norm_topk_prob=True,
    n_group=1, topk_group=1, q_lora_rank=1536, qk_nope_head_dim=192, v_head_dim=256, mlp_layer_types=None,
    layer_types=None, index_topk=2048, index_head_dim=128, index_n_heads=16, indexer_types=None, hc_mult=4, hc_eps=1e-6,
    hc_magnitude=2.0, swiglu_limit=10.0,
)  # fmt: skip
GLM5_NEXT: dict[str, Any] = LATENT | dict(
    vocab_size=154880, hidden_size=4096, intermediate_size=12288, moe_intermediate_size=2048, num_hidden_layers=45,
    num_attention_heads=64, num_key_value_heads=64, max_position_embeddings=1048576, rms_norm_eps=1e-5,
    pad_token_id=154820, bos_token_id=None, eos_token_id=None, n_routed_experts=288, n_shared_experts=1,
    num_experts_per_tok=8, routed_scaling_factor=2.5, norm_topk_prob=True, n_group=1, topk_group=1, q_lora_rank=1536,
    qk_nope_head_dim=256, qk_rope_head_dim=0, v_head_dim=256, mlp_layer_types=None, layer_types=None, index_topk=2048,
    index_head_dim=128, index_n_heads=32, indexer_types=None, index_topk_pattern=None, index_topk_freq=1,
    index_skip_topk_offset=2, index_kpool=16, index_kpool_always_select_tail=True, linear_head_dim=128,
    linear_num_heads=64, linear_conv_kernel_dim=4, linear_lower_bound=-5.0, hc_mult=4, hc_eps=1e-6,
    hc_sinkhorn_iters=20, swiglu_limit=10.0,
)  # fmt: skip
QWEN3_NEXT: dict[str, Any] = COMMON | dict(
    vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=48, num_attention_heads=16,
    num_key_value_heads=2, hidden_act="silu", max_position_embeddings=32768, rms_norm_eps=1e-6, attention_bias=False,
    head_dim=256, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
    linear_num_value_heads=32, layer_types=None, full_attention_interval=4, num_experts=512, num_experts_per_tok=10,
    moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True, decoder_sparse_step=1,
    mlp_only_layers=None,
)  # fmt: skip
ROUTED: dict[str, dict[str, Any]] = {
    "hunyuan_v1_moe": LLAMA | dict(vocab_size=290943, rms_norm_eps=1e-5, num_experts=1, moe_topk=1),
    "hy_v3": LLAMA
    | dict(
        vocab_size=120832, intermediate_size=13312, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None,
        num_experts=192, num_experts_per_tok=8, num_shared_experts=1, moe_intermediate_size=1536,
        router_scaling_factor=2.826, mlp_layer_types=None,
    ),
    "exaone_moe": LLAMA
    | dict(
        vocab_size=102400, intermediate_size=16384, num_key_value_heads=32, rms_norm_eps=1e-5, eos_token_id=53,
        sliding_window=4096, sliding_window_pattern=4, layer_types=None, mlp_layer_types=None, first_k_dense_replace=1,
        moe_intermediate_size=1024, num_experts=64, num_experts_per_tok=8, num_shared_experts=1, norm_topk_prob=True,
        routed_scaling_factor=2.5, n_group=1, topk_group=1,
    ),
    "mellum": LLAMA
    | dict(
        vocab_size=98304, hidden_size=2304, intermediate_size=7168, num_hidden_layers=28, num_key_value_heads=4,
        head_dim=128, max_position_embeddings=131072, bos_token_id=None, eos_token_id=None, sliding_window=1024,
        layer_types=None, mlp_layer_types=None, moe_intermediate_size=896, num_experts_per_tok=8, num_experts=64,
        norm_topk_prob=True,
    ),
    "dots1": COMMON
    | dict(
        vocab_size=152064, hidden_size=4608, intermediate_size=10944, num_hidden_layers=62, num_attention_heads=32,
        num_key_value_heads=32, hidden_act="silu", max_position_embeddings=2048, rms_norm_eps=1e-6,
        attention_bias=False, moe_intermediate_size=1408, n_shared_experts=None, n_routed_experts=None, n_group=1,
        topk_group=1, num_experts_per_tok=None, first_k_dense_replace=0, norm_topk_prob=False,
        routed_scaling_factor=1.0, sliding_window=4096, max_window_layers=62, layer_types=None,
    ),
    "solar_open": COMMON
    | dict(
        vocab_size=196608, hidden_size=4096, num_hidden_layers=48, num_attention_heads=64, num_key_value_heads=8,
        head_dim=128, hidden_act="silu", max_position_embeddings=131072, rms_norm_eps=1e-5, attention_bias=False,
        moe_intermediate_size=1280, num_experts_per_tok=8, n_shared_experts=1, n_routed_experts=128,
        routed_scaling_factor=1.0, n_group=1, topk_group=1, norm_topk_prob=True,
    ),
    "qwen2_moe": QWEN
    | dict(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=16,
        decoder_sparse_step=1, moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts_per_tok=4,
        num_experts=60, norm_topk_prob=False, mlp_only_layers=None, qkv_bias=True,
    ),
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": QWEN3_NEXT
    | dict(
        vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_key_value_heads=4,
        num_experts=0,
    ),
    "qwen3_5_moe_text": QWEN3_NEXT
    | dict(vocab_size=248320, num_hidden_layers=40, num_experts_per_tok=8, num_experts=256),
    "qwen3_moe": LLAMA
    | dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_key_value_heads=4,
        max_position_embeddings=32768, bos_token_id=None, eos_token_id=None, use_sliding_window=False,
        sliding_window=4096, decoder_sparse_step=1, moe_intermediate_size=768, num_experts_per_tok=8, num_experts=128,
        norm_topk_prob=False, mlp_only_layers=None,
    ),
    "qwen3_vl_moe_text": COMMON
    | dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16,
        num_key_value_heads=16, hidden_act="silu", max_position_embeddings=128000, rms_norm_eps=1e-6,
        tie_word_embeddings=True, attention_bias=False, decoder_sparse_step=1, moe_intermediate_size=1408,
        num_experts_per_tok=4, num_experts=60, mlp_only_layers=None, head_dim=None,
    ),
    "mixtral": LLAMA
    | dict(
        intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5,
        sliding_window=None, num_experts_per_tok=2, num_local_experts=8,
    ),
    "olmoe": LLAMA
    | dict(
        vocab_size=50304, hidden_size=2048, intermediate_size=2048, num_hidden_layers=16, num_attention_heads=16,
        max_position_embeddings=4096, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=50279, clip_qkv=None,
        num_experts_per_tok=8, num_experts=64, norm_topk_prob=False,
    ),
    "gpt_oss": LLAMA
    | dict(
        vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=36, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5, bos_token_id=None,
        eos_token_id=None, attention_bias=True, sliding_window=128, layer_types=None, num_experts_per_tok=4,
        num_local_experts=128, swiglu_alpha=1.702, swiglu_limit=7.0,
    ),
    "deepseek_v2": LATENT
    | dict(
        vocab_size=102400, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=None, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, mlp_bias=False,
        first_k_dense_replace=0, n_group=None, n_routed_experts=64, n_shared_experts=2, routed_scaling_factor=1.0,
        topk_group=None, topk_method="greedy", norm_topk_prob=False, num_experts_per_tok=None,
        moe_intermediate_size=1407,
    ),
    "deepseek_v3": LATENT
    | dict(
        vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61, num_attention_heads=128,
        num_key_value_heads=128, max_position_embeddings=4096, bos_token_id=0, eos_token_id=1, first_k_dense_replace=3,
        n_group=8, n_routed_experts=256, n_shared_experts=1, routed_scaling_factor=2.5, topk_group=4,
        norm_topk_prob=True, num_experts_per_tok=8, moe_intermediate_size=2048, rope_interleave=True,
    ),
    "kimi_linear": LATENT
    | dict(
        vocab_size=163840, hidden_size=2304, intermediate_size=9216, num_hidden_layers=27, num_attention_heads=32,
        num_key_value_heads=32, model_max_length=1048576, rms_norm_eps=1e-5, bos_token_id=163584, eos_token_id=163586,
        q_lora_rank=None, num_experts=256, num_experts_per_token=8, num_shared_experts=1, moe_intermediate_size=1024,
        moe_renormalize=True, num_expert_group=1, topk_group=1, routed_scaling_factor=2.446, mlp_layer_types=None,
        layer_types=None, linear_head_dim=128, linear_num_heads=32, linear_conv_kernel_dim=4,
    ),
    "deepseek_v32": INDEXED
    | dict(
        vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61, num_attention_heads=128,
        num_key_value_heads=128, max_position_embeddings=163840, n_group=8, topk_group=4, index_n_heads=64,
    ),
    "glm_moe_dsa": INDEXED
    | dict(
        vocab_size=154880, hidden_size=6144, intermediate_size=12288, num_hidden_layers=78, num_attention_heads=64,
        num_key_value_heads=64, max_position_embeddings=202752, rms_norm_eps=1e-5, q_lora_rank=2048,
        qk_nope_head_dim=192, v_head_dim=256, n_group=1, topk_group=1, index_n_heads=32, indexer_types=None,
        index_topk_pattern=None, index_topk_freq=1, index_skip_topk_offset=2, indexer_rope_interleave=True,
    ),
    "glm5_next_text": GLM5_NEXT,
    "hy_v4": HY4,
    "hy_v4_vl_text": HY4
    | dict(
        hidden_size=6144, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=78,
        num_attention_heads=64, q_lora_rank=2048, index_n_heads=32,
    ),
    "glm4_moe_lite": LATENT
    | dict(
        vocab_size=154880, hidden_size=2048, intermediate_size=10240, num_hidden_layers=47, num_attention_heads=20,
        num_key_value_heads=20, max_position_embeddings=202752, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=1,
        q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, n_group=1, n_routed_experts=64, n_shared_experts=1,
        routed_scaling_factor=1.8, topk_group=1, norm_topk_prob=True, num_experts_per_tok=4, moe_intermediate_size=1536,
        mlp_layer_types=None, rope_interleave=True,
    ),
    "mistral4": LATENT
    | dict(
        vocab_size=131072, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=32, max_position_embeddings=1048576, bos_token_id=1, eos_token_id=2, pretraining_tp=1,
        kv_lora_rank=256, q_lora_rank=1024, qk_nope_head_dim=64, n_group=1, n_routed_experts=128, n_shared_experts=1,
        routed_scaling_factor=1.0, topk_group=1, first_k_dense_replace=0, norm_topk_prob=True, num_experts_per_tok=4,
        moe_intermediate_size=2048, rope_interleave=True,
    ),
    "ernie4_5_moe": LLAMA
    | dict(
        vocab_size=103424, hidden_size=2560, intermediate_size=12288, num_hidden_layers=28, num_attention_heads=20,
        num_key_value_heads=4, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True,
        use_bias=False, moe_intermediate_size=1536, moe_k=6, moe_num_experts=64, moe_num_shared_experts=2,
        moe_layer_start_index=1, moe_layer_end_index=-1, moe_layer_interval=1,
    ),
    "llama4_text": LLAMA
    | dict(
        vocab_size=202048, hidden_size=5120, intermediate_size=8192, num_hidden_layers=48, num_attention_heads=40,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5,
        intermediate_size_mlp=16384, num_experts_per_tok=1, num_local_experts=16, moe_layers=None,
        interleave_moe_layer_step=1, use_qk_norm=True, no_rope_layers=None, no_rope_layer_interval=4,
        attention_chunk_size=8192, layer_types=None, attn_temperature_tuning=True, floor_scale=8192, attn_scale=0.1,
    ),
    "minimax_m2": LLAMA
    | dict(
        vocab_size=200064, hidden_size=3072, intermediate_size=1536, num_hidden_layers=62, num_attention_heads=48,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=196608, bos_token_id=200034, eos_token_id=200020,
        num_experts_per_tok=8, num_local_experts=256,
    ),
    "minimax_m3_vl_text": LLAMA
    | dict(
        vocab_size=200064, hidden_size=6144, intermediate_size=3072, num_hidden_layers=60, num_attention_heads=64,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=524288, bos_token_id=200034, eos_token_id=200020,
        num_experts_per_tok=4, num_local_experts=128, dense_intermediate_size=12288, shared_intermediate_size=3072,
        routed_scaling_factor=2.0, rotary_dim=64, swiglu_alpha=1.702, swiglu_limit=7.0, mlp_layer_types=None,
        index_n_heads=4, index_head_dim=128, index_block_size=128, index_topk_blocks=16, index_local_blocks=1,
        layer_types=None,
    ),
    "lfm2_moe": LFM2
    | dict(
        hidden_size=2048, intermediate_size=7168, moe_intermediate_size=1792, num_dense_layers=2, num_experts_per_tok=4,
        num_experts=32, use_expert_bias=True, routed_scaling_factor=1.0, norm_topk_prob=True,
    ),
    "granitemoe_swa": GRANITE
    | dict(
        num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=0, sliding_window=128, layer_types=None,
        layer_rope_theta=None,
    ),
    "granitemoe": GRANITE | dict(num_local_experts=8, num_experts_per_tok=2),
    "granitemoeshared": GRANITE | dict(num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=0),
    "granitemoehybrid": GRANITE
    | dict(
        num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=1024, position_embedding_type=None,
        layer_types=None, mamba_n_heads=128, mamba_n_groups=1, mamba_d_state=256, mamba_d_head="auto", mamba_d_conv=4,
        mamba_expand=2, mamba_conv_bias=True, mamba_proj_bias=False,
    ),
    "nemotron_h": COMMON
    | dict(
        vocab_size=131072, hidden_size=4096, intermediate_size=21504, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, layer_norm_epsilon=1e-5, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, attention_bias=False, use_bias=False, mlp_bias=False, mlp_hidden_act="relu2",
        sliding_window=None, layers_block_type=None, mamba_num_heads=128, mamba_head_dim=64, mamba_hidden_act="silu",
        ssm_state_size=128, n_groups=8, conv_kernel=4, use_conv_bias=True, n_routed_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=7688, moe_shared_expert_intermediate_size=7688, moe_latent_size=None, n_group=1,
        topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0,
    ),
    "glm4_moe": GLM
    | dict(
        intermediate_size=10944, num_hidden_layers=46, num_attention_heads=96, num_key_value_heads=8, head_dim=None,
        rms_norm_eps=1e-5, attention_bias=False, moe_intermediate_size=1408, num_experts_per_tok=8, n_shared_experts=1,
        n_routed_experts=128, routed_scaling_factor=1.0, n_group=1, topk_group=1, first_k_dense_replace=1,
        norm_topk_prob=True, use_qk_norm=False,
    ),
    "afmoe": COMMON
    | dict(
        vocab_size=200192, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=1408, num_hidden_layers=32,
        num_dense_layers=1, num_attention_heads=16, num_key_value_heads=None, head_dim=128, hidden_act="silu",
        max_position_embeddings=16384, rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=6, num_shared_experts=2,
        route_scale=1.0, global_attn_every_n_layers=4, sliding_window=1024, layer_types=None, mup_enabled=False,
        attention_bias=False,
    ),
}  # fmt: skip
"""As plain_defaults.DENSE."""

ONE_NAME = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoe", "granitemoeshared", "granitemoehybrid",
    "granitemoe_swa", "exaone_moe", "kimi_linear", "llama4_text", "qwen2_moe", "afmoe", "deepseek_v2",
)  # fmt: skip
"""Classes that know the number of experts by one name alone."""
OTHER_NAMES = {
    "n_routed_experts": "num_local_experts", "moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok",
    "moe_topk": "num_experts_per_tok",
}  # fmt: skip
"""Fields of some classes, by the names that override them."""

COUNTED_SO = ("deepseek_v2", "deepseek_v32", "glm_moe_dsa")
"""Classes whose n_routed_experts num_experts overrides."""
