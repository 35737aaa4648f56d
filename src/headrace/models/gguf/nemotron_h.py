"""GGUF files of Nemotron-H and Nemotron 3: what config.json would say of their layers, and what their tensors are.
Imports no torch.

Facts: llama.cpp's conversion/nemotron.py, and src/models/nemotron-h.cpp. A block with KV heads attends, one with a
width of MLPs is an MLP or experts, the others are Mamba-2 layers. Rows of queries and keys lie as llama's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.models.gguf.deepseek import SIGMOID
from headrace.models.gguf.families import MOST_LAYERS, Facts, refuse_experts
from headrace.models.gguf.granite_hybrid import mamba_names
from headrace.models.gguf.hybrids import KV_HEADS, of_each_layer
from headrace.types import UnsupportedModel

LAYER = "backbone.layers.{}."
MIXER = LAYER + "mixer."
CORRECTIONS = "blk.{}.exp_probs_b.bias"
NAMES = mamba_names(MIXER) | {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
    "blk.{}.attn_norm": LAYER + "norm",
    "blk.{}.attn_q": MIXER + "q_proj",
    "blk.{}.attn_k": MIXER + "k_proj",
    "blk.{}.attn_v": MIXER + "v_proj",
    "blk.{}.attn_output": MIXER + "o_proj",
    "blk.{}.ffn_up": MIXER + "up_proj",
    "blk.{}.ffn_down": MIXER + "down_proj",
    "blk.{}.ffn_gate_inp": MIXER + "gate",
    CORRECTIONS: MIXER + "gate.e_score_correction_bias",
    "blk.{}.ffn_up_exps": MIXER + "experts.{}.up_proj",
    "blk.{}.ffn_down_exps": MIXER + "experts.{}.down_proj",
    "blk.{}.ffn_up_shexp": MIXER + "shared_experts.up_proj",
    "blk.{}.ffn_down_shexp": MIXER + "shared_experts.down_proj",
}
READ = {
    "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
    "expert_shared_count", "expert_weights_norm", "expert_weights_scale", "expert_gating_func", "expert_group_count",
    "expert_group_used_count",
}  # fmt: skip


def fields(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """Raises UnsupportedModel for a routing that is not read, and for sizes that differ from layer to layer."""
    blocks = min(facts.layers, MOST_LAYERS)
    heads, attends = of_each_layer(facts, KV_HEADS)
    width, has_mlp = of_each_layer(facts, "feed_forward_length")
    kinds = np.where(attends, "full_attention", np.where(has_mlp, "mlp", "linear_attention"))[:blocks].tolist()
    values = facts.count("ssm.time_step_rank")
    return {
        "layers_block_type": ["moe" if _has_experts(facts, block) else kind for block, kind in enumerate(kinds)],
        "rope_parameters": None,
        "num_key_value_heads": heads,
        "intermediate_size": width,
        "mamba_num_heads": values,
        "mamba_head_dim": facts.count("ssm.inner_size") // max(1, values),
        "ssm_state_size": facts.count("ssm.state_size"),
        "n_groups": facts.count("ssm.group_count"),
        "conv_kernel": facts.count("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in facts.tensors),
        "use_bias": any(name.endswith(".ssm_in.bias") for name in facts.tensors),
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in facts.tensors),
    } | (_experts(facts) if facts.count("expert_count", 0) else {})


def _has_experts(facts: Facts, block: int) -> bool:
    return f"blk.{block}.ffn_gate_inp.weight" in facts.tensors


def _experts(facts: Facts) -> dict[str, Any]:
    refuse_experts(facts, READ)
    path = facts.file.path
    if (found := facts.count("expert_gating_func", SIGMOID)) != SIGMOID:
        raise UnsupportedModel(f"{path}: {facts.prefix}expert_gating_func {found} is not supported")
    if latent := facts.count("moe_latent_size", 0):
        raise UnsupportedModel(f"{path}: {facts.prefix}moe_latent_size {latent} is not supported")
    inner = facts.count("expert_feed_forward_length")
    return {
        "n_routed_experts": facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
        "moe_intermediate_size": inner,
        "moe_shared_expert_intermediate_size": facts.count("expert_shared_feed_forward_length", inner),
        "norm_topk_prob": facts.flag("expert_weights_norm", True),
        "routed_scaling_factor": facts.number("expert_weights_scale", 0.0) or 1.0,
        "n_group": facts.count("expert_group_count", 0) or 1,
        "topk_group": facts.count("expert_group_used_count", 0) or 1,
    }
