"""Checkpoints with random weights, for benchmarks: the arithmetic of a Llama, a Qwen3-MoE or a Qwen3.5 without its
knowledge."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bench.caches import cache_folder, notice
from headrace.console import err

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class CheckpointShape:
    """Sizes of a Llama: `mlp` is the width between gate and down. With experts, of a Qwen3-MoE: `mlp` is the width of
    each, and a token meets `chosen`. With delta_heads, of a Qwen3.5: all layers but every INTERVAL-th are gated delta
    nets of as many key and value heads, of delta_dim each."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int = 32_000
    context: int = 32_768
    experts: int = 0
    chosen: int = 0
    delta_heads: int = 0
    delta_dim: int = 128

    @property
    def recurrent_layers(self) -> list[int]:
        return [layer for layer in range(self.layers) if self.delta_heads and (layer + 1) % INTERVAL]


INTERVAL = 4
"""Of the layers of a hybrid, the one of so many that has attention."""
CONVOLUTION = 4
"""Inputs of a recurrent layer's short convolution."""

SHAPES = {
    "S1": CheckpointShape(hidden=1024, layers=16, heads=16, kv_heads=4, head_dim=64, mlp=2816),
    "S2": CheckpointShape(hidden=1024, layers=8, heads=8, kv_heads=8, head_dim=128, mlp=2816),
    "S3": CheckpointShape(hidden=2048, layers=22, heads=32, kv_heads=4, head_dim=64, mlp=5632),
    "S4": CheckpointShape(hidden=1024, layers=8, heads=16, kv_heads=4, head_dim=64, mlp=512, experts=32, chosen=4),
    "S5": CheckpointShape(hidden=1024, layers=8, heads=8, kv_heads=2, head_dim=256, mlp=3584, delta_heads=16),
}


def checkpoint(model: str) -> Path:
    """The folder of a random-weight shape, written on first use. Raises ValueError for an unknown shape."""
    if model not in SHAPES:
        raise ValueError(f"model must be one of {', '.join(SHAPES)}; got {model!r}")
    folder, shape = cache_folder() / "bench" / model, SHAPES[model]
    if not is_written(shape, folder):
        err.print(notice(f"{model}, random weights", weight_bytes(shape), folder), style="dim", markup=False)
        write_checkpoint(shape, folder)
    return folder.resolve()


def weight_bytes(shape: CheckpointShape) -> int:
    """Bytes of the weights in bf16, vectors apart."""
    layers = sum(rows * columns for layer in range(shape.layers) for rows, columns in _matrices(shape, layer).values())
    return 2 * (2 * shape.vocab * shape.hidden + layers)


def is_written(shape: CheckpointShape, folder: Path) -> bool:
    """config.json is written last, and says whether an earlier version made other sizes under this name."""
    try:
        return bool(json.loads((folder / "config.json").read_text()) == _config(shape))
    except (OSError, ValueError):
        return False


def write_checkpoint(shape: CheckpointShape, folder: Path, seed: int = 0) -> Path:
    """Writes config.json and bf16 weights of the shape into `folder` (no tokenizer); returns the folder."""
    return save_checkpoint(shape, random_weights(shape, seed), folder)


