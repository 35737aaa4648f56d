"""GGUF files of Qwen3-Next and Qwen3.5, as llama.cpp's converter writes them (conversion/qwen.py): metadata, and rows
that go by key head. Nothing here is taken from headrace's reader."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGUFWriter

from tests.support.gguf_files import Array


def by_kind(config: Any) -> tuple[Array, Array]:
    """Qwen3-Next's rows go by key head: q, k, its v, its z. Here (q, k, v) of all, and z of all."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    sizes = [config.linear_key_head_dim] * 2 + [values // keys * config.linear_value_head_dim] * 2
    rows = np.arange(keys * sum(sizes)).reshape(keys, -1)
    q, k, v, z = (part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1))
    return np.concatenate([q, k, v]), z


def describe(writer: GGUFWriter, config: Any) -> None:
    """The keys beside those of all families."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(4)
    if getattr(config, "num_experts", 0):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
