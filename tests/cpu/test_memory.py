"""Memory straight from the system: zeros, of which large ones begin and end with huge pages."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from headrace.memory import HUGE, copied, give_back, zeros


@pytest.mark.parametrize("count", [1, 1000, HUGE // 4 - 1, HUGE // 4, HUGE + 1])
def test_zeros_that_can_be_written(count: int) -> None:
    x = zeros((count, 1), torch.float32)
    assert x.shape == (count, 1) and not x.any()
    x.fill_(3)
    assert (x == 3).all() and not zeros((count,), torch.float32).any()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages to ask for")
def test_large_ones_begin_with_a_huge_page() -> None:
    kept = [zeros((HUGE // 2 * halves + 8,), torch.uint8) for halves in (2, 3, 5, 7)]
    assert [x.data_ptr() % HUGE for x in kept] == [0] * len(kept)


def test_copies_are_contiguous() -> None:
    x = torch.randn(700, 1500).T
    assert torch.equal(copied(x), x) and copied(x).is_contiguous()


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc: nothing is kept")
def test_freed_memory_goes_back() -> None:
    blocks = [bytearray(60_000) for _ in range(2000)]
    full = resident()
    del blocks[::2]  # between others that stay, so that the library keeps them
    kept = resident()
    assert give_back()
    assert full - kept < 10_000_000 and kept - resident() > 40_000_000
