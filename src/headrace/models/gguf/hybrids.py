"""GGUF files of Qwen3-Next and Qwen3.5: what config.json would say of gated delta nets and experts, and how rows lie.
Imports no torch.

Facts: llama.cpp's conversion/qwen.py, and src/models/qwen3next.cpp, qwen35.cpp and qwen35moe.cpp.
K: key heads of a gated delta net, R: value heads of each. llama.cpp lays value heads out as (R, K), checkpoints (K, R).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.config import RecurrentSpec
from headrace.models.families.base import Family
from headrace.models.gguf.families import LAYER, MOST_LAYERS, Facts, refuse_experts, renamed
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel

KV_HEADS = "attention.head_count_kv"
LINEAR = LAYER + "linear_attn."
NAMES = {
    "blk.{}.post_attention_norm": LAYER + "post_attention_layernorm",
    "blk.{}.attn_qkv": LINEAR + "in_proj_qkv",
    "blk.{}.attn_gate": LINEAR + "in_proj_z",
    "blk.{}.ssm_in": LINEAR + "in_proj_qkvz",
    "blk.{}.ssm_ba": LINEAR + "in_proj_ba",
    "blk.{}.ssm_alpha": LINEAR + "in_proj_a",
    "blk.{}.ssm_beta": LINEAR + "in_proj_b",
    "blk.{}.ssm_conv1d": LINEAR + "conv1d",
    "blk.{}.ssm_a": LINEAR + "A_log",
    "blk.{}.ssm_dt.bias": LINEAR + "dt_bias",
    "blk.{}.ssm_norm": LINEAR + "norm",
    "blk.{}.ssm_out": LINEAR + "out_proj",
}
SHARED = LAYER + "mlp.shared_expert"
EXPERT_NAMES = NAMES | {
    "blk.{}.ffn_gate_inp_shexp": SHARED + "_gate",
    "blk.{}.ffn_gate_shexp": SHARED + ".gate_proj",
    "blk.{}.ffn_up_shexp": SHARED + ".up_proj",
    "blk.{}.ffn_down_shexp": SHARED + ".down_proj",
}
READ = {
    "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
    "expert_weights_norm",
}  # fmt: skip


def qwen3_5(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    values = facts.count("ssm.time_step_rank")
    return {
        "linear_conv_kernel_dim": facts.count("ssm.conv_kernel"),
        "linear_key_head_dim": facts.count("ssm.state_size"),
        "linear_value_head_dim": facts.count("ssm.inner_size") // max(1, values),
        "linear_num_key_heads": facts.count("ssm.group_count"),
        "linear_num_value_heads": values,
        "layer_types": _recurrent_layers(facts),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in facts.tensors),
    }


def qwen3_next(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    fields = qwen3_5(facts, rope)
    if not facts.count("expert_count", 0):
        return fields | {"num_experts": 0}
    return fields | _experts(facts) | {"norm_topk_prob": facts.flag("expert_weights_norm", True)}


def qwen3_5_moe(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """Without MLPs, whose width the file need not say."""
    if not facts.flag("expert_weights_norm", True):
        raise UnsupportedModel(f"{facts.file.path}: {facts.prefix}expert_weights_norm false is not supported")
    fields = qwen3_5(facts, rope) | _experts(facts)
    return fields | {"intermediate_size": facts.count("feed_forward_length", fields["moe_intermediate_size"])}


def _experts(facts: Facts) -> dict[str, Any]:
    refuse_experts(facts, READ)
    inner = facts.count("expert_feed_forward_length")
    return {
        "num_experts": facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": facts.count("expert_shared_feed_forward_length", inner),
    }


def _recurrent_layers(facts: Facts) -> list[str]:
    kinds, given = ("full_attention", "linear_attention"), facts.each_layer("attention.recurrent_layers")
    if given is not None:
        return [kinds[bool(recurrent)] for recurrent in given]
    every = max(1, facts.count("full_attention_interval", 4))
    return [kinds[(layer + 1) % every != 0] for layer in range(min(facts.layers, MOST_LAYERS))]


def qwen3_next_form(family: Family, present: Set[str]) -> Family:
    """All queries, then keys, values and z, but for older files; b and a go by key head."""
    if any(name.endswith(".in_proj_qkvz.weight") for name in present):
        return family
    rows = family.rows
    gates = None if rows is None else lambda config, name: rows(config, name) if ".gates." in name else None
    parts = tuple("layers.{}.linear_attn." + part for part in ("in_proj_qkv", "in_proj_z"))
    return replace(renamed(family, {"layers.{}.mixed": parts}), rows=gates)


def qwen3_5_form(family: Family, present: Set[str]) -> Family:
    """Value heads lie as (R, K); so do the columns of `out` (ModelConfig.tiled_values)."""
    return replace(family, rows=_grouped_rows)


def _grouped_rows(config: ModelConfig, name: str) -> list[int] | None:
    """The file's rows in the checkpoint's order, of a tensor with rows of value heads."""
    spec = config.recurrent
    assert spec is not None, "this family has recurrent layers"
    kind = name.split(".", 2)[-1]
    heads = _places(spec)
    values = [head * spec.value_dim + row for head in heads for row in range(spec.value_dim)]
    channels = [*range(2 * spec.keys), *(2 * spec.keys + row for row in values)]
    orders: Mapping[str, list[int]] = {
        "mixed.weight": [*channels, *(spec.channels + row for row in values)],
        "conv.weight": channels,
        "gates.weight": [*heads, *(spec.value_heads + head for head in heads)],
        "delta.A_log": heads,
        "delta.dt_bias": heads,
    }
    return orders.get(kind)


def of_each_layer(facts: Facts, key: str) -> tuple[int, list[bool]]:
    """A number that a file gives to each layer, and which have it: the others have 0. Raises UnsupportedModel for a
    file that does not say it of each, or has different ones."""
    given = facts.value(key)
    values = np.atleast_1d(given)[:MOST_LAYERS].tolist() if isinstance(given, np.ndarray) else []
    found = set(values) - {0}
    if len(values) != facts.count("block_count") or len(found) != 1 or not all(isinstance(n, int) for n in values):
        raise UnsupportedModel(f"{facts.file.path}: {facts.prefix}{key} does not give one number, or 0, to each layer")
    return found.pop(), [n > 0 for n in values]


def _places(spec: RecurrentSpec) -> list[int]:
    """Where the file has each value head of the checkpoint."""
    shared = spec.value_heads // spec.key_heads
    return [turn * spec.key_heads + key for key in range(spec.key_heads) for turn in range(shared)]
