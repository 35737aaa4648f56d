"""What each layer is where config.json does not say it, as transformers' configuration classes work it out: rules of
plain_config."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from headrace.models.families.base import LAYER_TYPES as KINDS
from headrace.models.families.experts import MLP_TYPES
from headrace.types import UnsupportedModel

EVERY_FOURTH = ("olmo3", "exaone4", "exaone_moe", "cohere2")
"""Of their layers has no window, unless the file says otherwise."""
FULL_FIRST = ("cwm", "granite_swa", "granitemoe_swa")
"""Of which every fourth layer, from the first on, has none."""
GRANITE_KINDS = {"mamba": "linear_attention", "attention": KINDS[0]}
"""What transformers calls the kinds of layers that Granite 4's files name."""
NEMOTRON_KINDS = {"M": "linear_attention", "E": "moe", "*": KINDS[0], "-": "mlp"}
"""What transformers calls the kinds of layers that Nemotron's files have as letters."""
SPARSE_NAMES = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
"""Of MiniMax-M3, in sparse_attention_config."""


def fill_in_minimax_m3(values: dict[str, Any]) -> None:
    """What its published file has by other names, in another form."""
    values["hidden_act"] = "silu"
    told = values.get("sparse_attention_config") or {}
    values |= {ours: told[theirs] for ours, theirs in SPARSE_NAMES.items() if told.get(theirs) is not None}
    if values["layer_types"] is None:
        flags = told.get("sparse_attention_freq") or [0] * values["num_hidden_layers"]
        values["layer_types"] = ["minimax_m3_sparse" if each else KINDS[0] for each in flags]
    if values["mlp_layer_types"] is None:
        flags = values.get("moe_layer_freq") or [1] * values["num_hidden_layers"]
        values["mlp_layer_types"] = [MLP_TYPES[bool(each)] for each in flags]


