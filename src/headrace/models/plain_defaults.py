"""What transformers' configuration classes put where config.json says nothing, by model_type: data of plain_config.

tests/unit/test_plain_config.py compares it with the classes.
"""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = dict(
    tie_word_embeddings=False, rope_parameters=None, bos_token_id=None, eos_token_id=None, dtype=None,
)  # fmt: skip
LLAMA: dict[str, Any] = COMMON | dict(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=None, hidden_act="silu", max_position_embeddings=2048, rms_norm_eps=1e-6, bos_token_id=1,
    eos_token_id=2, pretraining_tp=1, attention_bias=False, mlp_bias=False, head_dim=None,
)  # fmt: skip
GRANITE: dict[str, Any] = LLAMA | dict(
    embedding_multiplier=1.0, logits_scaling=1.0, residual_multiplier=1.0, attention_multiplier=1.0,
)  # fmt: skip
QWEN: dict[str, Any] = COMMON | dict(
    vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=32, hidden_act="silu", max_position_embeddings=32768, rms_norm_eps=1e-6,
    use_sliding_window=False, sliding_window=4096, max_window_layers=28, layer_types=None,
)  # fmt: skip
GLM: dict[str, Any] = COMMON | dict(
    vocab_size=151552, hidden_size=4096, intermediate_size=13696, num_hidden_layers=40, num_attention_heads=32,
    num_key_value_heads=2, head_dim=128, hidden_act="silu", max_position_embeddings=131072, rms_norm_eps=1.5625e-7,
    attention_bias=True,
)  # fmt: skip
GEMMA: dict[str, Any] = COMMON | dict(
    vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
    num_key_value_heads=4, head_dim=256, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=8192,
    rms_norm_eps=1e-6, eos_token_id=1, bos_token_id=2, tie_word_embeddings=True, attention_bias=False,
    query_pre_attn_scalar=256, sliding_window=4096, layer_types=None, final_logit_softcapping=30.0,
    attn_logit_softcapping=50.0, use_bidirectional_attention=None,
)  # fmt: skip
OLMO2: dict[str, Any] = LLAMA | dict(vocab_size=50304, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=50279)
GEMMA4: dict[str, Any] = COMMON | dict(
    vocab_size=262144, hidden_size=2304, intermediate_size=9216, num_hidden_layers=30, num_attention_heads=8,
    num_key_value_heads=4, head_dim=256, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=131072,
    rms_norm_eps=1e-6, eos_token_id=1, bos_token_id=2, tie_word_embeddings=True, attention_bias=False,
    sliding_window=512, layer_types=None, final_logit_softcapping=None, use_bidirectional_attention=None,
    vocab_size_per_layer_input=262144, hidden_size_per_layer_input=256, attention_k_eq_v=False, num_kv_shared_layers=0,
    enable_moe_block=False, use_double_wide_mlp=False, num_experts=None, top_k_experts=None,
    moe_intermediate_size=None, global_head_dim=512, num_global_key_value_heads=None,
)  # fmt: skip
ALONE = (
    "vocab_size_per_layer_input", "hidden_size_per_layer_input", "enable_moe_block", "num_experts", "top_k_experts",
    "moe_intermediate_size",
)  # fmt: skip
"""Fields of Gemma 4 that its unified models have not."""
LFM2: dict[str, Any] = COMMON | dict(
    vocab_size=65536, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    max_position_embeddings=128_000, norm_eps=1e-5, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    conv_bias=False, conv_L_cache=3, layer_types=None,
)  # fmt: skip
LATENT: dict[str, Any] = COMMON | dict(
    kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, hidden_act="silu",
    rms_norm_eps=1e-6, attention_bias=False,
)  # fmt: skip
COHERE: dict[str, Any] = COMMON | dict(
    vocab_size=256000, hidden_size=8192, intermediate_size=22528, logit_scale=0.0625, num_hidden_layers=40,
    num_attention_heads=64, num_key_value_heads=None, hidden_act="silu", max_position_embeddings=8192,
    layer_norm_eps=1e-5, bos_token_id=5, eos_token_id=255001, tie_word_embeddings=True, attention_bias=False,
)  # fmt: skip
DENSE: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA
    | dict(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096),
    "ministral3": LLAMA
    | dict(
        vocab_size=131072, intermediate_size=14336, num_hidden_layers=34, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=262144, rms_norm_eps=1e-5, sliding_window=None,
    ),
    "ministral": LLAMA
    | dict(
        intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096,
        layer_types=None,
    ),
    "cwm": LLAMA
    | dict(
        vocab_size=128256, hidden_size=6144, intermediate_size=21504, num_hidden_layers=64, num_attention_heads=48,
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, bos_token_id=128000,
        eos_token_id=None, head_dim=128, sliding_window=8192, layer_types=None,
    ),
    "qwen2": QWEN,
    "qwen3": QWEN | dict(head_dim=128, attention_bias=False),
    "qwen2_5_vl_text": QWEN
    | dict(
        vocab_size=152064, hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, rms_norm_eps=1e-5, max_window_layers=80, bos_token_id=151643, eos_token_id=151645,
    ),
    "qwen3_vl_text": COMMON
    | dict(
        vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, head_dim=128, hidden_act="silu", max_position_embeddings=128000, rms_norm_eps=1e-6,
        attention_bias=False,
    ),
    "seed_oss": LLAMA
    | dict(
        vocab_size=155136, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=80, num_key_value_heads=8,
        max_position_embeddings=524288, bos_token_id=0, attention_bias=True, attention_out_bias=False, head_dim=128,
    ),
    "arcee": LLAMA
    | dict(
        hidden_size=2560, intermediate_size=18432, hidden_act="relu2", max_position_embeddings=4096, rms_norm_eps=1e-5,
        bos_token_id=128000, eos_token_id=128001,
    ),
    "ernie4_5": LLAMA
    | dict(
        vocab_size=103424, hidden_size=1024, intermediate_size=3072, num_hidden_layers=18, num_attention_heads=16,
        num_key_value_heads=2, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True,
        use_bias=False, head_dim=128,
    ),
    "hunyuan_v1_dense": LLAMA | dict(vocab_size=290943, rms_norm_eps=1e-5),
    "olmo2": OLMO2,
    "olmo3": OLMO2 | dict(sliding_window=4096, layer_types=None),
    "exaone4": LLAMA
    | dict(
        vocab_size=102400, intermediate_size=16384, num_key_value_heads=32, rms_norm_eps=1e-5, bos_token_id=0,
        sliding_window=4096, sliding_window_pattern=4, layer_types=None,
    ),
    "cohere2": COHERE | dict(sliding_window=4096, layer_types=None),
    "cohere": COHERE | dict(use_qk_norm=False),
    "starcoder2": COMMON
    | dict(
        vocab_size=49152, hidden_size=3072, intermediate_size=12288, num_hidden_layers=30, num_attention_heads=24,
        num_key_value_heads=2, hidden_act="gelu_pytorch_tanh", max_position_embeddings=4096, norm_epsilon=1e-5,
        bos_token_id=50256, eos_token_id=50256, sliding_window=None, use_bias=True, tie_word_embeddings=True,
    ),
    "minicpm3": LLAMA
    | dict(
        vocab_size=73448, hidden_size=2560, intermediate_size=6400, num_hidden_layers=62, num_attention_heads=40,
        num_key_value_heads=40, max_position_embeddings=32768, rms_norm_eps=1e-5, tie_word_embeddings=True,
        kv_lora_rank=256, q_lora_rank=768, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=None, scale_emb=12,
        scale_depth=1.4, dim_model_base=256,
    ),
    "youtu": LATENT
    | dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=6144, num_hidden_layers=32, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=131072, bos_token_id=128000, eos_token_id=128001,
        tie_word_embeddings=True, rope_interleave=True,
    ),
    "lfm2": LFM2
    | dict(
        hidden_size=2560, intermediate_size=12288, block_multiple_of=256, block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=True, full_attn_idxs=None,
    ),
    "lfm3": COMMON
    | dict(
        vocab_size=128_000, hidden_size=2048, intermediate_size=7680, num_hidden_layers=24, num_attention_heads=16,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=128_000, norm_eps=1e-5, bos_token_id=124_894,
        eos_token_id=124_900, tie_word_embeddings=True, conv_bias=False, conv_L_cache=7, sliding_window=256,
        layer_types=None, use_sandwich_norm=True, use_attention_gate=True, attention_bias=False,
    ),
    "opt": COMMON
    | dict(
        vocab_size=50272, hidden_size=768, num_hidden_layers=12, ffn_dim=3072, max_position_embeddings=2048,
        do_layer_norm_before=True, _remove_final_layer_norm=False, word_embed_proj_dim=None, num_attention_heads=12,
        activation_function="relu", bos_token_id=2, eos_token_id=2, enable_bias=True,
        layer_norm_elementwise_affine=True, tie_word_embeddings=True,
    ),
    "gpt2": COMMON
    | dict(
        vocab_size=50257, max_position_embeddings=1024, hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
        n_inner=None, activation_function="gelu_new", layer_norm_epsilon=1e-5, scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False, add_cross_attention=False, bos_token_id=50256, eos_token_id=50256,
        tie_word_embeddings=True,
    ),
    "gpt_neox": COMMON
    | dict(
        vocab_size=50432, hidden_size=6144, num_hidden_layers=44, num_attention_heads=64, intermediate_size=24576,
        hidden_act="gelu", max_position_embeddings=2048, layer_norm_eps=1e-5, bos_token_id=0, eos_token_id=2,
        use_parallel_residual=True, attention_bias=True,
    ),
    "falcon_h1": COMMON
    | dict(
        vocab_size=128000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, hidden_act="silu", max_position_embeddings=8192, rms_norm_eps=1e-5, bos_token_id=1,
        eos_token_id=2, attention_bias=False, mlp_bias=False, projectors_bias=False, mamba_d_ssm=1024,
        mamba_n_heads=128, mamba_d_head="auto", mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4, mamba_expand=2,
        mamba_conv_bias=True, mamba_proj_bias=False, mamba_norm_before_gate=True, mamba_rms_norm=False,
        lm_head_multiplier=1.0, embedding_multiplier=1.0, mlp_multipliers=None, key_multiplier=1.0,
        attention_in_multiplier=1.0, attention_out_multiplier=1.0, ssm_multipliers=None, ssm_in_multiplier=1.0,
        ssm_out_multiplier=1.0,
    ),
    "falcon": COMMON
    | dict(
        vocab_size=65024, hidden_size=4544, num_hidden_layers=32, num_attention_heads=71, num_ln_in_parallel_attn=None,
        layer_norm_epsilon=1e-5, num_kv_heads=None, alibi=False, new_decoder_architecture=False, multi_query=True,
        parallel_attn=True, bias=False, max_position_embeddings=2048, ffn_hidden_size=None, activation="gelu",
        bos_token_id=11, eos_token_id=11, tie_word_embeddings=True,
    ),
    "stablelm": COMMON
    | dict(
        vocab_size=50304, hidden_size=2560, intermediate_size=6912, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, hidden_act="silu", max_position_embeddings=4096, layer_norm_eps=1e-5,
        use_qkv_bias=False, qk_layernorm=False, use_parallel_residual=False, bos_token_id=0, eos_token_id=0,
    ),
    "phi": COMMON
    | dict(
        vocab_size=51200, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=32,
        num_key_value_heads=None, hidden_act="gelu_new", max_position_embeddings=2048, layer_norm_eps=1e-5,
        qk_layernorm=False, bos_token_id=1, eos_token_id=2,
    ),
    "phi3": COMMON
    | dict(
        vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=None, hidden_act="silu", max_position_embeddings=4096, rms_norm_eps=1e-5, bos_token_id=1,
        original_max_position_embeddings=4096, eos_token_id=32000, sliding_window=None,
    ),
    "smollm3": COMMON
    | dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=4, hidden_act="silu", max_position_embeddings=32768, rms_norm_eps=1e-6, bos_token_id=128000,
        eos_token_id=128001, use_sliding_window=False, sliding_window=None, no_rope_layers=None,
        no_rope_layer_interval=4, layer_types=None, attention_bias=False, mlp_bias=False, tie_word_embeddings=True,
    ),
    "granite": GRANITE,
    "granite_swa": GRANITE
    | dict(
        vocab_size=100352, hidden_size=2560, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=20,
        num_key_value_heads=4, max_position_embeddings=8192, rms_norm_eps=1e-5, bos_token_id=100257,
        eos_token_id=100257, tie_word_embeddings=True, sliding_window=128, layer_types=None, layer_rope_theta=None,
    ),
    "glm": GLM,
    "glm4": GLM,
    "gemma": COMMON
    | dict(
        vocab_size=256000, hidden_size=3072, intermediate_size=24576, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=16, head_dim=256, hidden_act="gelu_pytorch_tanh", max_position_embeddings=8192,
        rms_norm_eps=1e-6, eos_token_id=1, bos_token_id=2, tie_word_embeddings=True, attention_bias=False,
        use_bidirectional_attention=None,
    ),
    "gemma2": GEMMA,
    "gemma3_text": GEMMA
    | dict(
        vocab_size=262208, max_position_embeddings=131072, final_logit_softcapping=None, attn_logit_softcapping=None,
        use_bidirectional_attention=False,
    ),
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": {name: value for name, value in GEMMA4.items() if name not in ALONE}
    | dict(max_position_embeddings=262144, sliding_window=1024, use_bidirectional_attention="vision"),
    "muse_glimmer_text": COMMON
    | dict(
        vocab_size=202048, hidden_size=6656, intermediate_size=19968, num_hidden_layers=52, num_attention_heads=32,
        num_key_value_heads=2, head_dim=128, hidden_activation="silu", max_position_embeddings=131072,
        rms_norm_eps=1e-5, bos_token_id=200000, eos_token_id=200001, attention_bias=False, sliding_window=2048,
        layer_types=None, final_logit_softcapping=20.0, qk_scale_factor=3.87, output_multiplier=0.19611613513818404,
        post_norm_eps=1e-8, layer_rope_theta=None,
    ),
    "apertus": COMMON
    | dict(
        vocab_size=131072, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=None, hidden_act="xielu", max_position_embeddings=65536, rms_norm_eps=1e-5, bos_token_id=1,
        eos_token_id=2, attention_bias=False,
    ),
    "hyperclovax": GRANITE | dict(attention_multiplier=None, use_post_norm=True),
    "jais2": COMMON
    | dict(
        vocab_size=150272, hidden_size=3328, intermediate_size=26624, num_hidden_layers=32, num_attention_heads=26,
        num_key_value_heads=None, hidden_act="relu2", max_position_embeddings=8192, layer_norm_eps=1e-5, bos_token_id=0,
        eos_token_id=150024, attention_bias=True, mlp_bias=True, head_dim=None,
    ),
}  # fmt: skip
"""By model_type: the fields that transformers' class has, with what it puts where config.json says nothing. Models with
experts: plain_routed."""

GEMMA4_TEXTS = ("gemma4_text", "gemma4_unified_text")
CWM_ENDS = [128001, 128008, 128009]
GLM_ENDS = [151329, 151336, 151338]
