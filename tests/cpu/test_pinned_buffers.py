"""Buffers of the host tier for a GPU: slabs of one size, used again, given up for another size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from headrace.offload.tiers import pinned
from headrace.offload.tiers.pinned import PinnedBuffers
from tests.support.fake_device import FakeDevice


class Counting(FakeDevice):
    """Notes what it pins, of which it has no more than 8 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        found = super().pinned(shape, dtype)
        if found.nbytes > 8192:
            raise RuntimeError("out of memory")
        self.asked.append(found.nbytes)
        return found


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Counting:
    monkeypatch.setattr(pinned, "SLAB", 4096)
    return Counting()


def test_buffers_of_a_size_share_a_slab(device: Counting) -> None:
    buffers = PinnedBuffers(device)
    held = [buffers(1024) for _ in range(5)]
    assert device.asked == [4096, 4096] and buffers.bytes == 8192
    for number, each in enumerate(held):
        each[:] = number
    assert [set(each.tolist()) for each in held] == [{number} for number in range(5)], "they do not overlap"


def test_what_is_lent_on_keeps_its_place(device: Counting) -> None:
    """A buffer goes back to its slab when nobody has it or a part of it."""
    buffers = PinnedBuffers(device)
    held = [buffers(1024) for _ in range(4)]
    part = held.pop().data[5:7]
    buffers(1024)
    assert len(device.asked) == 2
    del part
    held.append(buffers(1024)), held.append(buffers(1024))
    assert len(device.asked) == 2


def test_an_unused_slab_goes_for_another_size(device: Counting) -> None:
    buffers = PinnedBuffers(device)
    held = [buffers(1024), buffers(1500)]
    assert buffers.bytes == 4096 + 2 * 1500
    del held[0]
    held += [buffers(1500), buffers(1500)]
    assert buffers.bytes == 4 * 1500


def test_a_buffer_may_be_larger_than_a_slab(device: Counting) -> None:
    assert len(PinnedBuffers(device)(5000)) == 5000


def test_no_memory_left(device: Counting) -> None:
    with pytest.raises(MemoryError, match="10000 bytes of pinned memory"):
        PinnedBuffers(device)(10000)
