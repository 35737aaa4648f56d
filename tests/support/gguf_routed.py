"""GGUF files of Granite 3, MiniMax-M2, ERNIE 4.5, Qwen 2, HunYuan, EXAONE, Mellum and Trinity with experts, as
llama.cpp's converter writes them (conversion/granite.py, minimax.py, ernie.py, qwen.py, hunyuan.py, exaone.py,
mellum.py and afmoe.py). Nothing here is taken from headrace's reader."""

from __future__ import annotations

from typing import Any

from gguf import ExpertGatingFuncType, GGUFWriter, RopeScalingType

QWEN2 = dict(
    mlp_only_layers=[], use_sliding_window=False, moe_intermediate_size=96, shared_expert_intermediate_size=160
)
ERNIE = dict(moe_layer_end_index=-1, moe_intermediate_size=96, tie_word_embeddings=False)
MELLUM = dict(num_hidden_layers=3, moe_intermediate_size=96, mlp_layer_types=["sparse"] * 3, attention_bias=False)
AFMOE = dict(
    num_hidden_layers=4, moe_intermediate_size=96,
    layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
)  # fmt: skip
LLAMA4 = dict(
    num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0], moe_layers=[1, 3], interleave_moe_layer_step=2,
    intermediate_size=96, intermediate_size_mlp=256, attention_chunk_size=8192, floor_scale=8192, attn_scale=0.1,
)  # fmt: skip
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "minimax_m2": ("minimax-m2", "minimax_m2", dict(intermediate_size=96)),
    "granite_moe": ("granitemoe", "granite_moe", dict(intermediate_size=96)),
    "granite_moe_shared": ("granitemoe", "granite_moe_shared", dict(intermediate_size=96)),
    "ernie_moe": ("ernie4_5-moe", "ernie_moe", ERNIE),
    "qwen2_moe": ("qwen2moe", "qwen2_moe", QWEN2),
    "hunyuan_moe": ("hunyuan-moe", "hunyuan_moe", dict(intermediate_size=96, attention_bias=False)),
    "afmoe": ("afmoe", "afmoe", AFMOE),
    "mellum": ("mellum", "mellum", MELLUM),
    "exaone_moe": ("exaone-moe", "exaone_moe", dict(moe_intermediate_size=96, num_hidden_layers=3)),
    "llama4": ("llama4", "llama4", LLAMA4),
}  # fmt: skip


NAMES = {
    "block_sparse_moe.router": "ffn_gate_inp", "shared_mlp.output_linear": "ffn_down_shexp",
    "self_attn.gate_proj": "attn_gate", "pre_mlp_layernorm": "ffn_norm", "mlp.router.gate": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp", "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
    "mlp.shared_mlp.up_proj": "ffn_up_shexp", "mlp.shared_mlp.down_proj": "ffn_down_shexp",
    "feed_forward.router": "ffn_gate_inp",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}  # fmt: skip


def granite(writer: GGUFWriter, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def granite_moe(writer: GGUFWriter, config: Any) -> None:
    granite(writer, config)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "shared_intermediate_size", 0):
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def qwen2_moe(writer: GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def hunyuan_moe(writer: GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.moe_topk)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.intermediate_size)
    writer.add_expert_shared_count(1)


def llama4(writer: GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)


def mellum(writer: GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def afmoe(writer: GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.num_shared_experts)
    writer.add_expert_weights_scale(config.route_scale)
    writer.add_expert_weights_norm(True)


def exaone_moe(writer: GGUFWriter, config: Any) -> None:
    inner, shared = config.moe_intermediate_size, config.num_shared_experts
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_nextn_predict_layers(0)
    writer.add_rope_scaling_type(RopeScalingType.NONE)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_expert_feed_forward_length(inner)
    writer.add_expert_shared_count(shared)
    writer.add_expert_shared_feed_forward_length(inner * shared)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)


def minimax_m2(writer: GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def ernie_moe(writer: GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.moe_num_experts)
    writer.add_expert_used_count(config.moe_k)
    writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    writer.add_leading_dense_block_count(config.moe_layer_start_index)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.moe_num_shared_experts)
    writer.add_expert_shared_feed_forward_length(config.intermediate_size // config.num_key_value_heads)
