"""Writes the model's folder in the form that transformers reads."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from .vocab import save_tokenizer

LIMIT = 6_000_000  # bytes, the whole folder
EXPLICIT = ("hidden_act", "tie_word_embeddings", "attention_bias", "mlp_bias", "bos_token_id", "eos_token_id")


def export(model: LlamaForCausalLM, tok: Tokenizer, folder: Path) -> int:
    """Write all files beside the target, then put them in place one by one; the size in bytes is returned."""
    staging = folder.with_name(folder.name + ".new")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    save_tokenizer(tok, staging)
    _save_weights(model, staging / "model.safetensors")
    _save_config(model, staging)
    size = sum(f.stat().st_size for f in staging.iterdir())
    if size > LIMIT:
        raise SystemExit(f"the model folder has {size} bytes, over the limit of {LIMIT}; make the model smaller")
    folder.mkdir(parents=True, exist_ok=True)
    for file in staging.iterdir():
        os.replace(file, folder / file.name)
    staging.rmdir()
    return size


def _save_weights(model: LlamaForCausalLM, path: Path) -> None:
    tensors = {n: t.to(torch.bfloat16).contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def _save_config(model: LlamaForCausalLM, folder: Path) -> None:
    config = model.config.to_diff_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    config |= {name: getattr(model.config, name) for name in EXPLICIT}
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # where readers of the older form look for it
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, value in (("config.json", config), ("generation_config.json", generation | {"do_sample": False})):
        (folder / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
