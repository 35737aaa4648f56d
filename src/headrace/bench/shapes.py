"""Checkpoints with random weights, for benchmarks: the arithmetic of a Llama or a Qwen3-MoE without its knowledge."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from headrace.bench.caches import cache_folder, notice
from headrace.console import err


@dataclass(frozen=True, slots=True)
class CheckpointShape:
    """Sizes of a Llama: `mlp` is the width between gate and down. With experts, of a Qwen3-MoE: `mlp` is the width of
    each, and a token meets `chosen`."""

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


SHAPES = {
    "S1": CheckpointShape(hidden=1024, layers=16, heads=16, kv_heads=4, head_dim=64, mlp=2816),
    "S2": CheckpointShape(hidden=1024, layers=8, heads=8, kv_heads=8, head_dim=128, mlp=2816),
    "S3": CheckpointShape(hidden=2048, layers=22, heads=32, kv_heads=4, head_dim=64, mlp=5632),
    "S4": CheckpointShape(hidden=1024, layers=8, heads=16, kv_heads=4, head_dim=64, mlp=512, experts=32, chosen=4),
}


def checkpoint(model: str) -> Path:
    """The folder of a random-weight shape, written on first use. Raises ValueError for an unknown shape."""
    if model not in SHAPES:
        raise ValueError(f"model must be one of {', '.join(SHAPES)}; got {model!r}")
    folder, shape = cache_folder() / "bench" / model, SHAPES[model]
    if not _is_written(shape, folder):
        err.print(notice(f"{model}, random weights", weight_bytes(shape), folder), style="dim", markup=False)
        write_checkpoint(shape, folder)
    return folder.resolve()


def weight_bytes(shape: CheckpointShape) -> int:
    """Bytes of the weights in bf16."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = shape.hidden * (2 * q + 2 * kv + 3 * shape.mlp * max(1, shape.experts) + shape.experts)
    return 2 * (2 * shape.vocab * shape.hidden + shape.layers * layer)


def _is_written(shape: CheckpointShape, folder: Path) -> bool:
    """config.json is written last, and says whether an earlier version made other sizes under this name."""
    try:
        return bool(json.loads((folder / "config.json").read_text()) == _config(shape))
    except (OSError, ValueError):
        return False


def write_checkpoint(shape: CheckpointShape, folder: Path, seed: int = 0) -> Path:
    """Writes config.json and bf16 weights of the shape into `folder` (no tokenizer); returns the folder."""
    import torch
    from safetensors.torch import save_file

    g = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=g) * columns**-0.5).bfloat16()

    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {"model.embed_tokens.weight": matrix(shape.vocab, shape.hidden)}
    weights |= {
        "lm_head.weight": matrix(shape.vocab, shape.hidden),
        "model.norm.weight": torch.ones(shape.hidden).bfloat16(),
    }
    for layer in range(shape.layers):
        sizes = {
            "self_attn.q_proj": (q, shape.hidden), "self_attn.k_proj": (kv, shape.hidden),
            "self_attn.v_proj": (kv, shape.hidden), "self_attn.o_proj": (shape.hidden, q),
        }  # fmt: skip
        sizes |= {"mlp.gate": (shape.experts, shape.hidden)} if shape.experts else {}
        for mlp in [f"mlp.experts.{e}" for e in range(shape.experts)] or ["mlp"]:
            sizes |= {f"{mlp}.{name}_proj": (shape.mlp, shape.hidden) for name in ("gate", "up")}
            sizes |= {f"{mlp}.down_proj": (shape.hidden, shape.mlp)}
        weights |= {f"model.layers.{layer}.{name}.weight": matrix(*size) for name, size in sizes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(shape.hidden).bfloat16()
        for name in ("q_norm", "k_norm") if shape.experts else ():
            weights[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.ones(shape.head_dim).bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=1))
    return folder


def _config(shape: CheckpointShape) -> dict[str, object]:
    name, kind = ("Qwen3MoeForCausalLM", "qwen3_moe") if shape.experts else ("LlamaForCausalLM", "llama")
    experts = {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.chosen,
        "moe_intermediate_size": shape.mlp,
        "norm_topk_prob": True,
    }
    return (experts if shape.experts else {}) | {
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
