"""config.json as transformers' classes would read it, without importing them: that takes more than a second.

For what is checked before an engine is started; the engine itself asks transformers, which refuses more.
tests/unit/test_plain_config.py compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headrace.models import schema
from headrace.models.config import ModelConfig, layers_by_number, read_with
from headrace.models.families import Family
from headrace.models.families.base import LAYER_TYPES as KINDS
from headrace.models.nulls import NEVER_NULL, NULLABLE
from headrace.models.plain_defaults import CWM_ENDS, DENSE, GEMMA4_TEXTS, GLM_ENDS
from headrace.models.plain_layers import (
    GRANITE_KINDS,
    HY4_TYPES,
    NEMOTRON_KINDS,
    fill_in_falcon_h1,
    fill_in_glm5_next,
    fill_in_hy4,
    fill_in_kimi_linear,
    fill_in_kinds,
    fill_in_llama4,
    fill_in_minimax_m3,
    layers_turned,
)
from headrace.models.plain_rotations import LOCAL_THETAS, OWN_ROPES, PARTS, ROPES, THETA, THETAS
from headrace.models.plain_routed import COUNTED_SO, ONE_NAME, OTHER_NAMES, ROUTED
from headrace.types import UnsupportedModel

DEFAULTS = DENSE | ROUTED
GPT2_NAMES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}  # fmt: skip
"""What GPT-2's files call these fields; its class alone takes both names."""

TURNED_PART = ("deepseek_v2", "deepseek_v32", "glm_moe_dsa", "glm5_next_text", "minicpm3", *HY4_TYPES)
"""Classes that call the part of a head that is rotated head_dim, whatever the file does."""


def plain_config(folder: Path) -> ModelConfig:
    """As models.config.read_config, by our own defaults. Raises what that raises, but for what only transformers
    refuses; UnsupportedModel also where a field is null that must not be."""
    return read_with(folder, _normalised)


def _normalised(raw: dict[str, Any], family: Family) -> Any:
    known, model_type = schema.known(raw), family.fields_of
    if model_type == "gpt2":
        known = {GPT2_NAMES.get(name, name): value for name, value in known.items()}
    values = DEFAULTS[model_type] | known
    for name in NEVER_NULL:
        told = DEFAULTS[model_type].get(name) is None or model_type in NULLABLE.get(name, ())
        if values.get(name, 0) is None and not told:
            raise UnsupportedModel(f"{name} is null; download the file again")
    _fill_in(values, model_type)
    _fill_in_experts(values, known, model_type)
    _fill_in_rope(values, known, model_type)
    values["model_type"] = model_type
    return SimpleNamespace(**values)


