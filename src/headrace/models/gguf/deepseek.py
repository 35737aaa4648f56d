"""GGUF files of DeepSeek-V2, V3 and their kin, of Mistral 4, Youtu-LLM, MiniCPM3, GLM-4.5 and dots.llm1: what
config.json would say of latent attention, experts and routers. Imports no torch.

Facts: llama.cpp's conversion/deepseek.py, mistral.py, mistral3.py, minicpm.py, glm.py and dots1.py,
src/models/deepseek2.cpp and minicpm3.cpp.
DeepSeek's files from April 2025 on have what heads make of latents in two tensors, keys' transposed (models.checkpoint
puts them together), and say sizes of heads by keys of their own; older ones have the checkpoint's tensor, and the sizes
in the usual keys.
"""

from __future__ import annotations

from typing import Any

from headrace.logs import shown
from headrace.models.gguf.families import LAYER, Facts, refuse_sections, yarn
from headrace.models.gguf.header import GgufFile
from headrace.types import UnsupportedModel

SHARED = {
    "blk.{}.exp_probs_b.bias": LAYER + "mlp.gate.e_score_correction_bias",
    "blk.{}.ffn_gate_shexp": LAYER + "mlp.shared_experts.gate_proj",
    "blk.{}.ffn_up_shexp": LAYER + "mlp.shared_experts.up_proj",
    "blk.{}.ffn_down_shexp": LAYER + "mlp.shared_experts.down_proj",
}
GLM_NAMES = SHARED | {"blk.{}.post_attention_norm": LAYER + "post_attention_layernorm"}
NAMES = SHARED | {
    "blk.{}.attn_q_a": LAYER + "self_attn.q_a_proj",
    "blk.{}.attn_q_a_norm": LAYER + "self_attn.q_a_layernorm",
    "blk.{}.attn_q_b": LAYER + "self_attn.q_b_proj",
    "blk.{}.attn_kv_a_mqa": LAYER + "self_attn.kv_a_proj_with_mqa",
    "blk.{}.attn_kv_a_norm": LAYER + "self_attn.kv_a_layernorm",
    "blk.{}.attn_kv_b": LAYER + "self_attn.kv_b_proj",
    "blk.{}.attn_k_b": LAYER + "self_attn.k_b_proj",
    "blk.{}.attn_v_b": LAYER + "self_attn.v_b_proj",
}
SOFTMAX, SIGMOID = 1, 2
"""Of expert_gating_func."""
FLASH = ([154_880, 47], [154_880, 48])
"""Vocabulary and blocks of GLM-4.7-Flash, without the layer behind the last one and with it. Its first files do not say
that the router has sigmoids."""
READ = {
    "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_count", "expert_group_count",
    "expert_group_used_count", "expert_weights_scale", "expert_weights_norm", "expert_gating_func",
}  # fmt: skip
LOG_UNIT = 0.1
"""That the converter multiplies mscale_all_dim by."""
TEMPERED = 0.1
"""llama_4_scaling_beta of Mistral Small 4, of which its files do not tell."""


def has_sigmoids(file: GgufFile) -> bool:
    """Whether the router of a deepseek2 file has sigmoids, and not the softmax of DeepSeek-V2."""
    kind = file.metadata.get("deepseek2.expert_gating_func")
    if kind is None:
        sizes = [file.metadata.get(f"deepseek2.{name}") for name in ("vocab_size", "block_count")]
        return all(isinstance(size, int) for size in sizes) and sizes in FLASH
    if not isinstance(kind, int) or kind not in (SOFTMAX, SIGMOID):
        raise UnsupportedModel(f"{file.path}: deepseek2.expert_gating_func {shown(str(kind))} is not supported")
    return bool(kind == SIGMOID)


