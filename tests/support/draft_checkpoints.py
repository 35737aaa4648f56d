"""Draft models for the shipped one: itself with noise in its weights, and random ones of other families."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

from headrace.engine.folders import SHIPPED

VOCAB = 2304
"""Tokens of the shipped model."""
SIZES = dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=2048)


def noisy(folder: Path, noise: float = 0.15) -> Path:
    """The shipped model, right at times: each weight with so much noise, as a part of its matrix's own spread."""
    shutil.copytree(SHIPPED["tiny"], folder, dirs_exist_ok=True)
    g = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    for name, w in weights.items():
        spread = torch.randn(w.shape, generator=g) * w.float().std().nan_to_num()
        weights[name] = (w.float() + noise * spread).to(w.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_draft(family: str, folder: Path, **fields: int) -> Path:
    """A random model of the shipped one's vocabulary, or of another size, without a tokenizer."""
    torch.manual_seed(0)
    sizes = SIZES | fields
    made: PreTrainedModel
    if family == "opt":
        made = OPTForCausalLM(OPTConfig(ffn_dim=96, **sizes))
    else:
        made = LlamaForCausalLM(LlamaConfig(intermediate_size=96, **sizes))
    made.to(torch.bfloat16).save_pretrained(folder)
    return folder
