"""Long contexts on a GPU, in Triton's interpreter: pools of more than 2**31 elements, and positions up to 2**20.

A pool is a mapping whose pages nobody touches but those of a few chunks. Kernels know its first element alone, so the
interpreter, which copies what it is given, is given the first chunk.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has the same kernels, compiled", allow_module_level=True)

from headrace.attention.plan import Span, build
from headrace.kernels import ops, reference
from headrace.kernels.records import Mask, Pool, QKRotary
from headrace.kernels.triton import backend, kept_rows, rotary
from headrace.types import CHUNK
from tests.support.small_gpu_engines import force

HEADS, KV_HEADS, DIM = 2, 1, 16
FAR = (1 << 31) // (KV_HEADS * DIM * CHUNK) + 1
"""A slot whose keys begin behind 2**31 elements; those of the scales of int8 lie at 2**27."""
NORESERVE = 0x4000
"""MAP_NORESERVE, by its number on Linux: memory that is not touched is not asked for."""
CHUNKS = 3
MILLION = 1 << 20


class FarMemory:
    """Tensors of FAR + CHUNKS slots, of which kernels get the first, and tests see the last. As much memory lies before
    them, so that a place of 32 bits, which is negative there, fails a test and does not end it."""

    def __init__(self) -> None:
        self.lasts: list[Tensor] = []

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        _, *chunk = shape
        count = int(np.prod(chunk))
        size = (FAR + CHUNKS) * count * dtype.itemsize
        mapping = mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
        view = partial(torch.frombuffer, mapping, dtype=dtype)
        self.lasts.append(view(count=CHUNKS * count, offset=size + FAR * count * dtype.itemsize).view(CHUNKS, *chunk))
        return view(count=count, offset=size).view(1, *chunk)


def pools(dtype: torch.dtype) -> tuple[Pool, Pool, Pool]:
    """One whose chunks lie far away, those chunks, and a small one."""
    memory = FarMemory()
    far = Pool.make(FAR + CHUNKS, KV_HEADS, DIM, dtype, memory)
    small = Pool.make(CHUNKS, KV_HEADS, DIM, dtype, lambda shape, kind: torch.zeros(tuple(shape), dtype=kind))
    return far, Pool(*memory.lasts), small


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def places(length: int, first: int) -> tuple[Tensor, Tensor]:
    """Slots and offsets of so many keys, from slot `first` on."""
    keys = torch.arange(length, dtype=torch.int32)
    return first + keys // CHUNK, keys % CHUNK


@pytest.fixture(params=["flash", "split"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces one of the two ways."""
    force(request.param, monkeypatch)
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.int8, marks=pytest.mark.matrix)], ids=str)
def test_attention_at_the_far_end_of_a_pool(dtype: torch.dtype, way: str) -> None:
    """What is stored lies there, and is attended there: the bits of a small pool. Rows stand a million keys later,
    and see 100 through a window, by tables whose other chunks are never met."""
    far, last, near = pools(dtype)
    length = 2 * CHUNK + 10
    k, v = drawn(length, KV_HEADS, DIM, seed=2), drawn(length, KV_HEADS, DIM, seed=3)
    for pool, first in ((far, FAR), (near, 0)):
        backend.append(pool, k, v, *places(length, first))
    for ours, small in zip(last.tensors, near.tensors, strict=True):
        assert small.any() and torch.equal(ours, small)
    q = drawn(3, HEADS, DIM)
    for start in (length - 3, MILLION - CHUNK + 10 - 3):
        found = [attended(pool, first, q, start, backend) for pool, first in ((far, FAR), (near, 0))]
        assert torch.equal(*found)
        assert (found[0] - attended(near, 0, q, start, reference)).abs().max() < 1e-5


def attended(pool: Pool, first: int, q: Tensor, start: int, kernels: Any) -> Tensor:
    """Attention of q [3, Hq, D] at position `start` and on, over the keys stored in the chunks from slot `first` on."""
    chunks = (start + 3) // CHUNK + 1
    table = np.full(chunks, first, dtype=np.int32)
    table[-CHUNKS:] = np.arange(first, first + CHUNKS)
    plan = build([Span(table, start, len(q))])
    items, positions = torch.from_numpy(plan.items_within(100)), torch.from_numpy(plan.positions)
    return kernels.attend(q, pool, Mask(items, positions, window=100, scale=DIM**-0.5))


def test_heads_and_activations_stored_far_away() -> None:
    """Rotated keys and values, and what enters a layer."""
    far, last, near = pools(torch.float32)
    how = QKRotary(ops.rotated_heads, HEADS, KV_HEADS, drawn(4, DIM, seed=4))
    heads = drawn(4, HEADS + 2 * KV_HEADS, DIM)
    for pool, first in ((far, FAR), (near, 0)):
        slots, offsets = (each[60:64] for each in places(CHUNK, first + 2))
        rotary.rotate_and_store(heads, how, pool, slots.contiguous(), offsets.contiguous())
    for ours, small in zip(last.tensors, near.tensors, strict=True):
        assert small.any() and torch.equal(ours, small)
    memory, x = FarMemory(), drawn(2, DIM)
    kept_rows.keep_rows(memory((FAR, CHUNK, DIM), torch.float32), x, *(each[:2] for each in places(2, FAR + 1)))
    assert torch.equal(memory.lasts[0][1, :2], x) and not memory.lasts[0][0].any()
