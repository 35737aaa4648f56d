"""Small random checkpoints of every family and variant, written by transformers' own classes.

Weights are drawn wide, norms are perturbed and biases are not zero, so that a feature left out shows in the logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from headrace.models.decoder import Decoder
from tests.support.checkpoint_files import rename
from tests.support.dense_kinds import DENSE
from tests.support.expert_kinds import EXPERTS, LATENT, TEMPERED
from tests.support.kind_sizes import (
    GQA,
    LLAMA_SIZES,
    LONGROPE_LENGTH,
    MIXED_WINDOWS,
    MODEL_LENGTH,
    MULTIPLIERS,
    NO_TOKEN,
    QWEN_TOKENS,
    QWEN_VISION,
    SHORT_LENGTH,
    VOCAB,
    WINDOW,
    YARN_ROPE,
    Build,
    of,
    rope,
)
from tests.support.vision_kinds import VISION, published_kimi

FolderOf = Callable[[str], Path]
OursOf = Callable[..., Decoder]
TheirsOf = Callable[..., PreTrainedModel]
"""Of the fixtures folder_of, ours_of and theirs_of (tests/cpu/conftest.py)."""


OPT_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=128,
    ffn_dim=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=MODEL_LENGTH,
    eos_token_id=None,
    pad_token_id=None,
)
FALCON_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=MODEL_LENGTH,
    bos_token_id=None,
    eos_token_id=None,
)


LLAMA3_ROPE = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
FALCON_RW = dict(alibi=True, multi_query=False, parallel_attn=False, bias=True)
FALCON_40 = dict(new_decoder_architecture=True, num_kv_heads=2)


def _llama(**fields: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA_SIZES, **fields}))


def _mistral(**fields: Any) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**{**LLAMA_SIZES, **GQA, **fields}))


def _qwen2(**fields: Any) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**{**LLAMA_SIZES, **GQA, **fields}))


def _qwen3(**fields: Any) -> PreTrainedModel:
    # Qwen3's head size is its own: 64 where hidden_size / heads is 32
    return Qwen3ForCausalLM(Qwen3Config(**{**LLAMA_SIZES, **GQA, "head_dim": 64, **fields}))


def _opt(**fields: Any) -> PreTrainedModel:
    return OPTForCausalLM(OPTConfig(**{**OPT_SIZES, **fields}))


def _falcon(**fields: Any) -> PreTrainedModel:
    return FalconForCausalLM(FalconConfig(**{**FALCON_SIZES, **fields}))


_phi3 = of(Phi3ForCausalLM, Phi3Config, original_max_position_embeddings=MODEL_LENGTH)
_smollm3 = of(SmolLM3ForCausalLM, SmolLM3Config, no_rope_layer_interval=2, tie_word_embeddings=True)
_granite = of(GraniteForCausalLM, GraniteConfig, **MULTIPLIERS)
_glm = of(GlmForCausalLM, GlmConfig, head_dim=64, eos_token_id=NO_TOKEN)
_glm4 = of(Glm4ForCausalLM, Glm4Config, head_dim=64, eos_token_id=NO_TOKEN)
GEMMA = dict(head_dim=64, num_hidden_layers=3, sliding_window=WINDOW, query_pre_attn_scalar=48)
GEMMA_LAYERS = dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"])
_gemma2 = of(Gemma2ForCausalLM, Gemma2Config, **GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=3.0)
_gemma3 = of(Gemma3ForCausalLM, Gemma3TextConfig, **GEMMA, **GEMMA_LAYERS)
LONGROPE = dict(
    original_max_position_embeddings=LONGROPE_LENGTH,
    rope_parameters=dict(
        rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75,
        short_factor=[1 + 0.05 * i for i in range(12)], long_factor=[1 + 0.5 * i for i in range(12)],
    ),
)  # fmt: skip
GEMMA3_LINEAR = dict(
    rope_parameters=dict(
        full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
        sliding_attention=dict(rope_type="default", rope_theta=1e4),
    )
)


def _gemma3_with_vision(**fields: Any) -> PreTrainedModel:
    text = {**LLAMA_SIZES, **GQA, **GEMMA, **GEMMA_LAYERS, "pad_token_id": 0, **fields}
    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    tokens = dict(boi_token_index=1, eoi_token_index=2, image_token_index=3, eos_token_id=NO_TOKEN)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1, **tokens)
    return Gemma3ForConditionalGeneration(config)


MINISTRAL3_ROPE = rope(
    "yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
    mscale_all_dim=1.0, llama_4_scaling_beta=0.5,
)  # fmt: skip
_ministral3 = of(Ministral3ForCausalLM, Ministral3Config, head_dim=64, **MINISTRAL3_ROPE)
PIXTRAL = dict(
    model_type="pixtral", hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    image_size=28, patch_size=14,
)  # fmt: skip


def _mistral3(**fields: Any) -> PreTrainedModel:
    """tie_word_embeddings stands beside text_config."""
    text = {**LLAMA_SIZES, **GQA, "model_type": "mistral", "sliding_window": None, "head_dim": 64, **fields}
    tied = text.pop("tie_word_embeddings", False)
    config = Mistral3Config(text_config=text, vision_config=PIXTRAL, tie_word_embeddings=tied, eos_token_id=NO_TOKEN)
    return Mistral3ForConditionalGeneration(config)


def _qwen2_5_vl(**fields: Any) -> PreTrainedModel:
    text = {**LLAMA_SIZES, **GQA, **fields}
    vision = QWEN_VISION | dict(fullatt_block_indexes=[0])
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, eos_token_id=NO_TOKEN, **QWEN_TOKENS)
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl(**fields: Any) -> PreTrainedModel:
    """tie_word_embeddings stands beside text_config."""
    text = {**LLAMA_SIZES, **GQA, "head_dim": 64, **fields}
    tied = text.pop("tie_word_embeddings", False)
    vision = QWEN_VISION | dict(num_position_embeddings=16, deepstack_visual_indexes=[0])
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=tied, eos_token_id=NO_TOKEN, **QWEN_TOKENS
    )
    return Qwen3VLForConditionalGeneration(config)


def _mrope(*section: int, **parameters: Any) -> dict[str, Any]:
    return rope("default", mrope_section=list(section), **parameters)


GEMMA4 = dict(
    head_dim=32, global_head_dim=64, num_hidden_layers=4, sliding_window=WINDOW, vocab_size_per_layer_input=VOCAB,
    layer_types=["sliding_attention", "full_attention"] * 2, final_logit_softcapping=10.0,
)  # fmt: skip
GEMMA4_LARGE = dict(attention_k_eq_v=True, num_global_key_value_heads=1, hidden_size_per_layer_input=0)
GEMMA4_SMALL = dict(hidden_size_per_layer_input=32, num_kv_shared_layers=2, use_double_wide_mlp=True)
GEMMA4_EXPERTS = dict(enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=64)
_gemma4 = of(Gemma4ForCausalLM, Gemma4TextConfig, **GEMMA4)


def _gemma4_multimodal(**fields: Any) -> PreTrainedModel:
    text = {**LLAMA_SIZES, **GQA, **GEMMA4, "pad_token_id": 0, **fields}
    heads = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=16)
    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, position_embedding_size=8, **heads)
    config = Gemma4Config(text_config=text, vision_config=vision, eos_token_id=NO_TOKEN)
    return Gemma4ForConditionalGeneration(config)


UNIFIED = {name: value for name, value in GEMMA4.items() if name != "vocab_size_per_layer_input"}
_gemma4_unified = of(Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig, **UNIFIED)


def _gemma4_unified_multimodal(**fields: Any) -> PreTrainedModel:
    text = {**LLAMA_SIZES, **GQA, **UNIFIED, "pad_token_id": 0, **fields}
    vision = dict(mm_embed_dim=32, output_proj_dims=32, mm_posemb_size=8, patch_size=4)
    sound = dict(audio_embed_dim=16, output_proj_dims=16)
    config = Gemma4UnifiedConfig(text_config=text, vision_config=vision, audio_config=sound, eos_token_id=NO_TOKEN)
    return Gemma4UnifiedForConditionalGeneration(config)


KINDS: dict[str, tuple[Build, dict[str, Any]]] = {
    "llama": (_llama, {}),
    "llama_gqa": (_llama, GQA),
    "llama_tied": (_llama, dict(tie_word_embeddings=True)),
    "llama_bias": (_llama, dict(attention_bias=True, mlp_bias=True)),
    "llama_linear": (_llama, rope("linear", factor=4.0)),
    "llama_dynamic": (_llama, dict(max_position_embeddings=SHORT_LENGTH, **rope("dynamic", factor=4.0))),
    "llama3": (_llama, GQA | LLAMA3_ROPE),
    "llama_yarn": (_llama, YARN_ROPE),
    "mistral": (_mistral, dict(sliding_window=None, head_dim=64)),
    "mistral_window": (_mistral, dict(sliding_window=WINDOW)),
    "ministral3": (_ministral3, {}),
    "mistral3": (_mistral3, {}),
    "mistral3_ministral3": (
        _mistral3,
        MINISTRAL3_ROPE | dict(model_type="ministral3", tie_word_embeddings=True),
    ),
    "mistral3_mistral4": (_mistral3, LATENT | TEMPERED | dict(model_type="mistral4", q_lora_rank=64, head_dim=48)),
    "qwen2": (_qwen2, {}),
    "qwen2_window": (_qwen2, MIXED_WINDOWS),
    "qwen2_yarn": (_qwen2, YARN_ROPE),
    "qwen3": (_qwen3, {}),
    "qwen3_window": (_qwen3, MIXED_WINDOWS | dict(attention_bias=True)),
    "qwen2_5_vl": (_qwen2_5_vl, MIXED_WINDOWS | _mrope(4, 6, 6)),
    "qwen3_vl": (_qwen3_vl, dict(tie_word_embeddings=True) | _mrope(12, 10, 10, mrope_interleaved=True)),
    **DENSE,
    **VISION,
    "opt": (_opt, {}),
    "opt_untied": (_opt, dict(tie_word_embeddings=False)),
    "opt_no_final_norm": (_opt, dict(_remove_final_layer_norm=True)),
    "opt350": (_opt, dict(word_embed_proj_dim=64, do_layer_norm_before=False)),
    "opt_plain": (_opt, dict(enable_bias=False, layer_norm_elementwise_affine=False)),
    "falcon7": (_falcon, dict(multi_query=True, parallel_attn=True)),
    "falcon7_bias": (_falcon, dict(bias=True, **rope("linear", factor=2.0))),
    "falcon_rw": (_falcon, FALCON_RW),
    "falcon_rw_odd": (_falcon, FALCON_RW | dict(num_attention_heads=6, hidden_size=192)),
    "falcon40": (_falcon, FALCON_40),
    "falcon11": (_falcon, FALCON_40 | dict(num_ln_in_parallel_attn=1)),
    "phi3": (_phi3, dict(sliding_window=WINDOW)),
    "phi4_longrope": (_phi3, LONGROPE | dict(tie_word_embeddings=True)),
    "smollm3": (_smollm3, {}),
    "smollm3_window": (_smollm3, dict(use_sliding_window=True, sliding_window=WINDOW, attention_bias=True)),
    "granite": (_granite, dict(attention_bias=True)),
    "glm": (_glm, {}),
    "glm4": (_glm4, {}),
    "gemma2": (_gemma2, {}),
    "gemma3": (_gemma3, {}),
    "gemma3_linear": (_gemma3, GEMMA3_LINEAR),
    "gemma3_with_vision": (_gemma3_with_vision, {}),
    "gemma4": (_gemma4, GEMMA4_LARGE),
    "gemma4_small": (_gemma4, GEMMA4_SMALL),
    "gemma4_experts": (_gemma4, GEMMA4_LARGE | GEMMA4_EXPERTS),
    "gemma4_multimodal": (_gemma4_multimodal, GEMMA4_SMALL),
    "gemma4_unified": (_gemma4_unified, dict(attention_k_eq_v=True, num_global_key_value_heads=1)),
    "gemma4_unified_multimodal": (_gemma4_unified_multimodal, dict(num_kv_shared_layers=2)),
    **EXPERTS,
}
"""Every family and variant, as (constructor, its fields)."""
NEAR = (
    "phi3", "smollm3_window", "granite_moe", "granite4_experts", "glm", "gemma3_linear", "gemma3_with_vision",
    "gemma4_multimodal", "gemma4_unified", "gemma4_unified_multimodal", "deepseek_v2_lora", "deepseek_v2_groups",
    "glm_lite", "deepseek_v32", "qwen3_vl_moe", "mistral3", "mistral3_ministral3", "qwen2_5_vl", "qwen3_vl", "seed_oss",
    "ernie4_5", "exaone4_plain", "cohere", "solar_open", "dots1", "minicpm3", "qwen2_moe", "mistral3_mistral4", "gemma",
    "cwm", "ministral", "youtu", "exaone_moe", "hunyuan_moe", "hy3", "mellum", "granite_moe_swa", "hyperclovax_plain",
    "jais2", "gpt_neox_sequential", "stablelm", "stablelm_parallel", *(set(VISION) - {"muse_glimmer", "minimax_m3"}),
)  # fmt: skip
"""Kinds all of whose facts others have too: the matrix alone has them in what runs for every kind, and what takes a
second a kind leaves them out."""
LATER = (
    "smollm3", "granite", "granite_moe_shared", "granite4", "glm4", "gemma3", "gemma4", "ministral3", "arcee", "phi",
    "mistral4", "hunyuan", "olmo2", "olmo3", "exaone4", "cohere2", "starcoder2", "glm4_moe", "minimax_m2", "ernie_moe",
    "deepseek_v2", "llama4", "gpt_neox", "granite_swa", "hyperclovax", "afmoe", "apertus", "muse_glimmer",
)  # fmt: skip
"""And in what takes a second a kind the matrix alone has these, whose facts are elsewhere tried one by one."""


def _kinds(matrix: tuple[str, ...], without: tuple[str, ...] = ()) -> list[Any]:
    kinds = [kind for kind in KINDS if kind not in without]
    return [pytest.param(kind, marks=pytest.mark.matrix) if kind in matrix else kind for kind in kinds]


EVERY_KIND, EVERY_KIND_SLOWLY = _kinds(NEAR), _kinds(LATER, NEAR)
MIXED = tuple(kind for kind in KINDS if kind.startswith("gemma4"))
"""Kinds whose layers differ: their KV is not streamed."""
INDEXED = ("deepseek_v32", "glm_dsa", "hy4", "hy4_vision", "minimax_m3")
"""Their rows choose keys: they are not streamed either."""
EVERY_ALIKE, EVERY_STREAMED = _kinds(NEAR, MIXED), _kinds(LATER, (*MIXED, *INDEXED, *NEAR))

VISION_EXPERTS = ("gemma4_experts", "kimi_k25", "minimax_m3", "hy4_vision")
WITH_EXPERTS = (*(kind for kind in EXPERTS if kind != "granite4"), *VISION_EXPERTS)


def seeds_for_rounding(kind: str) -> range:
    """Seeds of the prompts over which errors of rounding are added up. Rounding makes a row with experts choose another
    one now and then: errors are few and large, and one prompt of 300 tokens says little of them."""
    return range(6 if kind in WITH_EXPERTS else 1)


def build_model(kind: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of a kind in fp32, in evaluation mode; `overrides` are fields of its configuration."""
    build, fields = KINDS[kind]
    torch.manual_seed(seed)
    model = build(**{**fields, **overrides}).eval()
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # transformers 5.17 takes another one, which caps nothing
    _randomise(model)
    return model


