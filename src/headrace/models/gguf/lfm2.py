"""GGUF files of LFM2: what config.json would say of short convolutions and experts. Imports no torch.

Facts: llama.cpp's conversion/lfm2.py and src/models/lfm2.cpp. A layer without KV heads convolves. The width of MLPs is
the one that is computed with, whatever config.json had it made from.
"""

from __future__ import annotations

from typing import Any

from headrace.models.gguf.deepseek import SIGMOID
from headrace.models.gguf.families import LAYER, Facts, refuse_experts
from headrace.models.gguf.hybrids import KV_HEADS, of_each_layer
from headrace.types import UnsupportedModel

NAMES = {
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm",
    "blk.{}.attn_norm": LAYER + "operator_norm",
    "blk.{}.attn_q_norm": LAYER + "self_attn.q_layernorm",
    "blk.{}.attn_k_norm": LAYER + "self_attn.k_layernorm",
    "blk.{}.attn_output": LAYER + "self_attn.out_proj",
    "blk.{}.shortconv.in_proj": LAYER + "conv.in_proj",
    "blk.{}.shortconv.conv": LAYER + "conv.conv",
    "blk.{}.shortconv.out_proj": LAYER + "conv.out_proj",
    "blk.{}.ffn_norm": LAYER + "ffn_norm",
    "blk.{}.ffn_gate": LAYER + "feed_forward.w1",
    "blk.{}.ffn_up": LAYER + "feed_forward.w3",
    "blk.{}.ffn_down": LAYER + "feed_forward.w2",
}
CORRECTIONS = "blk.{}.exp_probs_b.bias"
EXPERT_NAMES = NAMES | {CORRECTIONS: LAYER + "feed_forward.expert_bias"}
READ = {
    "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_gating_func", "expert_weights_norm",
    "expert_weights_scale",
}  # fmt: skip


def dense(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    return _common(facts) | {"block_auto_adjust_ff_dim": False}


def with_experts(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    refuse_experts(facts, READ)
    if (found := facts.count("expert_gating_func", SIGMOID)) != SIGMOID:
        raise UnsupportedModel(f"{facts.file.path}: {facts.prefix}expert_gating_func {found} is not supported")
    first = facts.count("leading_dense_block_count", 0)
    return _common(facts) | {
        "num_experts": facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
        "moe_intermediate_size": facts.count("expert_feed_forward_length"),
        "num_dense_layers": first,
        "use_expert_bias": CORRECTIONS.format(first) in facts.tensors,
        "norm_topk_prob": facts.flag("expert_weights_norm", True),
        "routed_scaling_factor": facts.number("expert_weights_scale", 0.0) or 1.0,
    }


def _common(facts: Facts) -> dict[str, Any]:
    path, (heads, attends) = facts.file.path, of_each_layer(facts, KV_HEADS)
    if facts.count("attention.sliding_window", 0):
        raise UnsupportedModel(f"{path}: {facts.prefix}attention.sliding_window is not supported")
    return {
        "num_key_value_heads": heads,
        "layer_types": ["full_attention" if each else "conv" for each in attends],
        "conv_L_cache": facts.count("shortconv.l_cache"),
        "conv_bias": any(name.endswith(".shortconv.in_proj.bias") for name in facts.tensors),
    }
