"""GGUF files of Granite 3, Qwen 2, HunYuan and Mellum 2 with experts, and of MiniMax-M2, ERNIE 4.5 with experts,
K-EXAONE and Trinity, whose routers have corrections, and of Llama 4: what config.json would say, and what Granite's
tensors are. Imports no torch.

Facts: llama.cpp's conversion/granite.py, minimax.py, ernie.py, qwen.py, hunyuan.py, exaone.py, mellum.py, afmoe.py and
llama4.py, and src/models/minimax-m2.cpp, ernie4-5-moe.cpp, qwen2moe.cpp, hunyuan-moe.cpp, exaone-moe.cpp, mellum.cpp,
afmoe.cpp and llama4.cpp, which has as constants what its file does not say.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from headrace.models.families.base import Family, Names
from headrace.models.gguf import families
from headrace.models.gguf.deepseek import SHARED, SIGMOID, SOFTMAX
from headrace.models.gguf.families import LAYER, Facts, granite, refuse_experts, renamed, turned
from headrace.types import UnsupportedModel

READ = {
    "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_gating_func", "expert_weights_norm",
}  # fmt: skip
OF_SHARED = {"expert_shared_count", "expert_shared_feed_forward_length"}
"""The second says something of no model's experts; tensors say their width."""
GROUPS = {"expert_group_count", "expert_group_used_count", "expert_weights_scale"}
CORRECTIONS = "blk.{}.exp_probs_b.bias"
MINIMAX_NAMES = {CORRECTIONS: LAYER + "block_sparse_moe.e_score_correction_bias"}
ERNIE_NAMES = SHARED | {CORRECTIONS: LAYER + "mlp.moe_statics.e_score_correction_bias"}
EXAONE_NAMES = SHARED | {CORRECTIONS: LAYER + "mlp.e_score_correction_bias"}
AFMOE_NAMES = SHARED | {
    "blk.{}.post_attention_norm": LAYER + "post_attention_layernorm",
    "blk.{}.ffn_norm": LAYER + "pre_mlp_layernorm",
    "blk.{}.post_ffw_norm": LAYER + "post_mlp_layernorm",
    "blk.{}.attn_gate": LAYER + "self_attn.gate_proj",
    "blk.{}.ffn_gate_inp": LAYER + "mlp.router.gate",
    CORRECTIONS: LAYER + "mlp.expert_bias",
}
LLAMA4_NAMES = {f"blk.{{}}.ffn_{part}": f"{LAYER}feed_forward.{part}_proj" for part in ("gate", "up", "down")}
LLAMA4_NAMES |= {
    f"blk.{{}}.ffn_{part}_shexp": f"{LAYER}feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")
}
LLAMA4_NAMES |= {"blk.{}.ffn_gate_inp": LAYER + "feed_forward.router"}
LLAMA4_EVERY, LLAMA4_WITHOUT_NORMS = 4, 128
"""One layer of so many attends to all keys; experts of the model whose queries and keys are not normed."""
HUNYUAN_NAMES = families.HUNYUAN_NAMES | {
    "blk.{}.ffn_gate_inp": LAYER + "mlp.gate.wg",
    "blk.{}.ffn_gate_shexp": LAYER + "mlp.shared_mlp.gate_proj",
    "blk.{}.ffn_up_shexp": LAYER + "mlp.shared_mlp.up_proj",
    "blk.{}.ffn_down_shexp": LAYER + "mlp.shared_mlp.down_proj",
}
GRANITE_NAMES = {
    "blk.{}.ffn_gate_inp": LAYER + "block_sparse_moe.router",
    "blk.{}.ffn_gate_shexp": LAYER + "shared_mlp.gate_proj",
    "blk.{}.ffn_up_shexp": LAYER + "shared_mlp.up_proj",
    "blk.{}.ffn_down_shexp": LAYER + "shared_mlp.output_linear",
}
_MOE, _SHARED_MLP = "layers.{}.block_sparse_moe.", "layers.{}.shared_mlp."
GRANITE_PARTS: Names = {
    "layers.{}.router": (_MOE + "router",),
    "layers.{}.experts.{}.up": (_MOE + "experts.{}.gate_proj", _MOE + "experts.{}.up_proj"),
    "layers.{}.experts.{}.down": (_MOE + "experts.{}.down_proj",),
    "layers.{}.shared.up": (_SHARED_MLP + "gate_proj", _SHARED_MLP + "up_proj"),
}


