"""GGUF files of Kimi Linear: what config.json would say of its layers, and what their tensors are. Imports no torch.

Facts: llama.cpp's conversion/kimi_linear.py and src/models/kimi-linear.cpp. A block with KV heads has latent attention,
the others Kimi Delta Attention, with as many heads.
"""

from __future__ import annotations

from typing import Any

from headrace.models.gguf.deepseek import NAMES as LATENT
from headrace.models.gguf.deepseek import SHARED, SIGMOID, refuse_gating
from headrace.models.gguf.families import LAYER, MOST_LAYERS, Facts, refuse_experts
from headrace.models.gguf.hybrids import KV_HEADS, of_each_layer

OWN, MIXTURE = LAYER + "self_attn.", LAYER + "block_sparse_moe."
NAMES = {name: theirs for name, theirs in LATENT.items() if name not in SHARED}
NAMES |= {name: theirs.replace(".mlp.", ".block_sparse_moe.") for name, theirs in SHARED.items()}
NAMES |= {f"blk.{{}}.ssm_conv1d_{part}": f"{OWN}{part}_conv1d" for part in "qkv"}
NAMES |= {f"blk.{{}}.ssm_{part}": f"{OWN}{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")}
NAMES |= {
    "blk.{}.ssm_beta": OWN + "b_proj",
    "blk.{}.ssm_a": OWN + "A_log",
    "blk.{}.ssm_dt.bias": OWN + "dt_bias",
    "blk.{}.ssm_norm": OWN + "o_norm",
}
READ = {
    "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_count", "expert_weights_norm",
    "expert_weights_scale", "expert_gating_func", "expert_group_count", "expert_group_used_count",
}  # fmt: skip


def fields(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """Raises UnsupportedModel for a routing that is not read, and where the file does not say which blocks attend."""
    refuse_experts(facts, READ)
    refuse_gating(facts, SIGMOID)
    _, attends = of_each_layer(facts, KV_HEADS)
    heads, rotated = facts.count("attention.head_count"), facts.count("rope.dimension_count")
    dense = facts.count("leading_dense_block_count", 0)
    return {
        "layer_types": ["full_attention" if each else "linear_attention" for each in attends],
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(min(len(attends), MOST_LAYERS))],
        "rope_parameters": None,
        "model_max_length": facts.count("context_length"),
        "num_key_value_heads": heads,
        "head_dim": rotated,
        "kv_lora_rank": facts.count("attention.kv_lora_rank"),
        "q_lora_rank": facts.count("attention.q_lora_rank", 0) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": facts.count("attention.key_length_mla") - rotated,
        "v_head_dim": facts.count("attention.value_length_mla"),
        "linear_head_dim": facts.count("kda.head_dim"),
        "linear_num_heads": heads,
        "linear_conv_kernel_dim": facts.count("ssm.conv_kernel"),
        "num_experts": facts.count("expert_count"),
        "num_experts_per_token": facts.count("expert_used_count"),
        "moe_intermediate_size": facts.count("expert_feed_forward_length"),
        "num_shared_experts": facts.count("expert_shared_count"),
        "moe_renormalize": facts.flag("expert_weights_norm", True),
        "num_expert_group": facts.count("expert_group_count", 1),
        "topk_group": facts.count("expert_group_used_count", 1),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
    }