KIMI_NAMES = {
    "max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize", "n_group": "num_expert_group",
    "num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}  # fmt: skip
"""Fields of Kimi Linear by the names that other classes have for them."""
DELTA_SIZES = {
    "linear_head_dim": "head_dim", "linear_num_heads": "num_heads", "linear_conv_kernel_dim": "short_conv_kernel_size",
}  # fmt: skip
"""Of linear layers, in linear_attn_config."""


def fill_in_kimi_linear(values: dict[str, Any]) -> None:
    """Raises UnsupportedModel for layers that linear_attn_config names and the model has not."""
    for other, own in KIMI_NAMES.items():
        if values.get(other, own) is None:
            raise UnsupportedModel(f"{other} is null; download the file again")
        values[own] = values[other] = values.get(other, values[own])
    told = values.get("linear_attn_config") or {}
    values |= {ours: told[theirs] for ours, theirs in DELTA_SIZES.items() if theirs in told}
    layers = range(values["num_hidden_layers"])
    if values["layer_types"] is None and "full_attn_layers" in told and "kda_layers" in told:
        named = {**dict.fromkeys(told["full_attn_layers"], KINDS[0])}
        named |= dict.fromkeys(told["kda_layers"], "linear_attention")
        if set(named) != {layer + 1 for layer in layers}:
            raise UnsupportedModel("linear_attn_config does not name each layer once; download the file again")
        values["layer_types"] = [named[layer + 1] for layer in layers]
    if values["layer_types"] is None:
        values["layer_types"] = [("linear_attention", KINDS[0])[bool(layer and layer % 4 == 0)] for layer in layers]


def fill_in_falcon_h1(values: dict[str, Any]) -> None:
    width, heads = values["mamba_d_ssm"] or values["mamba_expand"] * values["hidden_size"], values["mamba_n_heads"]
    if values["mamba_d_head"] == "auto":
        values["mamba_d_head"] = width // heads
    if values["mamba_d_head"] * heads != width:
        raise UnsupportedModel(f"{heads} heads of mamba_d_head {values['mamba_d_head']} are not {width} numbers wide")
    values["mlp_multipliers"] = values["mlp_multipliers"] or [1.0] * 2
    values["ssm_multipliers"] = values["ssm_multipliers"] or [1.0] * 5


HY4_TYPES = ("hy_v4", "hy_v4_vl_text")


def fill_in_hy4(values: dict[str, Any]) -> None:
    """Every fourth layer chooses, from the second on, and the first."""
    values["num_key_value_heads"] = values["num_attention_heads"]
    layers = range(values["num_hidden_layers"])
    if values["layer_types"] is None:
        values["layer_types"] = ["indexed_attention" for _ in layers]
    if values["indexer_types"] is None:
        values["indexer_types"] = ["shared" if layer and (layer - 1) % 4 else "full" for layer in layers]


def fill_in_glm5_next(values: dict[str, Any]) -> None:
    """Every fourth layer attends; where nothing tells otherwise, decays are bounded."""
    layers, told = range(values["num_hidden_layers"]), values.get("linear_attn_config")
    if values["mlp_layer_types"] is None:
        values["mlp_layer_types"] = [MLP_TYPES[layer >= 3] for layer in layers]
    kinds = [KINDS[0] if layer % 4 == 3 else "linear_attention" for layer in layers]
    kinds = kinds if values["layer_types"] is None else values["layer_types"]
    values["layer_types"] = ["indexed_attention" if kind == KINDS[0] else kind for kind in kinds]
    if told is None:
        return
    values |= {ours: told[theirs] for ours, theirs in DELTA_SIZES.items() if theirs in told}
    values["linear_lower_bound"] = told.get("gate_lower_bound", values["linear_lower_bound"])
    if told.get("safe_gate", True) and values["linear_lower_bound"] is None:
        values["linear_lower_bound"] = -5.0


def fill_in_llama4(values: dict[str, Any]) -> None:
    layers, every, step = (
        range(values["num_hidden_layers"]),
        values["no_rope_layer_interval"],
        "interleave_moe_layer_step",
    )
    if not values["no_rope_layers"]:
        values["no_rope_layers"] = [int((layer + 1) % every != 0) for layer in layers]
    if values["moe_layers"] is None:
        values["moe_layers"] = [*layers[values[step] - 1 :: values[step]]]
    if values["layer_types"] is None:
        cut = values["attention_chunk_size"] is not None
        kinds = (KINDS[0], "chunked_attention")
        values["layer_types"] = [kinds[bool(turned and cut)] for turned in values["no_rope_layers"]]


def fill_in_kinds(values: dict[str, Any], model_type: str, own: Set[str]) -> None:
    """layer_types and mlp_layer_types, as far as they are among the class's `own` fields. Raises UnsupportedModel where
    nothing tells them."""
    if model_type.startswith("gemma") and "layer_types" in own and values["layer_types"] is None:
        told = values.get("sliding_window_pattern", 6) if model_type == "gemma3_text" else 6
        _fill_in_layer_types(values, 2 if model_type == "gemma2" else told)
    if model_type == "granitemoehybrid":
        _fill_in_granite(values)
    if model_type in EVERY_FOURTH and values["layer_types"] is None:
        untold = model_type.startswith("exaone") and values["sliding_window"] is None
        every = 0 if untold else 4 if model_type == "olmo3" else values.get("sliding_window_pattern", 4)
        _fill_in_layer_types(values, every)
    if model_type == "afmoe" and values["layer_types"] is None:
        _fill_in_layer_types(values, values["global_attn_every_n_layers"])
    if model_type == "muse_glimmer_text" and values["layer_types"] is None:
        values["layer_types"] = [KINDS[bool(each)] for each in _last_of_four(values)]
    if model_type == "gpt_oss" and values["layer_types"] is None:
        values["layer_types"] = [KINDS[(layer + 1) % 2] for layer in range(values["num_hidden_layers"])]
    if "full_attention_interval" in own and values["layer_types"] is None:
        interval, kinds = values["full_attention_interval"], ("full_attention", "linear_attention")
        values["layer_types"] = [kinds[bool((layer + 1) % interval)] for layer in range(values["num_hidden_layers"])]
    if model_type in FULL_FIRST and values["layer_types"] is None:
        values["layer_types"] = [KINDS[layer % 4 != 0] for layer in range(values["num_hidden_layers"])]
    if model_type in ("ministral", "mellum") and values["layer_types"] is None:
        windows = model_type == "ministral" and values["sliding_window"] is not None
        values["layer_types"] = [KINDS[windows]] * values["num_hidden_layers"]
    if model_type == "lfm3" and values["layer_types"] is None:
        values["layer_types"] = [_lfm3_kind(layer) for layer in range(values["num_hidden_layers"])]
    if "mlp_layer_types" in own and values["mlp_layer_types"] is None:
        told = "first_k_dense_replace" in own or model_type == "kimi_linear"
        dense = values.get("first_k_dense_replace", 1) if told else int(model_type != "mellum")
        values["mlp_layer_types"] = [MLP_TYPES[layer >= dense] for layer in range(values["num_hidden_layers"])]
    if "indexer_types" in own and values["indexer_types"] is None:
        values["indexer_types"] = _indexer_kinds(values)


def _indexer_kinds(values: dict[str, Any]) -> list[str]:
    """Of GLM-5: by letters or names of its pattern, or every so many layers behind the first ones."""
    pattern, layers = values["index_topk_pattern"], range(values["num_hidden_layers"])
    if pattern is not None:
        return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    every, first = max(values["index_topk_freq"], 1), values["index_skip_topk_offset"] - 1
    return ["shared" if max(layer - first, 0) % every else "full" for layer in layers]


def _fill_in_granite(values: dict[str, Any]) -> None:
    given = values["layer_types"]
    kinds = ["mamba"] * values["num_hidden_layers"] if given is None else given
    values["layer_types"] = [GRANITE_KINDS.get(kind, kind) for kind in kinds]
    if values["mamba_d_head"] == "auto":
        values["mamba_d_head"] = values["mamba_expand"] * values["hidden_size"] // values["mamba_n_heads"]


def _fill_in_layer_types(values: dict[str, Any], every: Any) -> None:
    """A window in all layers but each `every`th."""
    if not isinstance(every, int) or every < 1:
        raise UnsupportedModel("layer_types is missing, and sliding_window_pattern does not tell them")
    values["layer_types"] = [KINDS[(layer + 1) % every != 0] for layer in range(values["num_hidden_layers"])]


def _last_of_four(values: dict[str, Any]) -> list[int]:
    """Of each layer how many there are behind it, of four: 0 for every fourth one, counted from the last."""
    return [(values["num_hidden_layers"] - 1 - layer) % 4 for layer in range(values["num_hidden_layers"])]


def layers_turned(values: dict[str, Any], base: float) -> list[float]:
    """Muse Glimmer's bases of rotation, by layer: none of every fourth one."""
    return [base if each else 0.0 for each in _last_of_four(values)]


def _lfm3_kind(layer: int) -> str:
    return KINDS[0] if layer % 4 == 2 else KINDS[1] if layer % 4 == 0 and layer else "conv"
