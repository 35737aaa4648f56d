"""GGUF files of Gemma 4 as llama.cpp's converter writes them (conversion/gemma.py): numbers for each layer, divisors
that say which pairs of global layers turn, and gates and ups of all experts in one tensor.

Nothing here is taken from headrace's reader.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from torch import Tensor

from tests.support.checkpoints import GEMMA4_EXPERTS, GEMMA4_LARGE, GEMMA4_SMALL
from tests.support.gguf_deepseek import write_each
from tests.support.gguf_files import KindOf

LAYERS: dict[str, Any] = dict(num_hidden_layers=4, head_dim=64, global_head_dim=128)
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma4": ("gemma4", "gemma4", LAYERS | GEMMA4_LARGE),
    "gemma4_small": ("gemma4", "gemma4_small", LAYERS | GEMMA4_SMALL),
    "gemma4_experts": ("gemma4", "gemma4_experts", LAYERS | GEMMA4_LARGE | GEMMA4_EXPERTS),
    "gemma4_experts_apart": ("gemma4", "gemma4_experts", LAYERS | GEMMA4_LARGE | GEMMA4_EXPERTS),
}
NAMES = {
    "post_feedforward_layernorm_1": "post_ffw_norm_1", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2", "router.proj": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
    "embed_tokens_per_layer": "per_layer_token_embd", "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}  # fmt: skip
VECTORS = {
    "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
}  # fmt: skip


def describe(writer: GGUFWriter, config: Any) -> None:
    """The keys beside those of all families, and some in their place."""
    local = [kind == "sliding_attention" for kind in config.layer_types]
    full, layers = config.rope_parameters["full_attention"], [config.per_layer_config[i] for i in range(len(local))]
    dims = [layers[local.index(False)].head_dim, layers[local.index(True)].head_dim]
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(local)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    for end, dim in zip(("", "_swa"), dims, strict=True):
        for part in ("key_length", "value_length"):
            writer.add_uint32(f"gemma4.attention.{part}{end}", dim)
        writer.add_uint32(f"gemma4.rope.dimension_count{end}", dim)
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    turned = int(dims[0] * full["partial_rotary_factor"] / 2)
    divisors = [1.0] * turned + [1e30] * (dims[0] // 2 - turned)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    heads = [layer.num_key_value_heads for layer in layers]
    writer.add_head_count_kv(heads if config.attention_k_eq_v else heads[0])
    inner, first = config.intermediate_size, config.num_hidden_layers - config.num_kv_shared_layers
    if config.use_double_wide_mlp:
        writer.add_feed_forward_length([inner << (layer >= first) for layer in range(config.num_hidden_layers)])
    else:
        writer.add_feed_forward_length(inner)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def draw(writer: GGUFWriter, model: Any) -> None:
    """Scales of what leaves each layer, which are no parameters: the model has ones. And queries by a quarter as long:
    nothing else scales scores, and softmaxes that choose one key make fp32 a rough measure."""
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            parameter.data.mul_(0.25)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(0.7 + 0.1 * torch.rand(buffer.shape, generator=torch.Generator().manual_seed(len(name))))
            _vector(writer, f"blk.{name.split('.')[2]}.{VECTORS['layer_scalar']}", buffer)


def add(writer: GGUFWriter, name: str, parameter: Tensor, kind_of: KindOf, kind: str) -> bool:
    """Writes a parameter that is called or lies otherwise than elsewhere, and into it what is written; whether it is
    one."""
    prefix, own = f"blk.{name.split('.')[2]}." if ".layers." in name else "", name.split(".", 3)[-1]
    if own in VECTORS:
        _vector(writer, prefix + VECTORS[own], parameter)
        return True
    if ".experts." not in name:
        return False
    whole = {"experts.gate_up_proj": ("gate_up",), "experts.down_proj": ("down",)}
    parts = ("gate", "up") if kind.endswith("apart") and "gate_up" in own else whole[own]
    for part, each in zip(parts, parameter.chunk(len(parts), dim=1), strict=True):
        write_each(writer, f"{prefix}ffn_{part}_exps.weight", each, kind_of)
    return True


def _vector(writer: GGUFWriter, name: str, value: Tensor) -> None:
    writer.add_tensor(name, np.ascontiguousarray(value.detach().float().numpy()))
