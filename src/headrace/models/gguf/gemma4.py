"""GGUF files of Gemma 4: what config.json would say of layers that differ, and what their tensors are called. Imports
no torch.

Facts: llama.cpp's conversion/gemma.py and src/models/gemma4.cpp.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np

from headrace.logs import shown
from headrace.models.families.base import LAYER_TYPES, Family
from headrace.models.gguf.families import GEMMA_NAMES, LAYER, Facts, layer_types, refuse_experts, renamed
from headrace.types import UnsupportedModel

NAMES = GEMMA_NAMES | {
    "blk.{}.post_ffw_norm_1": LAYER + "post_feedforward_layernorm_1",
    "blk.{}.pre_ffw_norm_2": LAYER + "pre_feedforward_layernorm_2",
    "blk.{}.post_ffw_norm_2": LAYER + "post_feedforward_layernorm_2",
    "blk.{}.ffn_gate_inp": LAYER + "router.proj",
    "blk.{}.ffn_gate_inp.scale": LAYER + "router.scale",
    "blk.{}.ffn_gate_up_exps": LAYER + "experts.{}.gate_up_proj",
    "blk.{}.ffn_gate_exps": LAYER + "experts.{}.gate_proj",
    "blk.{}.ffn_up_exps": LAYER + "experts.{}.up_proj",
    "blk.{}.ffn_down_exps": LAYER + "experts.{}.down_proj",
    "blk.{}.ffn_down_exps.scale": LAYER + "router.per_expert_scale",
    "blk.{}.inp_gate": LAYER + "per_layer_input_gate",
    "blk.{}.proj": LAYER + "per_layer_projection",
    "blk.{}.post_norm": LAYER + "post_per_layer_input_norm",
    "blk.{}.layer_output_scale.weight": LAYER + "layer_scalar",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
LAYER_EMBED = "per_layer_token_embd.weight"
READ = {"expert_count", "expert_used_count", "expert_feed_forward_length"}
FULL, LOCAL = LAYER_TYPES


def fields(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """Keys with a number for each layer say what a kind of layers has, or which MLPs are twice as wide. Global layers
    without values have their keys for them. Raises UnsupportedModel for other layers that differ."""
    kinds = layer_types(facts, every=6)
    if not kinds:
        raise ValueError(f"{facts.file.path}: there is no layer; download it again")
    shared, width = _sharing(facts, kinds), facts.count("embedding_length_per_layer_input", 0)
    own = [layer for layer, kind in enumerate(kinds[: len(kinds) - shared]) if kind == FULL]
    without = [layer for layer in own if f"blk.{layer}.attn_v.weight" not in facts.tensors]
    if without and without != own:
        told = f"there is no blk.{without[0]}.attn_v.weight: values in some of the global layers alone"
        raise UnsupportedModel(f"{facts.file.path}: {told} are not supported")
    inner = _of_layers(facts, "feed_forward_length", kinds)
    wide = inner[-1:] == [2 * inner[0]] and shared > 0
    if inner != [inner[0]] * (len(kinds) - shared * wide) + [2 * inner[0]] * (shared * wide):
        told = f"{facts.prefix}feed_forward_length with widths {sorted(set(inner))} in this order"
        raise UnsupportedModel(f"{facts.file.path}: {told} is not supported")
    heads = {kind: _of_kind(facts, kinds, kind) for kind in sorted({LOCAL, *kinds})}
    if not without and heads.get(FULL, heads[LOCAL]) != heads[LOCAL]:
        told = f"{facts.prefix}attention.head_count_kv: global layers with values and KV heads of their own"
        raise UnsupportedModel(f"{facts.file.path}: {told} are not supported")
    if width and LAYER_EMBED not in facts.tensors:
        raise ValueError(f"{facts.file.path}: there is no {LAYER_EMBED}; download it again")
    local = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", 10_000.0)}
    dim = facts.count("attention.key_length_swa")
    if facts.count("rope.dimension_count_swa", dim) != dim:
        raise UnsupportedModel(
            f"{facts.file.path}: {facts.prefix}rope.dimension_count_swa other than the head size is not supported"
        )
    return {
        "layer_types": kinds,
        "sliding_window": facts.count("attention.sliding_window"),
        "intermediate_size": inner[0],
        "use_double_wide_mlp": wide,
        "head_dim": dim,
        "global_head_dim": facts.count("attention.key_length"),
        "num_key_value_heads": heads[LOCAL],
        "num_global_key_value_heads": heads.get(FULL) if without else None,
        "attention_k_eq_v": bool(without),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": facts.tensors[LAYER_EMBED].shape[0] if width else facts.vocabulary,
        "final_logit_softcapping": facts.number("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {FULL: rope, LOCAL: local},
    } | _experts(facts)


def _sharing(facts: Facts, kinds: list[str]) -> int:
    """How many of the last layers have others' keys and values."""
    shared = facts.count("attention.shared_kv_layers", 0)
    if not 0 <= shared <= len(kinds):
        name = f"{facts.prefix}attention.shared_kv_layers"
        raise ValueError(f"{facts.file.path}: {name} is {shared} of {len(kinds)} layers; download it again")
    return shared


def _experts(facts: Facts) -> dict[str, Any]:
    if not facts.count("expert_count", 0):
        return {"enable_moe_block": False}
    refuse_experts(facts, READ)
    return {
        "enable_moe_block": True,
        "num_experts": facts.count("expert_count"),
        "top_k_experts": facts.count("expert_used_count"),
        "moe_intermediate_size": facts.count("expert_feed_forward_length"),
    }


def _of_layers(facts: Facts, name: str, kinds: list[str]) -> list[int]:
    """A number for each layer."""
    given = facts.value(name)
    if not isinstance(given, np.ndarray):
        return [facts.count(name)] * len(kinds)
    if len(given) != len(kinds) or not len(kinds) or not np.issubdtype(given.dtype, np.integer):
        told = f"{facts.file.path}: {facts.prefix}{name} does not have a number for each layer"
        raise ValueError(f"{told}; download it again")
    return [int(each) for each in given]


def _of_kind(facts: Facts, kinds: list[str], kind: str) -> int:
    """KV heads of the layers of that kind; of all, where there are none."""
    every = _of_layers(facts, "attention.head_count_kv", kinds)
    found = {each for each, own in zip(every, kinds, strict=True) if own == kind} or set(every)
    if len(found) != 1:
        raise UnsupportedModel(f"{facts.file.path}: layers of type {shown(kind)} differ in their heads: not supported")
    return found.pop()


def form(family: Family, present: Set[str]) -> Family:
    """Gates and ups of experts may be two tensors."""
    if not any(name.endswith(".experts.0.gate_proj.weight") for name in present):
        return family
    parts = tuple("layers.{}.experts.{}." + part for part in ("gate_proj", "up_proj"))
    return renamed(family, {"layers.{}.experts.{}.up": parts})
