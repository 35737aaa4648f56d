"""Buffers of the host tier in pinned memory, from which a GPU's copies run beside its kernels.

Pinning takes a call of the driver, 0.2 ms for each MiB: it is done for a slab of many buffers of one size at a time.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field

import torch

from headrace.device import Device
from headrace.offload.tiers.host import HostBuffer

SLAB = 64 << 20
"""Bytes of a slab, unless one buffer takes more."""


@dataclass(slots=True, eq=False)
class _Slab:
    """pieces: how many; free: those that no buffer is made of."""

    pieces: int
    free: list[HostBuffer] = field(default_factory=list)


class PinnedBuffers:
    """Gives buffers (HostTier, allocate). One that is not used any more goes back to its slab; a slab of which none is
    used is given up when memory is wanted for another size. May be called by several threads."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slabs: dict[int, list[_Slab]] = {}
        self._lock = threading.RLock()  # buffers may go while it is held

    def __call__(self, size: int) -> HostBuffer:
        """Raises MemoryError."""
        with self._lock:
            slab = next((each for each in self._slabs.get(size, ()) if each.free), None) or self._grown(size)
            piece = slab.free.pop()
        buffer = piece[:]
        weakref.finalize(buffer, slab.free.append, piece).atexit = False
        return buffer

    def _grown(self, size: int) -> _Slab:
        for slabs in self._slabs.values():
            slabs[:] = [each for each in slabs if len(each.free) < each.pieces]
        pieces = max(1, SLAB // size)
        try:
            memory = self._device.pinned((pieces, size), torch.uint8).numpy()
        except RuntimeError as error:
            raise MemoryError(f"{pieces * size} bytes of pinned memory: {error}") from None
        slab = _Slab(pieces, list(memory))
        self._slabs.setdefault(size, []).append(slab)
        return slab

    @property
    def bytes(self) -> int:
        """Of all slabs."""
        with self._lock:
            return sum(size * each.pieces for size, slabs in self._slabs.items() for each in slabs)
