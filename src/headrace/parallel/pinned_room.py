"""Pinned memory of the host that messages of a device pass through, taken and given back."""

from __future__ import annotations

import threading
from collections import defaultdict

import torch
from torch import Tensor

from headrace.device import Device

LEAST = 4096


class PinnedRoom:
    """Buffers whose sizes are powers of two, used again once they are given back: to pin memory takes milliseconds. It
    grows to what is under way at a time at most. Calls may come from several threads."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, size: int) -> Tensor:
        """uint8, of `size` bytes or more."""
        whole = max(LEAST, 1 << (size - 1).bit_length())
        with self._lock:
            if self._free[whole]:
                return self._free[whole].pop()
        return self._device.pinned((whole,), torch.uint8)

    def give(self, buffer: Tensor) -> None:
        """Takes a whole buffer back, which nobody reads or writes any more."""
        with self._lock:
            self._free[buffer.numel()].append(buffer)