def v2(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    if facts.flag("expert_weights_norm", False):
        raise UnsupportedModel(f"{facts.file.path}: deepseek2.expert_weights_norm with a softmax is not supported")
    fields = common(facts, rope)
    return fields | {"topk_method": "greedy" if fields["n_group"] == 1 else "group_limited_greedy"}


def v3(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    return common(facts, rope) | {"norm_topk_prob": facts.flag("expert_weights_norm", False)}


def mistral4(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """Queries are multiplied by a factor of their position, counted in lengths that yarn stretches."""
    refuse_gating(facts, SOFTMAX)
    beta, length = facts.number("attention.temperature_scale", TEMPERED), rope.get("original_max_position_embeddings")
    name = "attention.temperature_length"
    if facts.value(name) is not None and facts.count(name) != length:
        raise UnsupportedModel(
            f"{facts.file.path}: {facts.prefix}{name} other than yarn's original length, {length}, is not supported"
        )
    fields = common(facts, rope)
    return fields | {
        "head_dim": fields["qk_rope_head_dim"] + fields["qk_nope_head_dim"],
        "rope_parameters": fields["rope_parameters"] | {"llama_4_scaling_beta": beta},
        "norm_topk_prob": facts.flag("expert_weights_norm", False),
        "rope_interleave": True,
    }


def youtu(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    return _sizes(facts, rope) | {"rope_interleave": True}


def glm4_moe(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    refuse_sections(facts)
    refuse_gating(facts, SIGMOID)
    return _experts(facts) | {
        "norm_topk_prob": facts.flag("expert_weights_norm", True),
        "attention_bias": "blk.0.attn_q.bias" in facts.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in facts.tensors,
    }


def dots1(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """Its queries and keys are always normed."""
    fields = glm4_moe(facts, rope) | {"norm_topk_prob": facts.flag("expert_weights_norm", False)}
    del fields["use_qk_norm"]
    return fields | {"sliding_window": None}


def minicpm3(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """The file says neither its multipliers, which are those of the one model, nor how wide values are."""
    heads = facts.count("attention.head_count")
    return _latent(facts, facts.count("attention.key_length")) | {
        "v_head_dim": facts.count("embedding_length") // max(1, heads),
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }


def refuse_gating(facts: Facts, but: int) -> None:
    """Raises UnsupportedModel for a router of another kind than this."""
    if facts.count("expert_gating_func", but) != but:
        name = f"{facts.prefix}expert_gating_func"
        raise UnsupportedModel(f"{facts.file.path}: {name} other than {but} is not supported")


def _experts(facts: Facts) -> dict[str, Any]:
    """They are in one group where the file names none, as llama.cpp has it."""
    for key in facts.file.metadata:
        name = key.removeprefix(facts.prefix)
        if name.startswith("expert_") and name not in READ:
            raise UnsupportedModel(f"{facts.file.path}: {shown(key)} is not supported")
    return {
        "first_k_dense_replace": facts.count("leading_dense_block_count", 0),
        "n_routed_experts": facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
        "moe_intermediate_size": facts.count("expert_feed_forward_length"),
        "n_shared_experts": facts.count("expert_shared_count"),
        "n_group": facts.count("expert_group_count", 1),
        "topk_group": facts.count("expert_group_used_count", 1),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
    }


def common(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """What all models with latents and experts say."""
    return _experts(facts) | _sizes(facts, rope)


def _sizes(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """Of heads and latents, and their rotation."""
    lengths = ("attention.key_length", "attention.value_length")
    query, value = (facts.count(f"{length}_mla", facts.count(length)) for length in lengths)
    return _latent(facts, query) | {"v_head_dim": value, "rope_parameters": rope | yarn(facts, rope, LOG_UNIT)}


def _latent(facts: Facts, query: int) -> dict[str, Any]:
    """query: numbers of a head's queries."""
    rotated = facts.count("rope.dimension_count")
    return {
        "head_dim": rotated,
        "num_key_value_heads": facts.count("attention.head_count"),
        "kv_lora_rank": facts.count("attention.kv_lora_rank"),
        "q_lora_rank": facts.count("attention.q_lora_rank", 0) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": query - rotated,
    }
