"""GGUF files of Granite 4 with Mamba-2 layers: what config.json would say of them, and what their tensors are. Imports
no torch.

Facts: llama.cpp's conversion/granite.py and mamba.py, and src/models/granite-hybrid.cpp. A layer without KV heads is a
Mamba-2 layer; rows of queries and keys lie as llama's, also where nothing is rotated.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from headrace.models.families.base import Family, Names
from headrace.models.gguf.families import LAYER, Facts, multipliers, renamed
from headrace.models.gguf.hybrids import KV_HEADS, of_each_layer
from headrace.models.gguf.routed import GRANITE_NAMES, check_softmax, granite_form


def mamba_names(mixer: str) -> dict[str, str]:
    """Modules and vectors of a Mamba-2 layer, which checkpoints call `mixer` with a name behind it."""
    return {
        "blk.{}.ssm_in": mixer + "in_proj",
        "blk.{}.ssm_conv1d": mixer + "conv1d",
        "blk.{}.ssm_a": mixer + "A_log",
        "blk.{}.ssm_d": mixer + "D",
        "blk.{}.ssm_dt.bias": mixer + "dt_bias",
        "blk.{}.ssm_norm": mixer + "norm",
        "blk.{}.ssm_out": mixer + "out_proj",
    }


NAMES = {
    **GRANITE_NAMES,
    **mamba_names(LAYER + "mamba."),
    "blk.{}.ffn_gate": LAYER + "shared_mlp.gate_proj",
    "blk.{}.ffn_up": LAYER + "shared_mlp.up_proj",
    "blk.{}.ffn_down": LAYER + "shared_mlp.output_linear",
}
DENSE_PARTS: Names = {"layers.{}.up": ("layers.{}.shared_mlp.gate_proj", "layers.{}.shared_mlp.up_proj")}
SHARED_WIDTH = "expert_shared_feed_forward_length"


def mamba_sizes(facts: Facts) -> dict[str, Any]:
    """Of Mamba-2 layers but for their width."""
    return {
        "mamba_n_heads": facts.count("ssm.time_step_rank"),
        "mamba_n_groups": facts.count("ssm.group_count"),
        "mamba_d_state": facts.count("ssm.state_size"),
        "mamba_d_conv": facts.count("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in facts.tensors),
    }


def fields(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """Raises UnsupportedModel for a routing that is not read, and for KV heads that differ."""
    check_softmax(facts)
    heads, attends = of_each_layer(facts, KV_HEADS)
    experts, inner = facts.count("expert_count", 0), facts.count("ssm.inner_size")
    return (
        multipliers(facts)
        | mamba_sizes(facts)
        | {
            "attention_bias": any(name.endswith(".attn_q.bias") for name in facts.tensors),
            "num_key_value_heads": heads,
            "layer_types": ["attention" if each else "mamba" for each in attends],
            "position_embedding_type": "nope" if not facts.flag("rope.scaling.finetuned", True) else "rope",
            "num_local_experts": experts,
            "num_experts_per_tok": facts.count("expert_used_count", 0) or 1,
            "shared_intermediate_size": facts.count(
                SHARED_WIDTH, None if experts else facts.count("feed_forward_length")
            ),
            "mamba_d_head": inner // max(1, facts.count("ssm.time_step_rank")),
            "mamba_expand": inner // max(1, facts.count("embedding_length")),
        }
    )


def form(family: Family, present: Set[str]) -> Family:
    """As Granite's experts; gate and up of the shared MLP are two tensors."""
    whole = granite_form(family, present)
    return whole if any(".experts." in name for name in present) else renamed(whole, DENSE_PARTS)
