"""Checkpoints with a classifier's head."""

from __future__ import annotations

from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification


def classifier(folder: Path, into: Path, labels: int, dtype: torch.dtype = torch.float32) -> Path:
    """The checkpoint of a language model with a random classifier in place of its head, and its tokenizer."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=labels, dtype=torch.float32)
    with torch.no_grad():
        noise = torch.randn(model.score.weight.shape, generator=torch.Generator().manual_seed(2))
        model.score.weight.copy_((0.3 * noise).bfloat16())
    model.to(dtype).save_pretrained(into)
    for file in folder.glob("tokenizer*"):
        copyfile(file, into / file.name)
    return into
