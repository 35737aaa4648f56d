"""GGUF files of Falcon-H1, as llama.cpp's converter writes them (conversion/falcon_h1.py, mamba.py): matrices are
multiplied by the model's multipliers. Nothing here is taken from headrace's reader."""

from __future__ import annotations

from typing import Any

import torch
from gguf import GGUFWriter
from torch import Tensor

from tests.support.gguf_deepseek import write_each
from tests.support.gguf_files import KindOf
from tests.support.gguf_granite import add_vector

ARCHITECTURE = "falcon-h1"
SIZES: dict[str, Any] = dict(mamba_d_ssm=256, mamba_n_heads=4, num_hidden_layers=2, hidden_size=256, head_dim=64)
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "falcon_h1": (ARCHITECTURE, "falcon_h1", SIZES),
    "falcon_h1_normed": (ARCHITECTURE, "falcon_h1_normed", SIZES | dict(attention_bias=False, mlp_bias=False)),
}
"""As tests.support.gguf_families.KINDS."""
MODULES = {
    "embed_tokens": "token_embd", "final_layernorm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "pre_ff_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mamba.in_proj": "ssm_in", "mamba.out_proj": "ssm_out", "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up", "feed_forward.down_proj": "ffn_down",
}  # fmt: skip


def describe(writer: GGUFWriter, config: Any) -> None:
    """All keys of a file."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_d_ssm)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)


def add(writer: GGUFWriter, config: Any, name: str, parameter: Tensor, kind_of: KindOf) -> bool:
    """Writes a parameter, and into it what is written."""
    whole = name.removeprefix("model.")
    prefix, own = (f"blk.{whole.split('.')[1]}.", whole.split(".", 2)[2]) if "layers." in whole else ("", whole)
    module = own.removesuffix(".weight")
    if module not in MODULES:
        add_vector(writer, prefix, own.removeprefix("mamba."), parameter, config.mamba_n_groups)
    elif parameter.dim() == 1:
        writer.add_tensor(f"{prefix}{MODULES[module]}.weight", parameter.float().numpy())
    else:
        factor = _factor(config, module)
        multiplied = parameter * factor
        write_each(writer, f"{prefix}{MODULES[module]}.weight", multiplied, kind_of)
        parameter.copy_(multiplied / factor)
    return True


def _factor(config: Any, module: str) -> Tensor:
    """What the converter multiplies a matrix by."""
    parts, keys = config.ssm_multipliers, config.mamba_n_groups * config.mamba_d_state
    widths = [config.mamba_d_ssm, config.mamba_d_ssm, keys, keys, config.mamba_n_heads]
    of_rows = [torch.full((width, 1), each) for width, each in zip(widths, parts, strict=True)]
    of_input, (gate, down) = config.attention_in_multiplier, config.mlp_multipliers
    return {
        "embed_tokens": torch.tensor(config.embedding_multiplier),
        "lm_head": torch.tensor(config.lm_head_multiplier),
        "self_attn.q_proj": torch.tensor(of_input),
        "self_attn.k_proj": torch.tensor(of_input * config.key_multiplier),
        "self_attn.v_proj": torch.tensor(of_input),
        "self_attn.o_proj": torch.tensor(config.attention_out_multiplier),
        "mamba.in_proj": torch.cat(of_rows) * config.ssm_in_multiplier,
        "mamba.out_proj": torch.tensor(config.ssm_out_multiplier),
        "feed_forward.gate_proj": torch.tensor(gate),
        "feed_forward.down_proj": torch.tensor(down),
    }.get(module, torch.tensor(1.0))
