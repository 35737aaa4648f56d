"""Memory outside the fast one, where the slots of a KV pool lie when decoding streams them: host memory, or one file.

Hk: KV heads, D: head size, H: hidden size. The tensors are those of kv.storage.KVStorage, and X: the residual stream as
it enters each layer, from which K and V can be projected again (KVPR, equation (7)).
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace import memory
from headrace.config import AttentionSpec
from headrace.kernels.records import Allocate, Pool
from headrace.kv.storage import KVStorage
from headrace.types import CHUNK

PAGE = 4096


class FileMemory:
    """Tensors in one file without a name, in `folder`, mapped: the system keeps what is in use in memory and the rest
    on disk. The file takes its whole size at once; ValueError where the disk has not that much."""

    def __init__(self, folder: str, size: int) -> None:
        self.size = max(PAGE, size)
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, self.size)
                self._map = mmap.mmap(file.fileno(), self.size)
        except OSError as error:
            raise ValueError(
                f"kv_offload_path {folder}: no file of {self.size / 2**30:.2f} GiB there ({error.strerror}); "
                f"lower kv_offload_disk_size or name another directory"
            ) from None
        self._used = 0

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        begin, self._used = self._used, self._used + room(count * dtype.itemsize)
        if self._used > self.size:
            raise ValueError(f"the file holds {self.size} bytes, {self._used} were asked for")
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=begin).view(*shape)


def room(size: int) -> int:
    """Bytes that a tensor of `size` bytes takes in a FileMemory."""
    return -(-max(1, size) // PAGE) * PAGE


class OutsideStore:
    """K, V (with scales where they are int8) and, if kept, X of `slots` chunks, by layer; rows of `rows` type.

    x [slots, 64, H] per layer; empty where `hidden` is 0; of x_turns tensor ranks, which keep chunks in turn, each has
    room for its own. The fast memory may hold X alone (x_memory).
    """

    def __init__(
        self,
        spec: AttentionSpec,
        slots: int,
        dtype: torch.dtype,
        rows: torch.dtype,
        hidden: int = 0,
        allocate: Allocate = memory.zeros,
        x_memory: Allocate | None = None,
        x_turns: int = 1,
    ) -> None:
        self.slots, self.dtype, self.rows, self.hidden = slots, dtype, rows, hidden
        sizes = spec.kv_heads, spec.head_dim, dtype
        self.pools = [Pool.make(slots, *sizes, allocate, spec.once) for _ in range(spec.layers)]
        place = x_memory or allocate
        kept = -(-slots // x_turns)
        self.x = [place((kept, CHUNK, hidden), rows) for _ in range(spec.layers)] if hidden else []

    def prefault(self) -> None:
        """Writes zeros everywhere, so that the system maps all of the memory now."""
        for tensor in (*self.x, *(tensor for pool in self.pools for tensor in pool.tensors)):
            tensor.zero_()

    @property
    def chunk_bytes(self) -> int:
        """Bytes of K and V of one chunk of one layer, scales included."""
        return sum(tensor.nbytes for tensor in self.pools[0].tensors) // max(1, self.slots)

    @property
    def x_bytes(self) -> int:
        """Bytes of X of one chunk of one layer."""
        return CHUNK * self.hidden * self.rows.itemsize


def bytes_per_chunk(spec: AttentionSpec, dtype: torch.dtype, rows: torch.dtype, hidden: int) -> int:
    """Bytes of K, V and X of one chunk over all layers."""
    kv = KVStorage.bytes_per_token(spec, dtype) * CHUNK
    return kv + spec.layers * CHUNK * hidden * rows.itemsize
