"""GGUF files of DeepSeek's models and their kin, and of GLM-4.5's, as llama.cpp's converter writes them: metadata and
names, what heads make of latents in two tensors, and all experts of a layer in one.

Nothing here is taken from headrace's reader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gguf import ExpertGatingFuncType, GGUFWriter, quants
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from tests.support.gguf_files import KindOf, raw_rows
from tests.support.kind_sizes import rope

SIZES: dict[str, Any] = dict(
    num_hidden_layers=3, num_key_value_heads=4, kv_lora_rank=128, qk_rope_head_dim=32, qk_nope_head_dim=64,
    v_head_dim=32, moe_intermediate_size=96, attention_bias=False,
)  # fmt: skip
GLM = dict(num_hidden_layers=3, moe_intermediate_size=96)
YARN = rope(
    "yarn", factor=4.0, original_max_position_embeddings=128, beta_fast=32.0, beta_slow=1.0, mscale=0.7,
    mscale_all_dim=0.7,
)  # fmt: skip
MINICPM = dict(
    kv_lora_rank=128, qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64, q_lora_rank=128, num_key_value_heads=4,
    scale_emb=12, scale_depth=1.4, dim_model_base=256, tie_word_embeddings=True,
) | rope(
    "longrope", original_max_position_embeddings=512, short_factor=[1 + 0.05 * i for i in range(16)],
    long_factor=[1 + 0.5 * i for i in range(16)],
)  # fmt: skip
TEMPERED = YARN["rope_parameters"] | dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)
YOUTU = {name: size for name, size in SIZES.items() if name != "moe_intermediate_size"}
INDEXED = dict(index_n_heads=16, index_head_dim=64, index_topk=40)
ARCHITECTURES = ("deepseek2", "mistral4", "deepseek32", "glm-dsa")
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek2", "deepseek_v2", SIZES | YARN),
    "deepseek_v2_groups": ("deepseek2", "deepseek_v2_groups", SIZES),
    "deepseek_v2_old": ("deepseek2", "deepseek_v2_lora", SIZES | YARN),
    "deepseek_v3": ("deepseek2", "deepseek_v3", SIZES | YARN),
    "deepseek_v32": ("deepseek32", "deepseek_v32", SIZES | YARN | INDEXED),
    "glm_dsa": ("glm-dsa", "glm_dsa", SIZES | INDEXED),
    "glm4_moe": ("glm4moe", "glm4_moe", GLM),
    "glm4_moe_groups": ("glm4moe", "glm4_moe_groups", GLM),
    "dots1": ("dots1", "dots1", dict(moe_intermediate_size=96, attention_bias=False)),
    "minicpm3": ("minicpm3", "minicpm3", MINICPM),
    "mistral4": ("mistral4", "mistral4", SIZES | dict(rope_parameters=TEMPERED)),
    "mistral_large3": (
        "deepseek2",
        "mistral4",
        SIZES | dict(rope_parameters=TEMPERED | dict(llama_4_scaling_beta=0.5), n_group=1, topk_group=1),
    ),
    "youtu": ("deepseek2", "youtu", YOUTU | YARN | dict(tie_word_embeddings=False)),
    "glm_lite": ("deepseek2", "glm_lite", SIZES | dict(rope_interleave=True)),
}
"""As tests.support.gguf_families.KINDS. old: as the converter wrote them until April 2025."""
NAMES = {
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.indexer.wq_b": "indexer.attn_q_b", "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm", "self_attn.indexer.weights_proj": "indexer.proj",
    "self_attn.kv_b_proj": "attn_kv_b", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip


def describe(writer: GGUFWriter, config: Any, old: bool) -> None:
    """The keys beside those of all families, but for rotations. The converter of checkpoints does not tell of Mistral
    4's temperature; that of Mistral's own files does, and calls it a deepseek2."""
    beta = config.rope_parameters.get("llama_4_scaling_beta")
    if beta is not None and writer.arch == "deepseek2":
        writer.add_attn_temperature_scale(beta)
        writer.add_attn_temperature_length(config.rope_parameters["original_max_position_embeddings"])
    writer.add_head_count_kv(config.num_attention_heads if old else 1)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    query = config.qk_nope_head_dim + config.qk_rope_head_dim
    writer.add_key_length(query if old else config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.v_head_dim if old else config.kv_lora_rank)
    if not old:
        writer.add_key_length_mla(query)
        writer.add_value_length_mla(config.v_head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    every = config.rope_parameters.get("mscale_all_dim")
    if every is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * every)
    describe_experts(writer, config)
    if hasattr(config, "index_topk"):
        writer.add_indexer_head_count(config.index_n_heads)
        writer.add_indexer_key_length(config.index_head_dim)
        writer.add_indexer_top_k(config.index_topk)
    if getattr(config, "indexer_types", None) is not None:
        writer.add_array(f"{writer.arch}.attention.indexer.types", [each == "full" for each in config.indexer_types])


def minicpm3(writer: GGUFWriter, config: Any) -> None:
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)


def describe_experts(writer: GGUFWriter, config: Any) -> None:
    if config.model_type == "youtu":
        writer.add_leading_dense_block_count(config.num_hidden_layers)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_count(0)
        return
    first = getattr(config, "first_k_dense_replace", None)
    writer.add_leading_dense_block_count(config.mlp_layer_types.index("sparse") if first is None else first)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.model_type != "deepseek_v2":
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if config.model_type not in ("deepseek_v2", "mistral4"):
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if config.n_group and config.n_group > 1:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def add(writer: GGUFWriter, model: torch.nn.Module, name: str, parameter: Tensor, kind_of: KindOf, old: bool) -> bool:
    """Writes a parameter that lies otherwise than elsewhere, and into it what is written; whether it is one."""
    config: Any = model.config
    prefix = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
    if name.endswith("kv_b_proj.weight") and not old:
        both = parameter.view(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = both.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
        write_each(writer, prefix + "attn_k_b.weight", keys, kind_of, lambda part: part.swapaxes(1, 2))
        write_each(writer, prefix + "attn_v_b.weight", values, kind_of)
        return True
    if name.endswith("e_score_correction_bias"):
        writer.add_tensor(prefix + "exp_probs_b.bias", parameter.numpy().astype(np.float32).reshape(-1))
        return True
    shared = name.endswith("shared_mlp.input_linear.weight")  # Granite's
    if ".experts." not in name and not shared:
        return False
    if config.model_type == "mistral4" and name.endswith("gate_up_proj"):
        write_each(writer, f"{prefix}ffn_gate_up_exps.weight", parameter, kind_of)
        return True
    parts, end = ("gate", "up") if shared or name.endswith("gate_up_proj") else ("down",), "shexp" if shared else "exps"
    by_inputs = config.model_type == "llama4_text"
    turn = {"turn": lambda part: part.swapaxes(1, 2)} if by_inputs else {}
    for part, own in zip(parts, parameter.chunk(len(parts), dim=0 if shared else 1 + by_inputs), strict=True):
        write_each(writer, f"{prefix}ffn_{part}_{end}.weight", own, kind_of, **turn)
    return True


def add_corrections(writer: GGUFWriter, model: torch.nn.Module) -> None:
    """What is added to scores of experts, which is no parameter. It is drawn here: the model has zeros."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
            writer.add_tensor(f"blk.{name.split('.')[2]}.exp_probs_b.bias", buffer.numpy().astype(np.float32))


def write_each(
    writer: GGUFWriter, name: str, part: Tensor, kind_of: KindOf, turn: Callable[[Any], Any] = lambda part: part
) -> None:
    """part [n, rows, columns], as `turn` lays it out. A type whose blocks do not fit is another one, as in llama.cpp's
    quantisation."""
    value = np.ascontiguousarray(turn(part.numpy().astype(np.float32)))
    kind = kind_of(name)
    if value.shape[-1] % 256 and kind in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
        kind = {Kind.Q4_K: Kind.Q5_0, Kind.Q5_K: Kind.Q5_1, Kind.Q6_K: Kind.Q8_0}[kind]
    rows = raw_rows(value.reshape(-1, value.shape[-1]), kind)
    writer.add_tensor(name, rows.reshape(*value.shape[:-1], -1), raw_dtype=kind)
    part.copy_(torch.from_numpy(np.ascontiguousarray(turn(quants.dequantize(rows, kind).reshape(value.shape)))))
