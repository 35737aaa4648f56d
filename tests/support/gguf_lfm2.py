"""GGUF files of LFM2, as llama.cpp's converter writes them (conversion/lfm2.py). Nothing here is taken from headrace's
reader."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gguf import ExpertGatingFuncType, GGUFWriter

ARCHITECTURES = ("lfm2", "lfm2moe")
OWN: dict[str, Any] = dict(num_hidden_layers=4, hidden_size=256, intermediate_size=512)
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lfm2": ("lfm2", "lfm2", OWN),
    "lfm2_experts": ("lfm2moe", "lfm2_experts", OWN | dict(moe_intermediate_size=96, routed_scaling_factor=1.0)),
}
"""As tests.support.gguf_families.KINDS."""
NAMES = {
    "embedding_norm": "token_embd_norm", "operator_norm": "attn_norm", "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj", "conv.conv": "shortconv.conv", "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp", "ffn_norm": "ffn_norm",
}  # fmt: skip


def describe(writer: GGUFWriter, config: Any) -> None:
    """All keys of a file."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([0 if kind == "conv" else config.num_key_value_heads for kind in config.layer_types])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type == "lfm2":
        writer.add_feed_forward_length(_width(config))
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def _width(config: Any) -> int:
    block = config.block_multiple_of
    return block * ((int(2 * config.intermediate_size / 3) + block - 1) // block)


def add_corrections(writer: GGUFWriter, model: torch.nn.Module) -> None:
    """Which are no parameters."""
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            writer.add_tensor(f"blk.{name.split('.')[2]}.exp_probs_b.bias", buffer.numpy().astype(np.float32))
