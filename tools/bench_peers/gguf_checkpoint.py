"""Llama-shaped checkpoints as GGUF: weights in bf16 or Q8_0, norms in fp32, no vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(checkpoint: Path, path: Path, weights: str) -> None:
    """Writes `path` from config.json and model.safetensors. weights: bf16 or q8_0."""
    config = json.loads((checkpoint / "config.json").read_text())
    kind = {"bf16": GGMLQuantizationType.BF16, "q8_0": GGMLQuantizationType.Q8_0}[weights]
    partial = path.with_suffix(".partial")
    writer = GGUFWriter(str(partial), "llama")
    _describe(writer, config)
    for name, value in tensors(checkpoint / "model.safetensors"):
        _add(writer, name, value, config, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


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


def _describe(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def _add(writer: GGUFWriter, name: str, value: np.ndarray, config: dict[str, Any], kind: GGMLQuantizationType) -> None:
    layer = re.match(r"model\.layers\.(\d+)\.(.*)\.weight", name)
    ours = f"blk.{layer[1]}.{NAMES[layer[2]]}" if layer else NAMES[name.removesuffix(".weight")]
    if value.ndim == 1:
        writer.add_tensor(f"{ours}.weight", value)
        return
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(ours.split(".")[-1])
    if heads:
        value = _interleaved(value, heads)
    writer.add_tensor(f"{ours}.weight", quants.quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)


def _interleaved(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head reordered: GGUF's rotary pairs neighbours, Hugging Face's pairs halves."""
    rows, width = value.shape
    return value.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)