def save_checkpoint(shape: CheckpointShape, weights: dict[str, torch.Tensor], folder: Path) -> Path:
    """Writes these weights of the shape, and behind them config.json; returns the folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=1))
    return folder


def random_weights(shape: CheckpointShape, seed: int = 0) -> dict[str, torch.Tensor]:
    """bf16 weights by their names in a checkpoint: normally distributed, so that activations keep their size."""
    import torch

    g = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=g) * columns**-0.5).bfloat16()

    weights = {
        "model.embed_tokens.weight": matrix(shape.vocab, shape.hidden),
        "lm_head.weight": matrix(shape.vocab, shape.hidden),
    }
    for layer in range(shape.layers):
        for name, size in _matrices(shape, layer).items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(*size)
    norm = 0.0 if shape.delta_heads else 1.0  # a hybrid's norms add 1
    for name, width in _norms(shape).items():
        weights[name] = torch.full((width,), norm).bfloat16()
    for layer in shape.recurrent_layers:
        delta, heads = f"model.layers.{layer}.linear_attn.", shape.delta_heads
        conv = matrix(3 * heads * shape.delta_dim, CONVOLUTION)
        weights[delta + "conv1d.weight"] = conv[:, None].contiguous()
        weights[delta + "A_log"] = torch.empty(heads).uniform_(0.1, 2.0, generator=g).log().bfloat16()
        weights[delta + "dt_bias"] = torch.ones(heads).bfloat16()
        weights[delta + "norm.weight"] = torch.ones(shape.delta_dim).bfloat16()
    return weights


def write_outline(shape: CheckpointShape, folder: Path) -> Path:
    """Writes config.json and weights that are zeros and take no room on the disk; returns the folder.

    For engines whose weights are made elsewhere: all that is read of the files but the numbers is as it should be.
    """
    sizes: dict[str, tuple[int, ...]] = {
        f"model.layers.{layer}.{name}.weight": size
        for layer in range(shape.layers)
        for name, size in _matrices(shape, layer).items()
    }
    sizes |= {f"{name}.weight": (shape.vocab, shape.hidden) for name in ("model.embed_tokens", "lm_head")}
    sizes |= {name: (width,) for name, width in _norms(shape).items()}
    header, end = {}, 0
    for name, size in sizes.items():
        begin, end = end, end + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=1))
    return folder


def _matrices(shape: CheckpointShape, layer: int) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of a layer's matrices, by their names in it."""
    hidden, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    heads, delta, linear = shape.delta_heads, shape.delta_heads * shape.delta_dim, "linear_attn."
    if layer in shape.recurrent_layers:
        sizes = {
            linear + "in_proj_qkv": (3 * delta, hidden), linear + "in_proj_z": (delta, hidden),
            linear + "in_proj_b": (heads, hidden), linear + "in_proj_a": (heads, hidden),
            linear + "out_proj": (hidden, delta),
        }  # fmt: skip
    else:
        gates = q if heads else 0
        sizes = {
            "self_attn.q_proj": (q + gates, hidden), "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q),
        }  # fmt: skip
    sizes |= {"mlp.gate": (shape.experts, hidden)} if shape.experts else {}
    for mlp in [f"mlp.experts.{e}" for e in range(shape.experts)] or ["mlp"]:
        sizes |= {f"{mlp}.{name}_proj": (shape.mlp, hidden) for name in ("gate", "up")}
        sizes |= {f"{mlp}.down_proj": (hidden, shape.mlp)}
    return sizes


def _norms(shape: CheckpointShape) -> dict[str, int]:
    """Widths of the norms, by name; those of queries and keys are not Llama's."""
    found = {"model.norm.weight": shape.hidden}
    for layer in range(shape.layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{name}.weight"] = shape.hidden
        if (shape.experts or shape.delta_heads) and layer not in shape.recurrent_layers:
            found |= {f"model.layers.{layer}.self_attn.{name}_norm.weight": shape.head_dim for name in "qk"}
    return found


def _config(shape: CheckpointShape) -> dict[str, object]:
    name, kind = "LlamaForCausalLM", "llama"
    more: dict[str, object] = {}
    if shape.experts:
        name, kind, more = "Qwen3MoeForCausalLM", "qwen3_moe", _expert_config(shape)
    if shape.delta_heads:
        name, kind, more = "Qwen3_5ForCausalLM", "qwen3_5_text", _delta_config(shape)
    return more | {
        "architectures": [name],
        "model_type": kind,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _expert_config(shape: CheckpointShape) -> dict[str, object]:
    return {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.chosen,
        "moe_intermediate_size": shape.mlp,
        "norm_topk_prob": True,
    }


def _delta_config(shape: CheckpointShape) -> dict[str, object]:
    kinds = {True: "linear_attention", False: "full_attention"}
    return {
        "layer_types": [kinds[layer in shape.recurrent_layers] for layer in range(shape.layers)],
        "full_attention_interval": INTERVAL,
        "linear_num_key_heads": shape.delta_heads,
        "linear_num_value_heads": shape.delta_heads,
        "linear_key_head_dim": shape.delta_dim,
        "linear_value_head_dim": shape.delta_dim,
        "linear_conv_kernel_dim": CONVOLUTION,
        "hidden_act": "silu",
        "attention_bias": False,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25,
                            "mrope_section": [11, 11, 10], "mrope_interleaved": True},
    }  # fmt: skip