def _fill_in(values: dict[str, Any], model_type: str) -> None:
    """What the classes work out from other fields, of those that they have."""
    heads, own = values["num_attention_heads"], DEFAULTS[model_type]
    if "head_dim" in own and values["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // heads
    if "num_key_value_heads" in own and values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = heads
    if "max_window_layers" in own:
        _fill_in_windows(values, every_other=model_type == "qwen2_moe")
    if "mlp_only_layers" in own and values["mlp_only_layers"] is None:
        values["mlp_only_layers"] = []
    if model_type == "glm4_moe_lite":  # calls it so, too
        values["qk_rope_head_dim"] = values.get("head_dim", values["qk_rope_head_dim"])
    if model_type in TURNED_PART:
        values["head_dim"] = values["qk_rope_head_dim"]
    if model_type in ("glm", "glm4") and values["eos_token_id"] is None:
        values["eos_token_id"] = GLM_ENDS
    if model_type in OWN_RULES:
        OWN_RULES[model_type](values)
    fill_in_kinds(values, model_type, own.keys())
    if model_type == "cwm":
        values["sliding_window"] = values["sliding_window"] or None
        values["eos_token_id"] = CWM_ENDS if values["eos_token_id"] is None else values["eos_token_id"]
    if model_type == "gemma" and values["hidden_act"] == "gelu":  # as the first files call it
        values["hidden_act"] = "gelu_pytorch_tanh"
    if model_type == "hyperclovax" and values["attention_multiplier"] is None:
        values["attention_multiplier"] = values["head_dim"] ** -0.5
    if model_type in GEMMA4_TEXTS:
        _fill_in_gemma4(values)
    if model_type.startswith("lfm"):
        _fill_in_lfm2(values, model_type)
    if model_type == "nemotron_h":
        _fill_in_nemotron_h(values)
    if model_type == "opt" and values["word_embed_proj_dim"] is None:
        values["word_embed_proj_dim"] = values["hidden_size"]
    if model_type == "falcon":
        _fill_in_falcon(values)


def _fill_in_falcon(values: dict[str, Any]) -> None:
    values["hidden_size"] = values.get("n_embed") or values["hidden_size"]
    if values["num_kv_heads"] is None:
        values["num_kv_heads"] = values["num_attention_heads"]
    if values["ffn_hidden_size"] is None:
        values["ffn_hidden_size"] = values["hidden_size"] * 4


def _fill_in_experts(values: dict[str, Any], given: dict[str, Any], model_type: str) -> None:
    """The number of experts has two names, of which a class has one as its own; the other one overrides it."""
    names = ("num_experts", "num_local_experts")
    own, other = names if "num_experts" in DEFAULTS[model_type] else names[::-1]
    others = {} if model_type in ONE_NAME else {own: other, **OTHER_NAMES}
    if model_type in COUNTED_SO and given.get("num_experts") is not None:
        others["n_routed_experts"] = "num_experts"
    for name, overriding in others.items():
        if name in DEFAULTS[model_type] and overriding in given:
            values[name] = given[overriding]


def _fill_in_windows(values: dict[str, Any], every_other: bool) -> None:
    """Layers from max_window_layers on have windows, or every other one of those before."""
    if not values.get("use_sliding_window", True):
        values["sliding_window"] = None
    if values["layer_types"] is None and every_other:
        most = values["max_window_layers"] if values["use_sliding_window"] else 0
        layers = range(values["num_hidden_layers"])
        values["layer_types"] = [KINDS[layer < most and layer % 2 == 0] for layer in layers]
    if values["layer_types"] is None:
        full = values["num_hidden_layers"] if values["sliding_window"] is None else values["max_window_layers"]
        values["layer_types"] = [KINDS[layer >= full] for layer in range(values["num_hidden_layers"])]


def _fill_in_minicpm3(values: dict[str, Any]) -> None:
    """Multipliers that are null do nothing."""
    width, layers = values["hidden_size"], values["num_hidden_layers"]
    usual = dict(v_head_dim=width // values["num_attention_heads"], scale_depth=layers**0.5, dim_model_base=width)
    values |= {name: value for name, value in usual.items() if values[name] is None}


def _fill_in_qwen3_moe(values: dict[str, Any]) -> None:
    if not values["use_sliding_window"]:
        values["sliding_window"] = None


def _fill_in_smollm3(values: dict[str, Any]) -> None:
    layers, every = range(values["num_hidden_layers"]), values["no_rope_layer_interval"]
    if values["no_rope_layers"] is None:
        values["no_rope_layers"] = [int((layer + 1) % every != 0) for layer in layers]
    if values["layer_types"] is None:
        windows = values["use_sliding_window"] and values["sliding_window"] is not None
        turned = [*values["no_rope_layers"], *layers]
        values["layer_types"] = [KINDS[windows and not turned[layer]] for layer in layers]


OWN_RULES: dict[str, Callable[[dict[str, Any]], None]] = {
    "minicpm3": _fill_in_minicpm3,
    "qwen3_moe": _fill_in_qwen3_moe,
    "smollm3": _fill_in_smollm3,
    "llama4_text": fill_in_llama4,
    "minimax_m3_vl_text": fill_in_minimax_m3,
    "glm5_next_text": fill_in_glm5_next,
    "falcon_h1": fill_in_falcon_h1,
    "kimi_linear": fill_in_kimi_linear,
    **dict.fromkeys(HY4_TYPES, fill_in_hy4),
}
"""Of one class alone, before kinds of layers are told."""


def _fill_in_lfm2(values: dict[str, Any], model_type: str) -> None:
    """Names that its first files had."""
    if model_type != "lfm3":
        values["tie_word_embeddings"] = values.get("tie_embedding", values["tie_word_embeddings"])
    if model_type != "lfm2":
        return
    values["intermediate_size"] = values.get("block_ff_dim", values["intermediate_size"])
    if values["layer_types"] is None:
        layers, own = range(values["num_hidden_layers"]), values["full_attn_idxs"]
        values["layer_types"] = [KINDS[0] if own is None or layer in own else "conv" for layer in layers]


def _fill_in_nemotron_h(values: dict[str, Any]) -> None:
    """Kinds of layers by name, or as letters, or neither."""
    kinds, letters = values["layers_block_type"], values.get("hybrid_override_pattern")
    if kinds is None and "hybrid_override_pattern" in values:
        if not letters or not set(letters) <= NEMOTRON_KINDS.keys():
            raise UnsupportedModel("hybrid_override_pattern is no pattern of M, E, * and -; download the file again")
        kinds = [NEMOTRON_KINDS[letter] for letter in letters]
    if kinds is None:
        kinds = [NEMOTRON_KINDS[letter] for letter in "ME*-"]
    values["layers_block_type"] = [GRANITE_KINDS.get(kind, kind) for kind in kinds]
    values["num_hidden_layers"] = len(kinds)


def _fill_in_gemma4(values: dict[str, Any]) -> None:
    values["layer_types"] = [*values["layer_types"][:-1], KINDS[0]]
    own = layers_by_number(values.get("per_layer_config") or {}, values["num_hidden_layers"])
    if "per_layer_config" not in values:
        heads = values["num_global_key_value_heads"] if values["attention_k_eq_v"] else None
        found = dict(head_dim=values["global_head_dim"]) | ({} if heads is None else dict(num_key_value_heads=heads))
        own = {layer: found for layer, kind in enumerate(values["layer_types"]) if kind == KINDS[0]}
    every = {name: values[name] for name in ("head_dim", "num_key_value_heads")}
    layers = range(values["num_hidden_layers"])
    values["per_layer_config"] = {layer: SimpleNamespace(**every | own.get(layer, {})) for layer in layers}


def _fill_in_rope(values: dict[str, Any], given: dict[str, Any], model_type: str) -> None:
    """All that is said of the rotation, in one place."""
    if model_type in OWN_ROPES:
        values["rope_parameters"] = _own_ropes(values, given, model_type)
        return None
    if model_type in LOCAL_THETAS:
        return _fill_in_two_ropes(values, given, model_type)
    told = given.get("rope_scaling") or given.get("rope_parameters")
    rope = dict(ROPES.get(model_type, {}) if told is None else told)
    base = "rotary_emb_base" if model_type == "gpt_neox" else "rope_theta"
    rope.setdefault("rope_theta", given.get(base, THETAS.get(model_type, THETA)))
    part = given.get("partial_rotary_factor", PARTS.get(model_type))
    if model_type == "gpt_neox":
        part = given.get("rotary_pct", 0.25)
    if model_type == "mistral4" and not given.get("rope_scaling"):
        part = values["qk_rope_head_dim"] / (values["qk_rope_head_dim"] + values["qk_nope_head_dim"])
    if part is None and model_type == "minimax_m2" and values.get("rotary_dim") is not None:
        part = values["rotary_dim"] / values["head_dim"]
    if part is not None or model_type == "gpt_neox":
        rope.setdefault("partial_rotary_factor", part)
    _complete(rope, values)
    if model_type == "phi3" and rope["rope_type"] == "longrope":
        rope["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    values["rope_parameters"] = rope
    if model_type == "muse_glimmer_text" and values["layer_rope_theta"] is None:
        values["layer_rope_theta"] = layers_turned(values, rope["rope_theta"])
    if values.get("layer_rope_theta", ()) is None:
        values["layer_rope_theta"] = [rope["rope_theta"]] * values["num_hidden_layers"]


def _own_ropes(values: dict[str, Any], given: dict[str, Any], model_type: str) -> Any:
    """The same of classes that take it as a whole; LFM3's completes it."""
    told = given.get("rope_parameters")
    if model_type != "lfm3":
        return given["rope_scaling"] if "rope_scaling" in given else OWN_ROPES[model_type] if told is None else told
    told = given.get("rope_scaling") or (OWN_ROPES[model_type] if told is None else told)
    ropes = {kind: dict(told[kind]) for kind in KINDS if told.get(kind) is not None}
    for rope in ropes.values():
        rope.setdefault("rope_theta", given.get("rope_theta", THETAS[model_type]))
        _complete(rope, values)
    return told | ropes


def _fill_in_two_ropes(values: dict[str, Any], given: dict[str, Any], model_type: str) -> None:
    """The same by kind of layer, as Gemma 3 and OLMo 3 have it."""
    told = given.get("rope_parameters") or {}
    ropes = {kind: dict(told.get(kind) or {}) for kind in KINDS}
    ropes[KINDS[0]].update(given.get("rope_scaling") or {})
    ropes[KINDS[0]].setdefault("rope_theta", given.get("rope_theta", THETAS[model_type]))
    local = given if model_type == "gemma3_text" else {}
    ropes[KINDS[1]].setdefault("rope_theta", local.get("rope_local_base_freq", LOCAL_THETAS[model_type]))
    for rope in ropes.values():
        _complete(rope, values)
    values["rope_parameters"] = told | ropes


def _complete(rope: dict[str, Any], values: dict[str, Any]) -> None:
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        rope.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
