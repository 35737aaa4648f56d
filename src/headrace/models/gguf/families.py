"""Architectures whose GGUF files differ from the checkpoint in more than names: the fields of config.json that their
metadata give, and how rows lie that llama.cpp's converter moves. Imports no torch.

Facts: llama.cpp's conversion/*.py, which writes the files, and src/models/*.cpp, which says what a missing key means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.logs import shown
from headrace.models.families.base import LAYER_TYPES, Family, Names, paired_rows
from headrace.models.gguf.facts import FileFacts
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel

MOST_LAYERS = 4096
"""A number beyond it is refused (models.schema), and nothing is made in its size before."""
LAYER = "model.layers.{}."
GEMMA_NAMES = {
    "blk.{}.post_attention_norm": LAYER + "post_attention_layernorm",
    "blk.{}.ffn_norm": LAYER + "pre_feedforward_layernorm",
    "blk.{}.post_ffw_norm": LAYER + "post_feedforward_layernorm",
}
FUSED_NAMES = {"blk.{}.attn_qkv": LAYER + "self_attn.qkv_proj", "blk.{}.ffn_up": LAYER + "mlp.gate_up_proj"}
GLM4_NAMES = FUSED_NAMES | {
    "blk.{}.post_attention_norm": LAYER + "post_self_attn_layernorm",
    "blk.{}.post_ffw_norm": LAYER + "post_mlp_layernorm",
}
GPT_OSS_NAMES = {
    "blk.{}.post_attention_norm": LAYER + "post_attention_layernorm",
    "blk.{}.attn_sinks.weight": LAYER + "self_attn.sinks",
    "blk.{}.ffn_gate_inp": LAYER + "mlp.router",
}
GPT2_NAMES = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
    "output": "lm_head", "blk.{}.attn_norm": "transformer.h.{}.ln_1", "blk.{}.ffn_norm": "transformer.h.{}.ln_2",
    "blk.{}.attn_qkv": "transformer.h.{}.attn.c_attn", "blk.{}.attn_output": "transformer.h.{}.attn.c_proj",
    "blk.{}.ffn_up": "transformer.h.{}.mlp.c_fc", "blk.{}.ffn_down": "transformer.h.{}.mlp.c_proj",
}  # fmt: skip
NEOX = "gpt_neox.layers.{}."
NEOX_NAMES = {
    "token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out",
    "blk.{}.attn_norm": NEOX + "input_layernorm", "blk.{}.ffn_norm": NEOX + "post_attention_layernorm",
    "blk.{}.attn_qkv": NEOX + "attention.query_key_value", "blk.{}.attn_output": NEOX + "attention.dense",
    "blk.{}.ffn_up": NEOX + "mlp.dense_h_to_4h", "blk.{}.ffn_down": NEOX + "mlp.dense_4h_to_h",
}  # fmt: skip
PHI2_NAMES = FUSED_NAMES | {
    "output_norm": "model.final_layernorm", "blk.{}.attn_output": LAYER + "self_attn.dense",
    "blk.{}.ffn_up": LAYER + "mlp.fc1", "blk.{}.ffn_down": LAYER + "mlp.fc2",
}  # fmt: skip
BEHIND_NAMES = {
    "blk.{}.post_attention_norm": LAYER + "post_attention_layernorm",
    "blk.{}.post_ffw_norm": LAYER + "post_feedforward_layernorm",
}
STARCODER2_NAMES = {"blk.{}.ffn_up": LAYER + "mlp.c_fc", "blk.{}.ffn_down": LAYER + "mlp.c_proj"}
HUNYUAN_NAMES = {
    "blk.{}.attn_q_norm": LAYER + "self_attn.query_layernorm",
    "blk.{}.attn_k_norm": LAYER + "self_attn.key_layernorm",
}
SEED_OSS_NAMES = {"blk.{}.post_attention_norm": LAYER + "post_attention_layernorm"}
BLOCK = "transformer.h.{}."
FALCON_NAMES = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.{}.attn_norm": BLOCK + "input_layernorm",
    "blk.{}.attn_norm_2": BLOCK + "ln_attn",
    "blk.{}.attn_qkv": BLOCK + "self_attention.query_key_value",
    "blk.{}.attn_output": BLOCK + "self_attention.dense",
    "blk.{}.ffn_up": BLOCK + "mlp.dense_h_to_4h",
    "blk.{}.ffn_down": BLOCK + "mlp.dense_4h_to_h",
}
"""The file's modules, or whole tensors that have no `weight`, and the checkpoint's."""


Facts = FileFacts
Fields = Callable[[Facts, dict[str, Any]], dict[str, Any]]
"""Fields of config.json beside those that all architectures have, or in their place; given the rotation, too."""
Vectors = Callable[[Facts], Mapping[str, np.ndarray[Any, Any]]]
"""Tensors of the checkpoint, fp32, by its names, that the file has in its metadata."""
Form = Callable[[Family, Set[str]], Family]
"""A family as its tensors lie in a GGUF file that has tensors of these names (the checkpoint's)."""


# ---- fields ----------------------------------------------------------------------------------------------------------


def _biased(**places: str) -> Fields:
    """Fields that say which modules of the first block have biases."""
    return lambda facts, rope: {field: f"blk.0.{module}.bias" in facts.tensors for field, module in places.items()}


seed_oss = _biased(attention_bias="attn_q", attention_out_bias="attn_output", mlp_bias="ffn_gate")
ernie4_5 = _biased(use_bias="attn_q")
arcee = jais2 = _biased(attention_bias="attn_q", mlp_bias="ffn_up")
with_biases = _biased(attention_bias="attn_q")
_biases = _biased(attention_bias="attn_q", mlp_bias="ffn_gate")


def gemma2(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "layer_types": layer_types(facts, every=2),
        "sliding_window": facts.count("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _score_divisor(facts, largest=46),
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
    }


def gemma3(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    window = facts.count("attention.sliding_window", 0) or None
    cap = facts.number("final_logit_softcapping", 0.0) or None
    local = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", 10_000.0)}
    return {
        "layer_types": layer_types(facts, every=1 if window is None else 6),
        "sliding_window": window,
        "query_pre_attn_scalar": _score_divisor(facts, largest=62),
        "final_logit_softcapping": cap,
        "rope_parameters": dict(zip(LAYER_TYPES, (rope, local), strict=True)),
    }


def mistral3(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """Without windows, which its class has where nothing is said."""
    return {"sliding_window": None, "rope_parameters": rope | yarn(facts, rope)}


def ministral3(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    beta = {"llama_4_scaling_beta": facts.number("attention.temperature_scale")}
    return {"sliding_window": None, "rope_parameters": rope | yarn(facts, rope) | beta}


def yarn(facts: Facts, rope: dict[str, Any], unit: float = 1.0) -> dict[str, Any]:
    """The file has one of the two numbers whose quotient scales cos and sin, in this unit; models have them alike."""
    if rope["rope_type"] != "yarn":
        return {}
    scale = facts.number("rope.scaling.yarn_log_multiplier", 0.0) / unit
    betas = {f"beta_{end}": facts.number(f"rope.scaling.yarn_beta_{end}", default) for end, default in BETAS.items()}
    return betas | {"mscale": scale, "mscale_all_dim": scale}


BETAS = {"fast": 32.0, "slow": 1.0}
"""Where the file says nothing."""


def olmo2(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """The file may say what yarn scales cos and sin by."""
    name = "rope.scaling.yarn_attn_factor"
    scaled = {} if facts.value(name) is None else {"attention_factor": facts.number(name)}
    return {"rope_parameters": rope | scaled} | with_biases(facts, rope)


def olmo3(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """Layers with windows are not stretched."""
    fields, theta = olmo2(facts, rope), facts.number("rope.freq_base_swa", rope["rope_theta"])
    local = {"rope_type": "default", "rope_theta": theta}
    return fields | {
        "layer_types": layer_types(facts, every=4),
        "sliding_window": facts.count("attention.sliding_window"),
        "rope_parameters": dict(zip(LAYER_TYPES, (fields["rope_parameters"], local), strict=True)),
    }


def exaone4(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    window = facts.count("attention.sliding_window", 0) or None
    return {"layer_types": layer_types(facts, every=1 if window is None else 4), "sliding_window": window}


def command_r(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "logit_scale": facts.number("logit_scale"),
        "attention_bias": "blk.0.attn_q.bias" in facts.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in facts.tensors,
    }


def starcoder2(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """Without a window: the file does not say it, and llama.cpp has none."""
    return {"sliding_window": None, "use_bias": "blk.0.attn_q.bias" in facts.tensors}


def cohere2(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """Without biases, which the converter leaves out where they are 0, and refuses else."""
    return {
        "layer_types": layer_types(facts, every=4),
        "sliding_window": facts.count("attention.sliding_window"),
        "logit_scale": facts.number("logit_scale"),
        "attention_bias": False,
    }


def gpt_oss(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """Ramps of yarn end between whole numbers, which no key says."""
    ramps = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False} if rope["rope_type"] == "yarn" else {}
    return {
        "attention_bias": True,
        "intermediate_size": facts.count("expert_feed_forward_length"),
        "num_local_experts": facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
        "sliding_window": facts.count("attention.sliding_window"),
        "layer_types": layer_types(facts, every=2),
        "rope_parameters": rope | ramps,
    }


def layer_types(facts: Facts, every: int) -> list[str]:
    """Windows in all layers but each `every`th, if the file says nothing else: a number like that, or one by one."""
    name = "attention.sliding_window_pattern"
    given = None if isinstance(facts.value(name), int) else facts.each_layer(name)
    if given is not None:
        return [LAYER_TYPES[bool(windowed)] for windowed in given]
    every = max(1, facts.count(name, every))
    return [LAYER_TYPES[(layer + 1) % every != 0] for layer in range(min(facts.layers, MOST_LAYERS))]


def _score_divisor(facts: Facts, largest: int) -> float:
    """What scores are divided by the root of. No key has it: it is the head size, but for the model of `largest` layers
    it is the hidden size by heads."""
    if facts.count("block_count") == largest:
        return facts.count("embedding_length") // max(1, facts.count("attention.head_count"))
    return facts.count("attention.key_length")


def phi3(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """0 for a window is none. What llama.cpp does not compute, windows that end within a prompt, is computed here."""
    longest = facts.count("context_length")
    return {
        "sliding_window": facts.count("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": facts.count("rope.scaling.original_context_length", longest),
    }


def smollm3(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """No key says which layers have no positions: each fourth."""
    return {"no_rope_layer_interval": 4, "use_sliding_window": False} | _biases(facts, rope)


def granite(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    if not facts.flag("rope.scaling.finetuned", True):
        raise UnsupportedModel(f"{facts.file.path}: {facts.prefix}rope.scaling.finetuned false is not supported")
    return multipliers(facts) | _biases(facts, rope)


def multipliers(facts: Facts) -> dict[str, Any]:
    """Of all Granite models."""
    return {
        "attention_multiplier": facts.number("attention.scale"),
        "embedding_multiplier": facts.number("embedding_scale"),
        "residual_multiplier": facts.number("residual_scale"),
        "logits_scaling": facts.number("logit_scale"),
    }


SAYS_NOTHING = (0, 1)
"""Of keys on experts: softmax, shares as they are, one group, none that all rows meet."""


def refuse_experts(facts: Facts, read: Set[str]) -> None:
    """Raises UnsupportedModel for a key on experts that is not read and says something."""
    for key in facts.file.metadata:
        name = key.removeprefix(facts.prefix)
        if name.startswith("expert_") and name not in read and (value := facts.number(name)) not in SAYS_NOTHING:
            raise UnsupportedModel(f"{facts.file.path}: {shown(key)} {value:g} is not supported")


def refuse_sections(facts: Facts) -> None:
    """Raises UnsupportedModel for a GLM whose positions are of images, too."""
    if facts.value("rope.dimension_sections") is not None:
        told = f"{facts.prefix}rope.dimension_sections: the rotation of GLM models with vision"
        raise UnsupportedModel(f"{facts.file.path}: {told} is not supported")


def glm(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    refuse_sections(facts)
    names = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")
    return {"attention_bias": any(name in facts.tensors for name in names)}


def falcon(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """7B has one KV head and one norm a layer, 40B more and two, 11B more and one. RW, with ALiBi, has no GGUF form."""
    if (layout := facts.text("tensor_data_layout", "")) != "jploski":
        told = f"{facts.prefix}tensor_data_layout {shown(layout or '(none)')} is not supported; jploski is"
        raise UnsupportedModel(f"{facts.file.path}: {told}")
    kv_heads = facts.count("attention.head_count_kv", facts.count("attention.head_count"))
    norms = 1 + ("blk.0.attn_norm_2.weight" in facts.tensors)
    return {
        "ffn_hidden_size": facts.count("feed_forward_length"),
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "new_decoder_architecture": kv_heads > 1 or norms == 2,
        "num_ln_in_parallel_attn": norms if kv_heads > 1 or norms == 2 else None,
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
    }


def gpt2(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    return {"n_inner": facts.count("feed_forward_length"), "rope_parameters": None}


def stablelm(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "use_parallel_residual": facts.flag("use_parallel_residual", True),
        "use_qkv_bias": "blk.0.attn_q.bias" in facts.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in facts.tensors,
    }


def gpt_neox(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "use_parallel_residual": facts.flag("use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in facts.tensors,
    }


# ---- rows ------------------------------------------------------------------------------------------------------------


def as_named(family: Family, present: Set[str]) -> Family:
    """Nothing but names differs."""
    return family


def turned(family: Family, present: Set[str]) -> Family:
    """Rows of queries and keys lie as llama.cpp rotates them, elements 2 i and 2 i + 1 of a head."""
    return replace(family, qkv_rows=lambda config: paired_rows(config.attention, config.attention.head_dim))


def gpt_oss_form(family: Family, present: Set[str]) -> Family:
    """Gates and ups of experts are two tensors."""
    parts = tuple("layers.{}.mlp.experts.{}." + part for part in ("gate_proj", "up_proj"))
    return replace(renamed(family, {"layers.{}.experts.{}.up": parts}), rows=None)


def glm_form(family: Family, present: Set[str]) -> Family:
    """ChatGLM's own files have q, k and v in one tensor, those made of transformers' three. Rotated neighbours stay."""
    if "model.layers.0.self_attn.qkv_proj.weight" not in present:
        return family
    return renamed(family, {"layers.{}.qkv": ("layers.{}.self_attn.qkv_proj",)})


def fused_in_order(family: Family, present: Set[str]) -> Family:
    """All queries, then keys, then values."""
    return replace(family, qkv_rows=None)


def falcon_form(family: Family, present: Set[str]) -> Family:
    """Of two norms the first is the MLP's."""
    family = fused_in_order(family, present)
    if "transformer.h.0.ln_attn.weight" not in present:
        return family
    return renamed(family, {"layers.{}.mlp_norm": ("h.{}.input_layernorm",)})


def renamed(family: Family, own: Names) -> Family:
    def changed(names: Callable[[ModelConfig], Names] | None) -> Callable[[ModelConfig], Names] | None:
        return None if names is None else lambda config: {**names(config), **own}

    names = changed(family.names)
    assert names is not None
    return replace(family, names=names, other_names=changed(family.other_names))
