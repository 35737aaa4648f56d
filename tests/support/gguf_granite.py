"""GGUF files of Granite 4 with Mamba-2 layers, as llama.cpp's converter writes them (conversion/granite.py, mamba.py).
Nothing here is taken from headrace's reader."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from torch import Tensor

from tests.support import gguf_routed
from tests.support.gguf_deepseek import write_each
from tests.support.gguf_files import KindOf

ARCHITECTURE = "granitehybrid"
OWN: dict[str, Any] = dict(num_hidden_layers=4, hidden_size=256, head_dim=None, num_attention_heads=4)
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "granite4_hybrid": (ARCHITECTURE, "granite", OWN | dict(shared_intermediate_size=512, mamba_n_groups=2)),
    "granite4_hybrid_turned": (ARCHITECTURE, "granite_uneven", OWN | dict(mamba_n_heads=16, mamba_n_groups=2)),
    "granite4_hybrid_experts": (ARCHITECTURE, "granite_experts", OWN | dict(intermediate_size=96)),
}
"""As tests.support.gguf_families.KINDS."""
MATRICES = {"mamba.in_proj": "ssm_in", "mamba.out_proj": "ssm_out", "shared_mlp.output_linear": "ffn_down"}


def describe(writer: GGUFWriter, config: Any) -> None:
    """All keys of a file."""
    turned = config.position_embedding_type == "rope"
    writer.add_context_length(config.max_position_embeddings if turned else 2**20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    attends = [kind == "full_attention" for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads * each for each in attends])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_scaling_finetuned(turned)
    writer.add_vocab_size(config.vocab_size)
    gguf_routed.granite(writer, config)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)


def add(writer: GGUFWriter, config: Any, name: str, parameter: Tensor, kind_of: KindOf) -> bool:
    """Writes a parameter of a Mamba-2 layer, or of an MLP without experts, and into it what is written; whether it is
    one."""
    dense = "shared_mlp" in name and not config.num_local_experts
    if "mamba." not in name and not dense:
        return False
    prefix, module = f"blk.{name.split('.')[2]}.", name.split(".", 3)[-1].rpartition(".")[0]
    if module == "shared_mlp.input_linear":
        for part, own in zip(("gate", "up"), parameter.chunk(2), strict=True):
            write_each(writer, f"{prefix}ffn_{part}.weight", own, kind_of)
    elif module in MATRICES:
        write_each(writer, f"{prefix}{MATRICES[module]}.weight", parameter, kind_of)
    else:
        add_vector(writer, prefix, name.split("mamba.")[1], parameter, config.mamba_n_groups)
    return True


def add_vector(writer: GGUFWriter, prefix: str, end: str, parameter: Tensor, groups: int) -> None:
    """A vector or filter of a Mamba-2 layer, of such a name in it. They stay as they are."""
    value = parameter.detach().float()
    theirs, laid_out = {
        "A_log": ("ssm_a", -value.exp()[..., None]),
        "D": ("ssm_d", value[..., None]),
        "dt_bias": ("ssm_dt.bias", value),
        "norm.weight": ("ssm_norm.weight", value.view(groups, -1) if end == "norm.weight" else value),
        "conv1d.weight": ("ssm_conv1d.weight", value.squeeze()),
        "conv1d.bias": ("ssm_conv1d.bias", value),
    }[end]
    if end == "A_log":
        parameter.copy_(torch.from_numpy(np.log(-laid_out[:, 0].numpy())))
    writer.add_tensor(prefix + theirs, laid_out.numpy())
