"""GGUF files of Apertus and Jais 2, as llama.cpp's converter writes them (conversion/apertus.py, llama.py, jais.py and
base.py). Nothing here is taken from headrace's reader."""

from __future__ import annotations

from typing import Any

from gguf import GGUFWriter
from torch import Tensor

from tests.support.gguf_deepseek import write_each
from tests.support.gguf_files import KindOf, divisors

ARCHITECTURES = ("apertus", "jais2")
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "apertus": ("apertus", "apertus", dict(attention_bias=False)),
    "apertus_plain": ("apertus", "apertus", dict(rope_parameters=dict(rope_type="default", rope_theta=5e5))),
    "jais2": ("jais2", "jais2", {}),
    "jais2_tied": ("jais2", "jais2", dict(attention_bias=False, mlp_bias=False, tie_word_embeddings=True)),
}
"""As tests.support.gguf_families.KINDS."""
MODULES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def add_activations(writer: GGUFWriter, model: Any) -> None:
    """The numbers of each layer's xIELU, as the model has them."""
    own = [layer.mlp.act_fn for layer in model.model.layers]
    for name in ("alpha_n", "alpha_p", "beta", "eps"):
        getattr(writer, f"add_xielu_{name}")([getattr(each, name).float().item() for each in own])


def describe(writer: GGUFWriter, config: Any) -> None:
    """All keys of a file but those of xIELU."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    if config.model_type == "jais2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        return
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", divisors(config.rope_parameters, head_dim))


def add(writer: GGUFWriter, config: Any, name: str, parameter: Tensor, kind_of: KindOf) -> bool:
    """Writes a parameter, and into it what is written; whether it is written here: all are."""
    if ".act_fn." in name or (config.tie_word_embeddings and name == "lm_head.weight"):
        return True
    parts = name.removeprefix("model.").split(".")
    block = f"blk.{parts[1]}." if parts[0] == "layers" else ""
    theirs = f"{block}{MODULES['.'.join(parts[2:-1] if block else parts[:-1])]}.{parts[-1]}"
    if parameter.dim() == 1:
        writer.add_tensor(theirs, parameter.float().numpy())
    else:
        write_each(writer, theirs, parameter, kind_of)
    return True
