"""The pool's memory: keys and values of every layer behind the slots.

Hk: KV heads, D: head size. Naturally, keys lie as [slots, Hk, D, 64] and values as [slots, Hk, 64, D]: scores then
vectorise over the keys of a chunk and outputs over the head, with no sum across a vector. A kernel may arrange the
elements of a chunk and head otherwise (kernels.cpu.layout); nobody but append and attend looks inside. Stored as int8,
each key and each value has a scale of its own per head and layer: [slots, Hk, 64].
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from headrace.config import AttentionSpec
from headrace.memory import zeros
from headrace.types import CHUNK

LAYOUT = "chunk64-dk-kd-1"
"""Name of the natural layout; part of a chunk's identity."""


class KVStorage:
    """Memory for `slots` chunks of a model. Untouched slots cost no physical memory.

    dtype: bfloat16, float32, or int8, which has scales (k_scale, v_scale: fp32 per layer, else None). With `hidden`,
    the model's hidden size H, activations are kept as well: x, [slots, 64, H] per layer in x_dtype, the type computed
    in. Otherwise x is None. device: of keys and values; the CPU, if it is not given.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        slots: int,
        dtype: torch.dtype,
        hidden: int | None = None,
        x_dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        if dtype not in (torch.bfloat16, torch.float32, torch.int8):
            raise ValueError(f"KV is stored as bfloat16, float32 or int8, not {dtype}")
        self.slots = slots
        self.dtype = dtype
        on_cpu = device is None or device.type == "cpu"
        new = zeros if on_cpu else partial(torch.zeros, device=device)
        self.k = [new((slots, spec.kv_heads, spec.head_dim, CHUNK), dtype=dtype) for _ in range(spec.layers)]
        self.v = [new((slots, spec.kv_heads, CHUNK, spec.head_dim), dtype=dtype) for _ in range(spec.layers)]
        self.k_scale, self.v_scale = ([self._scales(spec) for _ in range(spec.layers)] for _ in range(2))
        self.x: list[Tensor] | None = None
        if hidden is not None:
            self.x = [zeros((slots, CHUNK, hidden), _computed(x_dtype)) for _ in range(spec.layers)]

    def _scales(self, spec: AttentionSpec) -> Tensor | None:
        return zeros((self.slots, spec.kv_heads, CHUNK), torch.float32) if self.dtype == torch.int8 else None

    @property
    def keeps_activations(self) -> bool:
        return self.x is not None

    def prefault(self) -> None:
        """Writes zeros everywhere, so that the system maps all of the memory now."""
        for each in (*self.k, *self.v, *self.k_scale, *self.v_scale, *(self.x or ())):
            if each is not None:
                each.zero_()

    @staticmethod
    def bytes_per_token(
        spec: AttentionSpec, dtype: torch.dtype, hidden: int | None = None, x_dtype: torch.dtype | None = None
    ) -> int:
        """Bytes of one token over all layers: K and V, scales included, and activations if kept."""
        scales = 2 * spec.layers * spec.kv_heads * 4 if dtype == torch.int8 else 0
        activations = 0 if hidden is None else spec.layers * hidden * _computed(x_dtype).itemsize
        return spec.kv_bytes_per_token(dtype.itemsize) + scales + activations


def _computed(dtype: torch.dtype | None) -> torch.dtype:
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"activations are kept in the type computed in, bfloat16 or float32, not {dtype}")
    return dtype
