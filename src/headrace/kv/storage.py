"""The pool's memory: keys and values of every layer behind the slots.

Hk: KV heads, D: head size. Keys lie as [slots, Hk, D, 64] and values as [slots, Hk, 64, D]: scores then vectorise
over the keys of a chunk and outputs over the head, with no sum across a vector. The layout belongs to the kernels
(attention/reference.py and csrc/); nobody else looks inside.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.config import AttentionSpec
from headrace.types import CHUNK

LAYOUT = "chunk64-dk-kd-1"
"""Name of the layout; part of a chunk's identity."""


class KVStorage:
    """Memory for `slots` chunks of a model. Untouched slots cost no physical memory."""

    def __init__(self, spec: AttentionSpec, slots: int, dtype: torch.dtype) -> None:
        self.slots = slots
        self.dtype = dtype
        self.k = [_zeros((slots, spec.kv_heads, spec.head_dim, CHUNK), dtype) for _ in range(spec.layers)]
        self.v = [_zeros((slots, spec.kv_heads, CHUNK, spec.head_dim), dtype) for _ in range(spec.layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros by calloc: pages are mapped when first written, which torch.zeros would do at once."""
    plain = np.uint16 if dtype == torch.bfloat16 else np.uint32
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"KV is stored as bfloat16 or float32, not {dtype}")
    return torch.from_numpy(np.zeros(shape, dtype=plain).view(np.int16 if plain is np.uint16 else np.int32)).view(dtype)
