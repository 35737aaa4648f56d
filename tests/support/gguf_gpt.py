"""GGUF files of GPT-2, GPT-NeoX, Phi-2 and StableLM, as llama.cpp's converter writes them (conversion/gpt2.py,
gpt_neox.py, phi.py and stablelm.py). Nothing here is taken from headrace's reader."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from torch import Tensor

from tests.support.gguf_deepseek import write_each
from tests.support.gguf_files import KindOf

ARCHITECTURES = ("gpt2", "gptneox", "phi2", "stablelm")
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("gpt2", "gpt2", dict(n_embd=256, tie_word_embeddings=True)),
    "gpt_neox": ("gptneox", "gpt_neox", dict(rope_parameters=None, rotary_pct=0.5)),
    "stablelm": ("stablelm", "stablelm", {}),
    "stablelm_parallel": ("stablelm", "stablelm", dict(use_parallel_residual=True)),
    "phi": ("phi2", "phi", dict(num_key_value_heads=4)),
    "gpt_neox_sequential": ("gptneox", "gpt_neox", dict(use_parallel_residual=False)),
}
"""As tests.support.gguf_families.KINDS."""
MODULES = {
    "wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output", "ln_1": "attn_norm",
    "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down", "embed_in": "token_embd", "final_layer_norm": "output_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "attention.query_key_value": "attn_qkv",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.dense": "attn_output", "self_attn.o_proj": "attn_output", "norm": "output_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down", "final_layernorm": "output_norm", "embed_tokens": "token_embd",
    "attention.dense": "attn_output", "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down",
}  # fmt: skip


def describe(writer: GGUFWriter, config: Any) -> None:
    """All keys of a file."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    part = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(part * (config.hidden_size // config.num_attention_heads)))
    if config.model_type in ("gpt_neox", "stablelm"):
        writer.add_parallel_residual(config.use_parallel_residual)
    if config.model_type != "gpt_neox":
        writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)


def add(writer: GGUFWriter, config: Any, name: str, parameter: Tensor, kind_of: KindOf) -> bool:
    """Writes a parameter, and into it what is written; whether it is written here: all are."""
    parts = name.removeprefix("transformer.").removeprefix("gpt_neox.").removeprefix("model.").split(".")
    block = f"blk.{parts[1]}." if parts[0] in ("h", "layers") else ""
    module, end = ".".join(parts[2:-1] if block else parts[:-1]), parts[-1]
    theirs = f"{block}{MODULES[module]}.{end}"
    if module == "lm_head" and config.tie_word_embeddings:
        return True
    if parameter.dim() == 1:
        writer.add_tensor(theirs, _in_order(parameter.numpy(), config, module).astype(np.float32))
    elif block and config.model_type == "gpt2":
        write_each(writer, theirs, parameter, kind_of, lambda part: part.T)
    elif module == "attention.query_key_value":
        wanted = _in_order(np.arange(len(parameter)), config, module)
        rows = parameter[wanted].clone()
        write_each(writer, theirs, rows, kind_of)
        parameter[wanted] = rows
    else:
        write_each(writer, theirs, parameter, (lambda _: Kind.F32) if module == "wpe" else kind_of)
    return True


def _in_order(rows: Any, config: Any, module: str) -> Any:
    """All queries, all keys, all values: GPT-NeoX has them head by head."""
    if module != "attention.query_key_value":
        return rows
    return rows.reshape(config.num_attention_heads, 3, -1).swapaxes(0, 1).reshape(-1)
