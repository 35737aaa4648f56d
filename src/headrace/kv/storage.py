"""The pool's memory: keys and values of every layer behind the slots. And that of recurrent states, behind theirs.

Hk: KV heads, D: head size. Plainly, keys lie as [slots, Hk, D, 64] and values as [slots, Hk, 64, D]: scores then
vectorise over the keys of a chunk and outputs over the head, with no sum across a vector. A kernel may arrange the
elements of a chunk and head otherwise (kernels.records.Layout); nobody but append and attend looks inside. Stored as
int8, each key and each value has a scale of its own per head and layer: [slots, Hk, 64].
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.config import AttentionSpec, RecurrentSpec
from headrace.kernels.records import Allocate, LayerStates, Pool
from headrace.memory import zeros
from headrace.types import CHUNK

LAYOUT = "chunk64-dk-kd-1"
"""Name of the plain layout; part of a chunk's identity."""


class LayerPools(Protocol):
    """Where a step's keys and values lie: a pool of `slots` chunks for each layer, of one type."""

    slots: int
    dtype: torch.dtype

    def pool(self, layer: int) -> Pool: ...


class KVStorage(LayerPools):
    """Memory for `slots` chunks of a model. Untouched slots cost no physical memory.

    dtype: bfloat16, float32, or int8, which has scales. pools: one for each layer that has keys and values of its own.
    With `hidden`, the model's hidden size H, activations are kept as well: x, [slots, 64, H] per layer in x_dtype, the
    type computed in. Otherwise x is None. device: where all of it lies; the CPU, if it is not given.
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
        new = zeros_on(device)
        self.pools = [Pool.make(slots, *spec.shape(layer), dtype, new, spec.once) for layer in range(spec.stored)]
        self._source = spec.source
        self.x: list[Tensor] | None = None
        if hidden is not None:
            self.x = [new((slots, CHUNK, hidden), _computed(x_dtype)) for _ in range(spec.stored)]
        self._bytes: list[NDArray[np.uint8]] | None = None

    def pool(self, layer: int) -> Pool:
        return self.pools[self._source(layer)]

    def split(self, parts: int) -> KVStorage:
        """The same memory with `parts` slots for each, of as many heads less: slot s has the first heads of its K and V
        in slot s * parts, the last in s * parts + parts - 1. Activations stay in slot s."""
        found = copy.copy(self)
        found.slots, found._bytes = self.slots * parts, None
        found.pools = [Pool.of([_split(each, parts) for each in pool.tensors], pool.once) for pool in self.pools]
        return found

    @property
    def keeps_activations(self) -> bool:
        return self.x is not None

    @property
    def _tensors(self) -> list[Tensor]:
        return [*(tensor for pool in self.pools for tensor in pool.tensors), *(self.x or ())]

    def copy(self, source: int, target: int) -> None:
        """Chunk `target` has what chunk `source` has, in all layers; on the CPU."""
        if self._bytes is None:  # numpy copies a small stretch in half the time that torch takes
            self._bytes = [each.view(self.slots, -1).view(torch.uint8).numpy() for each in self._tensors]
        for each in self._bytes:
            each[target] = each[source]

    def prefault(self) -> None:
        """Writes zeros everywhere, so that the system maps all of the memory now."""
        for each in self._tensors:
            each.zero_()

    @staticmethod
    def bytes_per_token(
        spec: AttentionSpec, dtype: torch.dtype, hidden: int | None = None, x_dtype: torch.dtype | None = None
    ) -> int:
        """Bytes of one token over all layers: K and V, scales included, and activations if kept."""
        scales = spec.vectors_per_token() * 4 if dtype == torch.int8 else 0
        activations = 0 if hidden is None else spec.stored * hidden * _computed(x_dtype).itemsize
        return spec.kv_bytes_per_token(dtype.itemsize) + scales + activations


class StateStorage:
    """`slots` states of all recurrent layers of a model that computes in `dtype`. Untouched slots cost no memory of a
    CPU's. device: where all of them lie; the CPU, if it is not given."""

    def __init__(self, spec: RecurrentSpec, slots: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
        self.spec, self.slots, self.dtype = spec, slots, dtype
        last = (slots, spec.kernel - 1, spec.channels)
        matrices = (slots, spec.value_heads, spec.key_dim, spec.value_dim)
        new = zeros_on(device)
        self.layers = [LayerStates(new(last, dtype), new(matrices, torch.float32)) for _ in range(spec.layers)]

    def prefault(self) -> None:
        """Writes zeros everywhere, so that the system maps all of the memory now."""
        for layer in self.layers:
            layer.last.zero_()
            layer.matrices.zero_()


def _split(x: Tensor, parts: int) -> Tensor:
    """[slots, Hk, ...] -> [slots * parts, Hk / parts, ...]."""
    return x.view(x.shape[0] * parts, x.shape[1] // parts, *x.shape[2:])


def zeros_on(device: torch.device | None) -> Allocate:
    """How memory for keys and values is made on a device; None: the CPU."""
    return zeros if device is None or device.type == "cpu" else partial(_zeros_on, device)


def _zeros_on(device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _computed(dtype: torch.dtype | None) -> torch.dtype:
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"activations are kept in the type computed in, bfloat16 or float32, not {dtype}")
    return dtype
