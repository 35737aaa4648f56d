"""GGUF files of metadata, with the one tensor without which nothing is read. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter

LLAMA: Mapping[str, Any] = {
    "block_count": 2, "context_length": 512, "embedding_length": 64, "feed_forward_length": 128,
    "attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
"""What files of most architectures say."""


def write_metadata(
    path: Path,
    said: Mapping[str, Any],
    architecture: str = "llama",
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """said: keys of the architecture, beside LLAMA's and in their place; those that begin with a dot are whole keys
    behind it."""
    writer = GGUFWriter(str(path), architecture)
    for key, value in {**LLAMA, **said}.items():
        whole = key[1:] if key.startswith(".") else f"{architecture}.{key}"
        kind = GGUFValueType.get_type(value)
        large = kind == GGUFValueType.INT32 and value >> 31 > 0
        writer.add_key_value(whole, value, GGUFValueType.UINT32 if large else kind)
    for name, tensor in {"token_embd.weight": np.zeros((8, 64), np.float32), **(tensors or {})}.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