def make_checkpoint(
    kind: str,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shard_size: str | None = None,
    **overrides: Any,
) -> Path:
    """Writes a random checkpoint of `kind` to `folder` and returns it.

    Weights are representable in bf16 whatever `dtype` they are stored in (float16 rounds them once more).
    `shard_size`, such as "100KB", splits them over files. `overrides` are fields of the model's configuration.
    """
    model = build_model(kind, seed, **overrides).to(dtype)
    options = {} if shard_size is None else dict(max_shard_size=shard_size)
    model.save_pretrained(folder, **options, save_original_format=kind != "kimi_k25")
    if kind == "kimi_k25":
        rename(Path(folder), published_kimi)
    return Path(folder)


def edit_json(path: Path, remove: tuple[str, ...] = (), **fields: Any) -> None:
    """Sets and removes fields of a JSON file."""
    content = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in content.items() if name not in remove}))


def _randomise(model: PreTrainedModel) -> None:
    """Wide weights, biases away from zero, norms away from one; all rounded to bf16."""
    around = 0.0 if model.config.model_type.startswith(("gemma2", "gemma3")) else 1.0  # they multiply by 1 + weight
    drawn = ("layer_scalar", "e_score_correction_bias")
    scalars = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(drawn)]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *scalars]:
            noise = torch.randn_like(parameter)
            if "norm" in name or "ln_" in name:
                value = (name.endswith("weight") and around) + 0.3 * noise
            elif name.endswith(("scale", "layer_scalar")):
                value = 1 + 0.3 * noise
            elif parameter.dim() == 1 or name.endswith("e_score_correction_bias"):
                value = 0.3 * noise
            elif "embed" in name:
                value = 0.5 * noise
            else:
                value = noise * 1.3 / parameter.shape[1] ** 0.5
            parameter.copy_(value.bfloat16())
