"""Tensors in memory straight from the system: what a step walks through from end to end, keys, values and weights."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

Mapping = TypeVar("Mapping", bound=mmap.mmap)
HUGE = 2 << 20
"""Bytes of a huge page on most systems, and where one begins."""


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages are mapped when first written (torch.zeros would do so at once), and huge where the system
    allows: reading 4 KB pages costs 5 to 20 % of the bandwidth. From 2 MB on all of them are, the last one too."""
    count = math.prod(shape)
    if not count:
        return torch.empty(*shape, dtype=dtype)
    memory, begin = mapped(max(1, count * dtype.itemsize), mmap.mmap)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin).view(*shape)


def mapped(size: int, kind: type[Mapping]) -> tuple[Mapping, int]:
    """Such a mapping, and where in it `size` bytes begin."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return kind(-1, size), 0
    # A page is huge only where all of it belongs to the mapping, which begins anywhere.
    room = size if size < HUGE else -(-size // HUGE) * HUGE + HUGE
    # Private: shared memory, which is mmap's default, gets no huge pages on most systems.
    memory = kind(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE if size >= HUGE else 0


def copied(x: Tensor) -> Tensor:
    """x in such memory, contiguous."""
    return zeros(x.shape, x.dtype).copy_(x)


def read_ahead(address: int, size: int) -> None:
    """Has the system read pages of a mapped file, without waiting. Advice: without effect where it cannot be given."""
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None and hasattr(mmap, "MADV_WILLNEED"):
        advise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_WILLNEED)


def give_back() -> bool:
    """Returns freed memory that the C library keeps to the system; False where the library cannot (it is not glibc).

    Loading and packing weights leaves some: small blocks in use keep the pages below them in the process.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(0)
    return True
