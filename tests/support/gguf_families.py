"""GGUF files of the families beside Llama's kin, as llama.cpp's converter writes them: its names, its metadata, and
what it changes. transformers' own model is given just the weights that the file then stands for.

Facts: llama.cpp's conversion/*.py. Nothing here is taken from headrace's reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, quants
from transformers import PreTrainedModel

from tests.support import (
    checkpoints,
    gguf_apertus,
    gguf_deepseek,
    gguf_falcon_h1,
    gguf_gemma4,
    gguf_gpt,
    gguf_gpt_oss,
    gguf_granite,
    gguf_hybrids,
    gguf_kimi,
    gguf_lfm2,
    gguf_nemotron,
    gguf_routed,
    hybrid_checkpoints,
)
from tests.support import gguf_windows as windows
from tests.support.gguf_files import SIZES, Array, KindOf, finish, raw_rows

HYBRID = dict(
    num_hidden_layers=4, linear_key_head_dim=32, linear_value_head_dim=64, linear_num_key_heads=2,
    linear_num_value_heads=4, partial_rotary_factor=0.25,
)  # fmt: skip
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma2": ("gemma2", "gemma2", dict(query_pre_attn_scalar=64, num_hidden_layers=3)),
    "gemma3": ("gemma3", "gemma3", dict(query_pre_attn_scalar=64, num_hidden_layers=7, layer_types=None)),
    "gemma3_linear": ("gemma3", "gemma3_linear", dict(query_pre_attn_scalar=64, layer_types=None)),
    "phi3": ("phi3", "phi3", {}),
    "phi4_longrope": (
        "phi3",
        "phi4_longrope",
        dict(
            tie_word_embeddings=False,
            original_max_position_embeddings=128,
            rope_parameters=dict(
                rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75,
                short_factor=[1 + 0.05 * i for i in range(24)], long_factor=[1 + 0.5 * i for i in range(24)],
            ),
        ),
    ),
    "qwen2_vl": ("qwen2vl", "qwen2", {}),
    "qwen3_vl": ("qwen3vl", "qwen3", {}),
    "ministral3": ("mistral3", "ministral3", {}),
    "mistral3": ("mistral3", "mistral", dict(sliding_window=None)),
    "seed_oss": ("seed_oss", "seed_oss", dict(mlp_bias=False)),
    "olmo2": ("olmo2", "olmo2", {}),
    "olmo3": ("olmo2", "olmo3", dict(num_hidden_layers=4, rope_parameters=dict(
        full_attention=checkpoints.YARN_ROPE["rope_parameters"] | dict(attention_factor=1.3),
        sliding_attention=dict(rope_type="default", rope_theta=1e4),
    ))),
    "exaone4": ("exaone4", "exaone4", dict(num_hidden_layers=3)),
    "exaone4_plain": ("exaone4", "exaone4_plain", {}),
    "cohere2": ("cohere2", "cohere2", dict(num_hidden_layers=4, attention_bias=False, layer_types=None)),
    "cohere": ("command-r", "cohere", dict(attention_bias=False)),
    "starcoder2": ("starcoder2", "starcoder2", dict(sliding_window=None)),
    "ernie4_5": ("ernie4_5", "ernie4_5", {}),
    "arcee": ("arcee", "arcee", {}),
    "gemma": ("gemma", "gemma", {}),
    "hunyuan": ("hunyuan-dense", "hunyuan", {}),
    "smollm3": ("smollm3", "smollm3", dict(num_hidden_layers=4, no_rope_layer_interval=4)),
    "granite": ("granite", "granite", {}),
    "glm": ("chatglm", "glm", {}),
    "glm_fused": ("chatglm", "glm", {}),
    "glm4": ("glm4", "glm4", {}),
    "falcon7": ("falcon", "falcon7", {}),
    "falcon40": ("falcon", "falcon40", dict(tie_word_embeddings=False)),
    "falcon11": ("falcon", "falcon11", {}),
    "qwen3_next": ("qwen3next", "next", HYBRID),
    "qwen3_next_old": ("qwen3next", "next", HYBRID),
    "qwen3_5": ("qwen35", "3_5", HYBRID),
    "qwen3_next_experts": ("qwen3next", "next_experts", HYBRID | dict(mlp_only_layers=[])),
    "qwen3_5_experts": ("qwen35moe", "3_5_experts", HYBRID),
    "qwen3_5_three_each": ("qwen35", "3_5", HYBRID | dict(linear_num_value_heads=6, attention_bias=True)),
} | gguf_deepseek.KINDS | gguf_gpt_oss.KINDS | gguf_gemma4.KINDS | gguf_routed.KINDS | gguf_lfm2.KINDS  # fmt: skip
KINDS |= gguf_granite.KINDS | gguf_nemotron.KINDS | gguf_gpt.KINDS | gguf_kimi.KINDS | gguf_falcon_h1.KINDS
KINDS |= gguf_apertus.KINDS
"""Name -> (general.architecture, the kind of tests.support.checkpoints or hybrid_checkpoints, fields of its own)."""

HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")
OWN: Any = {each.ARCHITECTURE: each for each in (gguf_granite, gguf_kimi, gguf_falcon_h1)}
OWN |= {name: each for each in (gguf_apertus, gguf_gpt, gguf_nemotron) for name in each.ARCHITECTURES}
CORRECTED = ("ernie4_5-moe", "minimax-m2", "exaone-moe", gguf_kimi.ARCHITECTURE, *gguf_nemotron.ARCHITECTURES)
APART = ("granitemoe", "granitehybrid", "lfm2moe", "qwen2moe", "hunyuan-moe", "mellum", "afmoe", "llama4", *HYBRIDS)
FILTERS = ("ssm_conv1d.weight", "shortconv.conv.weight")
NORM_BEHIND_ATTENTION = (
    "gemma2", "gemma3", "gemma4", "qwen3next", "qwen35", "qwen35moe", "seed_oss", "gpt-oss", "glm4moe", "olmo2",
    "exaone4", "afmoe",
)  # fmt: skip
"""Architectures that call post_attention_layernorm so, whatever it is."""
NAMES = {
    "embed_tokens": "token_embd", "word_embeddings": "token_embd", "norm": "output_norm", "ln_f": "output_norm",
    "lm_head": "output", "input_layernorm": "attn_norm", "ln_mlp": "attn_norm", "ln_attn": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm", "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm", "pre_feedforward_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "post_feedforward_layernorm": "post_ffw_norm", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv", "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output", "mlp.gate_up_proj": "ffn_up", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_qkvz": "ssm_in", "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
} | gguf_deepseek.NAMES | gguf_gpt_oss.NAMES | gguf_gemma4.NAMES | gguf_routed.NAMES | gguf_lfm2.NAMES  # fmt: skip


def _as_it_is(value: Array) -> Array:
    return value


@dataclass
class Place:
    """A tensor of the file, and which part of the model's it is: these rows, these columns, changed by `forth`."""

    name: str
    rows: Array | None = None
    columns: Array | None = None
    forth: Callable[[Array], Array] = _as_it_is
    back: Callable[[Array], Array] = _as_it_is


