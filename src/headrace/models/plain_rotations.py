"""How the classes of transformers rotate where config.json says nothing, by model_type: data of plain_config."""

from __future__ import annotations

from headrace.models.families.base import LAYER_TYPES as KINDS

THETA = 10_000.0
THETAS = {"smollm3": 2_000_000.0, "gemma3_text": 1_000_000.0, "mixtral": 1_000_000.0, "gpt_oss": 150_000.0}
THETAS |= {"minimax_m3_vl_text": 5_000_000.0}
THETAS |= {"minimax_m2": 5_000_000.0, "qwen3_vl_moe_text": 500_000.0, "ernie4_5_moe": 500_000.0}
THETAS |= {"qwen2_5_vl_text": 1_000_000.0, "qwen3_vl_text": 500_000.0, "ernie4_5": 500_000.0, "olmo3": 500_000.0}
THETAS |= {"cohere": 500_000.0, "solar_open": 1_000_000.0}
THETAS |= {"llama4_text": 500_000.0, "lfm2": 1_000_000.0, "lfm2_moe": 1_000_000.0}
THETAS |= {"cwm": 1_000_000.0, "hy_v3": 11_158_840.0, "apertus": 12_000_000.0, "lfm3": 1_000_000.0}
"""Where the class has another one."""
LOCAL_THETAS = {"gemma3_text": THETA, "olmo3": 500_000.0}
"""Of layers with a window, where they have a base of their own."""
PARTS = {"stablelm": 0.25, "phi": 0.5, "glm": 0.5, "glm4": 0.5, "glm4_moe": 0.5}
PARTS |= {"qwen3_next": 0.25, "qwen3_5_text": 0.25, "qwen3_5_moe_text": 0.25}
"""Of each head that is rotated, where the class does not rotate all of it."""
GPT_OSS_ROPE = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096
)
MINISTRAL3_ROPE = dict(
    rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384, beta_fast=32.0,
    beta_slow=1.0, mscale_all_dim=1.0, mscale=1.0, llama_4_scaling_beta=0.1,
)  # fmt: skip
MISTRAL4_ROPE = MINISTRAL3_ROPE | dict(rope_theta=1e4, factor=128.0, original_max_position_embeddings=8192)
CWM_ROPE = dict(
    rope_type="llama3", rope_theta=1e6, factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
APERTUS_ROPE = CWM_ROPE | dict(rope_theta=12_000_000.0, factor=8.0)
MELLUM_ROPES = {
    KINDS[0]: dict(rope_type="default", rope_theta=500_000.0), KINDS[1]: dict(rope_type="default", rope_theta=THETA),
}  # fmt: skip
ROPES = {
    "apertus": APERTUS_ROPE,
    "cwm": CWM_ROPE,
    "gpt_oss": GPT_OSS_ROPE,
    "ministral3": MINISTRAL3_ROPE,
    "mistral4": MISTRAL4_ROPE,
}
"""Where the class has more than a base."""
LFM3_ROPES = {
    KINDS[0]: dict(rope_type="proportional", partial_rotary_factor=0.5, rope_theta=1_000_000.0),
    KINDS[1]: dict(rope_type="default", rope_theta=THETA),
}
GEMMA4_ROPES = {
    "full_attention": dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1_000_000.0),
    "sliding_attention": dict(rope_type="default", rope_theta=10_000.0),
}
OWN_ROPES = {
    "gemma4_text": GEMMA4_ROPES, "gemma4_unified_text": GEMMA4_ROPES, "lfm3": LFM3_ROPES, "mellum": MELLUM_ROPES,
}  # fmt: skip
"""Of classes with a rotation for each kind of layer, which a file gives as a whole."""
