"""GGUF files of Nemotron-H and Nemotron 3, as llama.cpp's converter writes them (conversion/nemotron.py). Nothing here
is taken from headrace's reader."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGUFWriter
from torch import Tensor

from tests.support.gguf_deepseek import write_each
from tests.support.gguf_files import KindOf
from tests.support.gguf_granite import add_vector

ARCHITECTURES = ("nemotron_h", "nemotron_h_moe")
OWN: dict[str, Any] = dict(hidden_size=256, head_dim=64, num_attention_heads=2, num_key_value_heads=1)
"""Queries are narrower than the stream."""
SPARSE = OWN | dict(hybrid_override_pattern="MEM*EME", n_group=1)
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nemotron": ("nemotron_h", "nemotron", OWN | dict(intermediate_size=512)),
    "nemotron_experts": ("nemotron_h_moe", "nemotron_experts", SPARSE),
}
"""As tests.support.gguf_families.KINDS."""
MODULES = {
    "embeddings": "token_embd", "norm_f": "output_norm", "lm_head": "output", "norm": "attn_norm",
    "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k", "mixer.v_proj": "attn_v", "mixer.o_proj": "attn_output",
    "mixer.in_proj": "ssm_in", "mixer.out_proj": "ssm_out", "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp", "mixer.experts.up_proj": "ffn_up_exps", "mixer.experts.down_proj": "ffn_down_exps",
    "mixer.shared_experts.up_proj": "ffn_up_shexp", "mixer.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip


def describe(writer: GGUFWriter, config: Any) -> None:
    """All keys of a file."""
    kinds, sparse = config.layers_block_type, "moe" in config.layers_block_type
    inner = config.moe_intermediate_size if sparse else config.intermediate_size
    writer.add_context_length(2**20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(len(kinds))
    writer.add_feed_forward_length([inner * (kind in ("moe", "mlp")) for kind in kinds])
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in kinds])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_scaling_finetuned(False)
    writer.add_vocab_size(config.vocab_size)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    if not sparse:
        return
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(inner)
    writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)


def add(writer: GGUFWriter, config: Any, name: str, parameter: Tensor, kind_of: KindOf) -> bool:
    """Writes a parameter, and into it what is written: True for all of them."""
    whole = name.removeprefix("model.")
    prefix, own = (f"blk.{whole.split('.')[1]}.", whole.split(".", 2)[2]) if "layers." in whole else ("", whole)
    module = own.removesuffix(".weight")
    if module == "mixer.norm" or module not in MODULES:
        add_vector(writer, prefix, own.removeprefix("mixer."), parameter, config.n_groups)
    elif parameter.dim() == 1:
        writer.add_tensor(f"{prefix}{MODULES[module]}.weight", parameter.numpy().astype(np.float32))
    else:
        rows = np.arange(len(parameter))
        if module in ("mixer.q_proj", "mixer.k_proj"):  # neighbours in each head, where transformers has halves
            rows = rows.reshape(-1, 2, config.head_dim // 2).swapaxes(1, 2).reshape(-1)
        written = parameter[rows]
        write_each(writer, f"{prefix}{MODULES[module]}.weight", written, kind_of)
        parameter[rows] = written
    return True