def granite_moe(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    check_softmax(facts)
    return granite(facts, rope) | {
        "num_local_experts": facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
        "shared_intermediate_size": facts.count("expert_shared_feed_forward_length", 0),
    }


def check_softmax(facts: Facts) -> None:
    """Raises UnsupportedModel for routers of another kind than Granite's."""
    _check(facts, READ | OF_SHARED, SOFTMAX)


def granite_form(family: Family, present: Set[str]) -> Family:
    """Rows of queries and keys as llama's; gates and ups of experts in two tensors."""
    return turned(renamed(family, GRANITE_PARTS), present)


def minimax_m2(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    _check(facts, READ, SIGMOID)
    return {
        "num_local_experts": facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
        "intermediate_size": facts.count("expert_feed_forward_length", facts.count("feed_forward_length", 0) or None),
        "rotary_dim": facts.count("rope.dimension_count", facts.count("attention.key_length")),
    }


def ernie4_5(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """The last layer has experts in all models."""
    _check(facts, READ | OF_SHARED, SOFTMAX)
    return {
        "moe_num_experts": facts.count("expert_count"),
        "moe_k": facts.count("expert_used_count"),
        "moe_intermediate_size": facts.count("expert_feed_forward_length"),
        "moe_num_shared_experts": facts.count("expert_shared_count", 0),
        "moe_layer_start_index": facts.count("leading_dense_block_count", 0),
        "moe_layer_end_index": -1,
        "moe_layer_interval": facts.count("interleave_moe_layer_step", 1),
        "use_bias": False,
    }


def qwen2_moe(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """Shares of experts are not divided by their sum, as llama.cpp has it."""
    refuse_experts(facts, READ | OF_SHARED)
    inner, chosen = facts.count("feed_forward_length"), facts.count("expert_used_count")
    return {
        "num_experts": facts.count("expert_count"),
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": facts.count("expert_feed_forward_length", inner // max(1, chosen)),
        "shared_expert_intermediate_size": facts.count("expert_shared_feed_forward_length", inner),
        "norm_topk_prob": False,
        "qkv_bias": "blk.0.attn_q.bias" in facts.tensors,
    }


def hunyuan_moe(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """Experts and the shared one are as wide."""
    _check(facts, READ | OF_SHARED, SOFTMAX)
    return families.with_biases(facts, rope) | {
        "num_experts": facts.count("expert_count"),
        "moe_topk": facts.count("expert_used_count"),
        "intermediate_size": facts.count("expert_feed_forward_length"),
    }


def mellum(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """All layers have experts; those with windows are not stretched."""
    _check(facts, READ, SOFTMAX, normalised=False)
    windows = families.exaone4(facts, rope)
    local = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", rope["rope_theta"])}
    return windows | {
        "rope_parameters": dict(zip(families.LAYER_TYPES, (rope, local), strict=True)),
        "mlp_layer_types": ["sparse"] * len(windows["layer_types"]),
    }


def afmoe(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """Every fourth layer has no window, and embeddings are multiplied, whatever the file says, as llama.cpp has it."""
    _check(facts, READ | OF_SHARED | {"expert_weights_scale"}, SIGMOID)
    return {
        "num_experts": facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
        "moe_intermediate_size": facts.count("expert_feed_forward_length"),
        "num_shared_experts": facts.count("expert_shared_count", 0),
        "num_dense_layers": facts.count("leading_dense_block_count", 0),
        "route_scale": facts.number("expert_weights_scale", 1.0),
        "sliding_window": facts.count("attention.sliding_window"),
        "global_attn_every_n_layers": 4,
        "mup_enabled": True,
    }


def exaone_moe(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    scores = facts.count("expert_gating_func", SIGMOID)
    if scores != SIGMOID:
        raise UnsupportedModel(f"{facts.file.path}: {facts.prefix}expert_gating_func {scores} is not supported")
    refuse_experts(facts, READ | OF_SHARED | GROUPS)
    return families.exaone4(facts, rope) | {
        "first_k_dense_replace": facts.count("leading_dense_block_count", 0),
        "num_experts": facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
        "moe_intermediate_size": facts.count("expert_feed_forward_length"),
        "num_shared_experts": facts.count("expert_shared_count"),
        "n_group": facts.count("expert_group_count", 1),
        "topk_group": facts.count("expert_group_used_count", 1),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "norm_topk_prob": facts.flag("expert_weights_norm", False),
    }


def llama4(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    _check(facts, READ | OF_SHARED, SIGMOID, normalised=False)
    for name, usual in (("attention.sliding_window_pattern", LLAMA4_EVERY), ("expert_shared_count", 1)):
        if (found := facts.count(name, usual)) != usual:
            raise UnsupportedModel(f"{facts.file.path}: {facts.prefix}{name} {found} is not supported")
    if facts.count("attention.sliding_window", 1) == 0:
        raise UnsupportedModel(f"{facts.file.path}: {facts.prefix}attention.sliding_window 0 is not supported")
    count = facts.count("expert_count")
    return {
        "intermediate_size_mlp": facts.count("feed_forward_length"),
        "intermediate_size": facts.count("expert_feed_forward_length"),
        "num_local_experts": count,
        "num_experts_per_tok": facts.count("expert_used_count"),
        "interleave_moe_layer_step": facts.count("interleave_moe_layer_step"),
        "no_rope_layer_interval": LLAMA4_EVERY,
        "use_qk_norm": count != LLAMA4_WITHOUT_NORMS,
    }


def _check(facts: Facts, read: set[str], scores: int, normalised: bool = True) -> None:
    """Raises UnsupportedModel for routers of another kind. normalised: shares are divided by their sum in any case."""
    refuse_experts(facts, read)
    if (found := facts.count("expert_gating_func", scores)) != scores:
        raise UnsupportedModel(f"{facts.file.path}: {facts.prefix}expert_gating_func {found} is not supported")
    if normalised and not facts.flag("expert_weights_norm", True):
        raise UnsupportedModel(f"{facts.file.path}: {facts.prefix}expert_weights_norm false is not supported")
