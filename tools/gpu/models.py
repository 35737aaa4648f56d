"""Models of drawn weights on a GPU, ours and transformers', made on the device: no file of theirs is ever written."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from headrace import LLM
from headrace.bench.shapes import SHAPES, CheckpointShape, write_outline
from headrace.engine import loader
from headrace.models.config import read_config
from headrace.models.decoder import Decoder
from headrace.models.slots import expected

MODELS = {
    "S1": SHAPES["S1"],
    "7B": CheckpointShape(hidden=4096, layers=32, heads=32, kv_heads=32, head_dim=128, mlp=11008),
    "8B": CheckpointShape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, mlp=14336, vocab=128_256),
}
"""7B: Llama-2-7B; 8B: Llama-3-8B, but for their contexts and rotations."""

USUAL: dict[str, Any] = {
    "attention_backend": "triton",
    "dtype": "bfloat16",
    "kv_cache_tokens": 40_960,
    "max_sequences": 64,
}
"""Settings of an engine, where none are given."""


def drawn_decoder(folder: Path, device: torch.device, seed: int = 0) -> Decoder:
    """The model of config.json with weights drawn on the device in bf16, norms of ones."""
    config = read_config(folder)
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, slot in expected(config).items():
        shape = slot.shape(sum(slot.parts))
        if slot.columns is None:
            weights[name] = torch.ones(shape, dtype=torch.bfloat16, device=device)
            continue
        weights[name] = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
        weights[name] *= slot.columns**-0.5
    return Decoder(config, weights)


@dataclass
class DrawnModel:
    """A model whose weights all its engines share. folder: config.json, and weights that are said to be there."""

    folder: Path
    decoder: Decoder

    def engine(self, **settings: Any) -> LLM:
        """An engine of these weights on the GPU. Settings are those of EngineConfig."""
        with patch.object(loader, "load_decoder", lambda *args, **kwargs: self.decoder):
            return LLM(str(self.folder), **{**USUAL, **settings})


@cache
def _folders() -> tempfile.TemporaryDirectory[str]:
    """Of what is drawn, as long as the process lives."""
    return tempfile.TemporaryDirectory(prefix="headrace-gpu-")


def drawn_model(shape: CheckpointShape, device: torch.device, folder: Path | None = None) -> DrawnModel:
    """Draws the weights. folder: takes config.json; a temporary one, if it is not given."""
    made = write_outline(shape, folder or Path(tempfile.mkdtemp(dir=_folders().name)))
    return DrawnModel(made, drawn_decoder(made, device))


def transformers_model(shape: CheckpointShape, device: torch.device) -> Any:
    """The same model of transformers, sdpa attention, bf16, with weights of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.from_pretrained(write_outline(shape, Path(folder)))
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval()
