"""Checkpoints of the benchmarks as GGUF, without a vocabulary: Llama, Qwen3-MoE and Qwen3.5 (text, as many value heads
as key heads), in bf16 or as llama.cpp quantises that.

    python gguf_checkpoint.py CHECKPOINT FILE.gguf bf16|q8_0|q4_k_m

Runs in llama.cpp's environment. What tensors are called and how they lie there: llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp as ll
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

ARCHITECTURES = {"llama": "llama", "qwen3_moe": "qwen3moe", "qwen3_5_text": "qwen35"}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
HYBRID_NAMES = NAMES | {"post_attention_layernorm": "post_attention_norm"}
WIDE = ("ffn_gate_inp", "ssm_conv1d")
"""Matrices that llama.cpp keeps in fp32."""
FORMS = {"q8_0": ll.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_k_m": ll.LLAMA_FTYPE_MOSTLY_Q4_K_M}


def write(checkpoint: Path, path: Path, weights: str) -> None:
    """Writes `path` from config.json and model.safetensors. weights: bf16, or a name of FORMS."""
    partial = path.with_suffix(".partial")
    if weights == "bf16":
        write_bf16(checkpoint, partial)
    else:
        plain = path.with_suffix(".bf16")
        write_bf16(checkpoint, plain)
        params = ll.llama_model_quantize_default_params()
        params.ftype = FORMS[weights]
        status = ll.llama_model_quantize(str(plain).encode(), str(partial).encode(), params)
        plain.unlink()
        if status:
            raise RuntimeError(f"llama_model_quantize gave {status}")
    partial.rename(path)


def write_bf16(checkpoint: Path, path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    writer = GGUFWriter(str(path), ARCHITECTURES[config["model_type"]])
    _describe(writer, config)
    found = together(tensors(checkpoint / "model.safetensors"), config.get("num_experts", 0))
    for name, value in found:
        _add(writer, name, value, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values, as fp32, of a safetensors file of bf16 tensors; needs no torch."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    length = int(data[:8].view(np.uint64)[0])
    header = json.loads(data[8 : 8 + length].tobytes())
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is {entry['dtype']}, not BF16")
        begin, end = entry["data_offsets"]
        halves = data[8 + length + begin : 8 + length + end].view(np.uint16)
        yield name, (halves.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])


def together(found: Iterator[tuple[str, np.ndarray]], experts: int) -> Iterator[tuple[str, np.ndarray]]:
    """The same with the experts of a layer, [O, I] each, as one tensor [experts, O, I]."""
    parts: dict[str, dict[int, np.ndarray]] = {}
    for name, value in found:
        expert = re.fullmatch(r"(.*)\.experts\.(\d+)\.(.*)", name)
        if expert is None:
            yield name, value
            continue
        merged = f"{expert[1]}.experts.{expert[3]}"
        of_name = parts.setdefault(merged, {})
        of_name[int(expert[2])] = value
        if len(of_name) == experts:
            yield merged, np.stack([of_name[e] for e in range(experts)])
            del parts[merged]


def _describe(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    turned = config.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(turned * config["head_dim"]))
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_token_list([f"w{token}" for token in range(config["vocab_size"])])  # mistral.rs wants to see them
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "linear_num_key_heads" in config:
        heads, dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(heads * dim)
        writer.add_full_attention_interval(config["full_attention_interval"])
        writer.add_rope_dimension_sections([*config["rope_parameters"]["mrope_section"], 0])


def _add(writer: GGUFWriter, name: str, value: np.ndarray, config: dict[str, Any]) -> None:
    kind = ARCHITECTURES[config["model_type"]]
    ours = _name(name, HYBRID_NAMES if kind == "qwen35" else NAMES)
    part = ours.split(".")[-1]
    if kind == "qwen35":
        value = _of_hybrid(name, value)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(part)
    if heads and kind == "llama":
        value = _interleaved(value, heads)
    ours = ours if ours.endswith((".bias", ".ssm_a")) else f"{ours}.weight"
    if value.ndim == 1 or part in WIDE:
        writer.add_tensor(ours, np.ascontiguousarray(value))
        return
    bf16 = GGMLQuantizationType.BF16
    writer.add_tensor(ours, quants.quantize(np.ascontiguousarray(value), bf16), raw_dtype=bf16)


def _name(name: str, names: dict[str, str]) -> str:
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*?)(\.weight)?", name)
    return f"blk.{layer[1]}.{names[layer[2]]}" if layer else names[name.removesuffix(".weight")]


def _of_hybrid(name: str, value: np.ndarray) -> np.ndarray:
    """Norms with their 1, decays as they are multiplied, convolutions [channels, width]."""
    if name.endswith("A_log"):
        return -np.exp(value)
    if name.endswith("conv1d.weight"):
        return value[:, 0]
    return value + 1 if name.endswith("norm.weight") and "linear_attn.norm" not in name else value


def _interleaved(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head reordered: GGUF's rotary pairs neighbours, Hugging Face's pairs halves."""
    rows, width = value.shape
    return value.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
