"""Checkpoints that are read, copied with other names, and compared."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from headrace.models.decoder import Decoder
from tests.support.naive_attention import prompt_logits

TOKENS = [5, 17, 300, 2, 44, 8]
SINGLE = "model.safetensors"


def same(one: Decoder, other: Decoder) -> bool:
    return torch.equal(prompt_logits(one, TOKENS), prompt_logits(other, TOKENS))


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def rename(folder: Path, change: Any) -> None:
    """Rewrites the tensors of a folder as change(tensors) says."""
    save_file(change(load_file(folder / SINGLE)), folder / SINGLE)
