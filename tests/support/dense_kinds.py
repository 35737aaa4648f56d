"""Kinds of small dense models of the families since 2024 and their kin: see tests.support.checkpoints."""

from __future__ import annotations

from typing import Any

from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    ArceeConfig,
    ArceeForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    CwmConfig,
    CwmForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    Jais2Config,
    Jais2ForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    SeedOssConfig,
    SeedOssForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
    YoutuConfig,
    YoutuForCausalLM,
)

from tests.support.kind_sizes import (
    MIXED_WINDOWS,
    MODEL_LENGTH,
    MULTIPLIERS,
    NO_TOKEN,
    SHORT_LENGTH,
    VOCAB,
    WINDOW,
    YARN_ROPE,
    Build,
    of,
    rope,
)

_seed_oss = of(SeedOssForCausalLM, SeedOssConfig, head_dim=64)
_arcee = of(ArceeForCausalLM, ArceeConfig)
_ernie4_5 = of(Ernie4_5ForCausalLM, Ernie4_5Config, head_dim=64)
HUNYUAN_ROPE = rope("dynamic", alpha=1000.0, factor=1.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
_hunyuan = of(HunYuanDenseV1ForCausalLM, HunYuanDenseV1Config, head_dim=64, **HUNYUAN_ROPE)
_olmo2 = of(Olmo2ForCausalLM, Olmo2Config)
_olmo3 = of(Olmo3ForCausalLM, Olmo3Config, num_hidden_layers=4, sliding_window=WINDOW)
OLMO3_ROPE = dict(
    rope_parameters=dict(
        full_attention=YARN_ROPE["rope_parameters"], sliding_attention=dict(rope_type="default", rope_theta=1e4)
    )
)
EXAONE = dict(num_hidden_layers=3, sliding_window=WINDOW, layer_types=MIXED_WINDOWS["layer_types"])
_exaone4 = of(Exaone4ForCausalLM, Exaone4Config, head_dim=64)
_cohere = of(CohereForCausalLM, CohereConfig, logit_scale=0.25)
_cohere2 = of(Cohere2ForCausalLM, Cohere2Config, logit_scale=0.25)
_starcoder2 = of(Starcoder2ForCausalLM, Starcoder2Config)
_minicpm3 = of(
    MiniCPM3ForCausalLM, MiniCPM3Config, num_key_value_heads=4, kv_lora_rank=48, q_lora_rank=64, qk_nope_head_dim=32,
    qk_rope_head_dim=16, v_head_dim=48, scale_emb=3, scale_depth=0.7, dim_model_base=32,
)  # fmt: skip
MINICPM_ROPE = rope(
    "longrope", original_max_position_embeddings=SHORT_LENGTH,
    short_factor=[1 + 0.05 * i for i in range(8)], long_factor=[1 + 0.5 * i for i in range(8)],
)  # fmt: skip

_gemma = of(GemmaForCausalLM, GemmaConfig, head_dim=64)
_cwm = of(CwmForCausalLM, CwmConfig, head_dim=64, bos_token_id=1, rope_parameters=None)
_ministral = of(MinistralForCausalLM, MinistralConfig, head_dim=32)
_youtu = of(
    YoutuForCausalLM, YoutuConfig, num_key_value_heads=4, kv_lora_rank=48, q_lora_rank=64, qk_nope_head_dim=32,
    qk_rope_head_dim=16, v_head_dim=48,
)  # fmt: skip
GRANITE_WINDOWS = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
_granite_swa = of(GraniteSWAForCausalLM, GraniteSWAConfig, **MULTIPLIERS, sliding_window=WINDOW, num_hidden_layers=4)

_hyperclovax = of(HyperCLOVAXForCausalLM, HyperCLOVAXConfig, **MULTIPLIERS | dict(logits_scaling=0.125))
_jais2 = of(Jais2ForCausalLM, Jais2Config)
_apertus = of(ApertusForCausalLM, ApertusConfig, rope_parameters=None, dtype="float32")


def _gpt2(**fields: Any) -> PreTrainedModel:
    sizes = dict(n_embd=128, n_layer=2, n_head=4, n_positions=MODEL_LENGTH, vocab_size=VOCAB, tie_word_embeddings=False)
    return GPT2LMHeadModel(GPT2Config(**sizes | dict(bos_token_id=None, eos_token_id=NO_TOKEN) | fields))


_stablelm = of(StableLmForCausalLM, StableLmConfig)
_phi = of(PhiForCausalLM, PhiConfig)
_gpt_neox = of(GPTNeoXForCausalLM, GPTNeoXConfig)

DENSE: dict[str, tuple[Build, dict[str, Any]]] = {
    "gpt2": (_gpt2, {}),
    "gpt_neox": (_gpt_neox, {}),
    "gpt_neox_sequential": (_gpt_neox, dict(use_parallel_residual=False, attention_bias=False)),
    "phi": (_phi, {}),
    "stablelm": (_stablelm, dict(use_qkv_bias=True)),
    "stablelm_parallel": (_stablelm, dict(use_parallel_residual=True)),
    "seed_oss": (_seed_oss, dict(mlp_bias=True)),
    "arcee": (_arcee, dict(mlp_bias=True) | YARN_ROPE),
    "ernie4_5": (_ernie4_5, dict(use_bias=True)),
    "hunyuan": (_hunyuan, dict(attention_bias=True)),
    "olmo2": (_olmo2, dict(attention_bias=True)),
    "olmo3": (_olmo3, OLMO3_ROPE),
    "exaone4": (_exaone4, EXAONE),
    "exaone4_plain": (_exaone4, dict(sliding_window=None, layer_types=["full_attention"] * 2)),
    "cohere": (_cohere, dict(attention_bias=True)),
    "cohere2": (_cohere2, EXAONE | dict(attention_bias=True)),
    "starcoder2": (_starcoder2, dict(sliding_window=WINDOW)),
    "gemma": (_gemma, dict(hidden_act="gelu", tie_word_embeddings=False)),
    "cwm": (_cwm, EXAONE),
    "ministral": (_ministral, EXAONE),
    "youtu": (_youtu, YARN_ROPE),
    "granite_swa": (_granite_swa, dict(layer_rope_theta=[0.0, 1e4, 5e5, 1e4], layer_types=GRANITE_WINDOWS)),
    "minicpm3": (_minicpm3, MINICPM_ROPE),
    "hyperclovax": (_hyperclovax, dict(mlp_bias=True)),
    "hyperclovax_plain": (_hyperclovax, dict(use_post_norm=False, attention_multiplier=None)),
    "jais2": (_jais2, {}),
    "apertus": (_apertus, dict(attention_bias=True)),
}