def build(kind: str) -> PreTrainedModel:
    """A random model of a kind, in the sizes of gguf_files."""
    architecture, base, own = KINDS[kind]
    fields = {**SIZES, **own}
    if architecture in (*gguf_apertus.ARCHITECTURES, *gguf_gpt.ARCHITECTURES):
        return checkpoints.build_model(base, **own if architecture == "gpt2" else fields)
    if architecture == "falcon":
        fields = {name: fields[name] for name in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id")}
    if architecture in (*gguf_deepseek.ARCHITECTURES, "minicpm3"):
        del fields["head_dim"]
    if architecture in (*HYBRIDS, *gguf_lfm2.ARCHITECTURES, *OWN):
        return hybrid_checkpoints.build_model(base, **fields)
    if architecture in ("chatglm", "glm4"):
        fields["eos_token_id"] = checkpoints.NO_TOKEN
    return checkpoints.build_model(base, **fields | own)


def write_family(
    kind: str, path: Path, kind_of: KindOf, change: Callable[[GGUFWriter], object] | None = None, **split: Any
) -> PreTrainedModel:
    """Writes a file, and returns the model with the weights that it stands for. change: of what is written, keys
    that are there already among it. split: into parts, as GGUFWriter does it."""
    model, architecture = build(kind), KINDS[kind][0]
    writer, config = GGUFWriter(str(path), architecture, **split), model.config
    latent = architecture in (*gguf_deepseek.ARCHITECTURES, "glm4moe", "dots1", "minicpm3")
    old = kind.endswith("_old") or architecture == "minicpm3"
    apart = latent or architecture in (*CORRECTED, *APART)
    _describe_whole(writer, model, architecture, old)
    if latent or architecture in CORRECTED:
        gguf_deepseek.add_corrections(writer, model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if architecture in OWN and OWN[architecture].add(writer, config, name, parameter, kind_of):
                continue
            if apart and gguf_deepseek.add(writer, model, name, parameter, kind_of, old):
                continue
            if architecture == "gemma4" and gguf_gemma4.add(writer, name, parameter, kind_of, kind):
                continue
            if architecture == "gpt-oss" and gguf_gpt_oss.add(writer, name, parameter, kind_of):
                continue
            if not (config.tie_word_embeddings and name == "lm_head.weight"):
                for place in _places(name, config, kind):
                    _add(writer, place, [parameter], kind_of)
        if kind == "glm_fused":
            for index, layer in enumerate(model.model.layers):
                for end in ("weight", "bias"):
                    parts = [getattr(getattr(layer.self_attn, f"{part}_proj"), end) for part in "qkv"]
                    _add(writer, Place(f"blk.{index}.attn_qkv.{end}"), parts, kind_of)
    if change is not None:
        described, writer.kv_data = writer.kv_data, [{}]
        change(writer)
        writer.kv_data = [described[0] | writer.kv_data[0]]
    finish(writer)
    return model


def _describe_whole(writer: GGUFWriter, model: PreTrainedModel, architecture: str, old: bool) -> None:
    """All keys, and what the model has beside its parameters."""
    if architecture in gguf_lfm2.ARCHITECTURES:
        gguf_lfm2.describe(writer, model.config)
        gguf_lfm2.add_corrections(writer, model)
    elif architecture in OWN:
        OWN[architecture].describe(writer, model.config)
    else:
        describe(writer, model.config, architecture)
    if architecture in gguf_deepseek.ARCHITECTURES:
        gguf_deepseek.describe(writer, model.config, old)
    if architecture == "apertus":
        gguf_apertus.add_activations(writer, model)
    if architecture in ("glm4moe", "dots1"):
        gguf_deepseek.describe_experts(writer, model.config)
    if architecture == "gpt-oss":
        gguf_gpt_oss.describe(writer, model.config)
    if architecture == "gemma4":
        gguf_gemma4.draw(writer, model)


def _add(writer: GGUFWriter, place: Place, parameters: list[torch.Tensor], kind_of: KindOf) -> None:
    """The parameters, one after another, and into them what is written."""
    own = np.concatenate([each.numpy().astype(np.float32) for each in parameters])
    rows = np.arange(len(own)) if place.rows is None else place.rows
    index = rows if place.columns is None else np.ix_(rows, place.columns)
    value = np.ascontiguousarray(place.forth(own[index]))
    value = value.reshape(-1) if len(value) == 1 else value  # as the converter does
    kind = Kind.F32 if value.ndim == 1 or place.name.endswith(FILTERS) else kind_of(place.name)
    if value.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = Kind.F16  # as the converter does
    stored = raw_rows(value, kind)
    writer.add_tensor(place.name, stored, raw_dtype=kind)
    own[index] = place.back(quants.dequantize(stored, kind)).reshape(own[index].shape)
    for parameter, part in zip(
        parameters, np.split(own, np.cumsum([len(each) for each in parameters])[:-1]), strict=True
    ):
        parameter.copy_(torch.from_numpy(part))


def _places(name: str, config: Any, kind: str) -> Iterator[Place]:
    layer = re.match(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.*)", name)
    module, _, end = (layer[2] if layer else name.removeprefix("model.").removeprefix("transformer.")).rpartition(".")
    architecture = KINDS[kind][0]
    if kind == "glm_fused" and module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        return  # they are written together
    prefix = f"blk.{layer[1]}." if layer else ""
    if end in ("A_log", "dt_bias"):
        theirs = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias"}[end]
    elif end == "expert_bias":
        theirs = "exp_probs_b.bias"
    else:
        theirs = f"{NAMES[module]}.{end}"
    if module == "post_attention_layernorm" and architecture in NORM_BEHIND_ATTENTION:
        theirs = "post_attention_norm.weight"
    place = Place(prefix + theirs)
    if module == "conv.conv":
        place.forth = lambda value: value.squeeze(1)
    turned = architecture in ("smollm3", "granite", "granitemoe", "granitehybrid", "mistral3", "arcee")
    if turned and module in ("self_attn.q_proj", "self_attn.k_proj"):
        place.rows = _in_pairs(config.num_attention_heads if "q_proj" in module else config.num_key_value_heads, config)
    if architecture == "falcon" and "query_key_value" in module:
        place.rows = _by_part(config)
    adds_one = architecture in ("gemma", "gemma2", "gemma3", *HYBRIDS)
    if adds_one and name.endswith("norm.weight") and "linear_attn" not in name:
        place.forth, place.back = lambda value: value + 1, lambda value: value - 1
    if "linear_attn" in module or end in ("A_log", "dt_bias"):
        _change_linear(place, module, end, config, tiled=architecture in HYBRIDS[1:])
    if "in_proj_qkvz" in module and kind != "qwen3_next_old":
        qkv, z = gguf_hybrids.by_kind(config)
        yield Place(prefix + "attn_qkv.weight", qkv)
        yield Place(prefix + "attn_gate.weight", z)
        return
    yield place


def _in_pairs(heads: int, config: Any) -> Array:
    """Rows of each head as llama.cpp rotates them: neighbours, where transformers rotates halves."""
    rows = np.arange(heads * 64).reshape(heads, 2, 32)
    return rows.swapaxes(1, 2).reshape(-1)


def _by_part(config: Any) -> Array:
    """Falcon's rows go by KV head: queries, key, value. Here all queries come first, then keys, then values."""
    heads, kv = config.num_attention_heads, 1 if not config.new_decoder_architecture else config.num_kv_heads
    rows = np.arange((heads + 2 * kv) * 64).reshape(kv, heads // kv + 2, 64)
    return np.concatenate([rows[:, :-2].reshape(-1), rows[:, -2].reshape(-1), rows[:, -1].reshape(-1)])


def _change_linear(place: Place, module: str, end: str, config: Any, tiled: bool) -> None:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    size, first = config.linear_value_head_dim, 2 * keys * config.linear_key_head_dim
    if end == "A_log":
        place.forth, place.back = lambda value: -np.exp(value), lambda value: np.log(-value)
    if module.endswith("conv1d"):
        place.forth = lambda value: value.squeeze(1)
    if not tiled:
        return
    heads = np.arange(values).reshape(keys, -1).T.reshape(-1)
    wide = np.arange(values * size).reshape(keys, -1, size).swapaxes(0, 1).reshape(-1)
    if end in ("A_log", "dt_bias") or module.endswith(("in_proj_a", "in_proj_b")):
        place.rows = heads
    if module.endswith(("in_proj_qkv", "conv1d")):
        place.rows = np.concatenate([np.arange(first), first + wide])
    if module.endswith("in_proj_z"):
        place.rows = wide
    if module.endswith("out_proj"):
        place.columns = wide


# ---- metadata --------------------------------------------------------------------------------------------------------


def describe(writer: GGUFWriter, config: Any, architecture: str) -> None:
    """The keys that the converter writes of a family."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if architecture == "gemma4":
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        return gguf_gemma4.describe(writer, config)
    if architecture != "qwen35moe":
        name = "intermediate_size_mlp" if architecture == "llama4" else "intermediate_size"
        writer.add_feed_forward_length(4 * config.hidden_size if architecture == "falcon" else getattr(config, name))
    if architecture == "falcon":
        writer.add_head_count_kv(config.num_kv_heads if config.new_decoder_architecture else 1)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        writer.add_tensor_data_layout("jploski")
        return
    if architecture in ("cohere2", "command-r"):
        writer.add_layer_norm_eps(config.layer_norm_eps)
    elif architecture == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture not in gguf_deepseek.ARCHITECTURES:
        writer.add_head_count_kv(config.num_key_value_heads)
    if architecture not in ("phi3", "granite", "granitemoe", "chatglm", *gguf_deepseek.ARCHITECTURES, "minicpm3"):
        writer.add_key_length(64)
        writer.add_value_length(64)
    _describe_rope(writer, config, architecture)
    if architecture == "mistral3" and "llama_4_scaling_beta" in config.rope_parameters:
        writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
        writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])
    if architecture in ("qwen2vl", "qwen3vl"):
        writer.add_rope_dimension_sections([12, 10, 10, 0])
    more = {"gemma2": windows.gemma2, "gemma3": windows.gemma3, "granite": gguf_routed.granite,
            **dict.fromkeys(HYBRIDS, gguf_hybrids.describe),
            "olmo2": windows.of_layers, "exaone4": windows.of_layers, "cohere2": windows.cohere2,
            "command-r": windows.cohere, "minimax-m2": gguf_routed.minimax_m2,
            "ernie4_5-moe": gguf_routed.ernie_moe, "granitemoe": gguf_routed.granite_moe,
            "qwen2moe": gguf_routed.qwen2_moe, "hunyuan-moe": gguf_routed.hunyuan_moe,
            "exaone-moe": gguf_routed.exaone_moe, "mellum": gguf_routed.mellum, "afmoe": gguf_routed.afmoe,
            "llama4": gguf_routed.llama4,
            "minicpm3": gguf_deepseek.minicpm3}  # fmt: skip
    if architecture in more:
        more[architecture](writer, config)


def _describe_rope(writer: GGUFWriter, config: Any, architecture: str) -> None:
    rope = config.rope_parameters
    if architecture == "gemma2":
        return  # its base is the usual one
    every = rope.get("full_attention", rope)
    if every["rope_type"] == "dynamic":  # HunYuan's: a base that is stretched once
        writer.add_rope_freq_base(every["rope_theta"] * every["alpha"] ** (64 / 62))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1.0)
        writer.add_rope_scaling_orig_ctx_len(config.max_position_embeddings)
        return
    writer.add_rope_freq_base(every["rope_theta"])
    if every["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(every["factor"])
    if every["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(every["factor"])
        writer.add_rope_scaling_orig_ctx_len(every["original_max_position_embeddings"])
        for end in ("fast", "slow"):
            if f"beta_{end}" in every:
                getattr(writer, f"add_rope_scaling_yarn_beta_{end}")(every[f"beta_{end}"])
        if "attention_factor" in every:
            writer.add_rope_scaling_yarn_attn_factor(every["attention_factor"])
    if "partial_rotary_factor" in rope:
        writer.add_rope_dimension_count(int(64 * rope["partial_rotary_factor"]))
    if architecture in ("smollm3", "granite", "granitemoe", "phi3") and "partial_rotary_factor" not in rope:
        writer.add_rope_dimension_count(64)
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_sliding_window(config.sliding_window or 0)
    if "long_factor" in rope:
        if architecture == "phi3":
            scale = config.max_position_embeddings / config.original_max_position_embeddings
            factor = np.sqrt(1 + np.log(scale) / np.log(config.original_max_position_embeddings))
            writer.add_rope_scaling_attn_factors(float(factor))
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
