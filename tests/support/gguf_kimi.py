"""GGUF files of Kimi Linear, as llama.cpp's converter writes them (conversion/kimi_linear.py). Nothing here is taken
from headrace's reader."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gguf import ExpertGatingFuncType, GGUFWriter
from torch import Tensor

from tests.support.gguf_deepseek import write_each
from tests.support.gguf_files import KindOf

ARCHITECTURE = "kimi-linear"
SIZES: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, linear_num_heads=4, linear_head_dim=32,
    kv_lora_rank=128, qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=32, moe_intermediate_size=96,
    num_key_value_heads=4,
)  # fmt: skip
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kimi_linear": (ARCHITECTURE, "kimi", SIZES | dict(num_hidden_layers=3)),
    "kimi_linear_lora": (ARCHITECTURE, "kimi_uneven", SIZES | dict(q_lora_rank=128)),
}
"""As tests.support.gguf_families.KINDS."""
MODULES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.forget_gate.f_a_proj": "ssm_f_a", "self_attn.forget_gate.f_b_proj": "ssm_f_b",
    "self_attn.g_a_proj": "ssm_g_a", "self_attn.g_b_proj": "ssm_g_b", "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm", "mlp.gate": "ffn_gate_inp", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip


def describe(writer: GGUFWriter, config: Any) -> None:
    """All keys of a file."""
    writer.add_context_length(config.model_max_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([int(kind == "full_attention") for kind in config.layer_types])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_kda_head_dim(config.linear_head_dim)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_token)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.num_shared_experts)
    writer.add_leading_dense_block_count(config.mlp_layer_types.index("sparse"))
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if config.num_expert_group > 1:
        writer.add_expert_weights_norm(config.moe_renormalize)
        writer.add_expert_group_count(config.num_expert_group)
        writer.add_expert_group_used_count(config.topk_group)


def add(writer: GGUFWriter, config: Any, name: str, parameter: Tensor, kind_of: KindOf) -> bool:
    """Writes a parameter, and into it what is written; whether it does not lie as DeepSeek's."""
    whole = name.removeprefix("model.")
    prefix, own = (f"blk.{whole.split('.')[1]}.", whole.split(".", 2)[2]) if "layers." in whole else ("", whole)
    module = own.removesuffix(".weight")
    if module == "self_attn.conv1d":
        for part, filters in zip("qkv", parameter.numpy().reshape(3, 1, -1, 1, parameter.shape[-1]), strict=True):
            writer.add_tensor(f"{prefix}ssm_conv1d_{part}.weight", np.ascontiguousarray(filters))
    elif module == "self_attn.forget_gate.A_log":
        rates = -parameter.exp()
        writer.add_tensor(f"{prefix}ssm_a", rates.numpy())
        parameter.copy_(torch.log(-rates))
    elif module == "self_attn.forget_gate.dt_bias":
        writer.add_tensor(f"{prefix}ssm_dt.bias", parameter.numpy())
    elif module not in MODULES:
        return False
    elif parameter.dim() == 1:
        writer.add_tensor(f"{prefix}{MODULES[module]}.weight", parameter.numpy().astype(np.float32))
    else:
        write_each(writer, f"{prefix}{MODULES[module]}.weight", parameter, kind_of)
    return True
