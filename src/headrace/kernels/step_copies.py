"""What the host and a device tell each other at each step, by copies beside which both go on.

Each kind of copy has two pinned places that take turns: while the device may still be at one, the host is at the other.
So the host must have waited for a step (Reading.wait) before it gives the device the step after the next one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.device import Device, Event


class Reading(NamedTuple):
    """Results on their way to the host. `host` holds them behind `wait`, until the reading after the next is begun."""

    host: Tensor
    over: Event

    def wait(self) -> Tensor:
        """Waits for the copy, and so for all that its stream was given before it."""
        self.over.synchronize()
        return self.host


class ReadBack:
    """Results of up to `size` elements."""

    def __init__(self, size: int, dtype: torch.dtype, device: Device) -> None:
        self._rooms = [Reading(device.pinned((size,), dtype), device.event()) for _ in range(2)]

    def begin(self, there: Tensor) -> Reading:
        """Copies what lies on the device, in the order of the current stream."""
        self._rooms.reverse()
        room, over = self._rooms[0]
        host = room[: there.numel()].view(there.shape)
        copy(host, there)
        over.record()
        return Reading(host, over)


class Sending:
    """Index data of `shape` that the host writes for each step."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: Device) -> None:
        self._rooms = [device.pinned(shape, dtype) for _ in range(2)]

    def send(self, values: Tensor, there: Tensor) -> None:
        """Copies values, which may change at once, to the beginning of `there`, in the order of the current stream."""
        self._rooms.reverse()
        room = self._rooms[0][: len(values)]
        fill(room, values)
        copy(there[: len(values)], room)


class Uploads:
    """What is copied now and then, not by each step: up to `size` bytes, through four pinned places in turn. Where the
    copy that a place was used for is still under way, the host waits for it."""

    def __init__(self, size: int, device: Device) -> None:
        self._rooms = [(device.pinned((size,), torch.uint8), device.event()) for _ in range(4)]

    def send(self, values: Tensor, there: Tensor) -> None:
        """Copies values, which may change at once, to the beginning of `there`, in the order of the current stream."""
        self._rooms.append(self._rooms.pop(0))
        room, over = self._rooms[0]
        over.synchronize()
        held = room[: values.nbytes].view(values.dtype)
        fill(held, values)
        copy(there[: len(values)], held)
        over.record()


@torch.inference_mode()
def copy(into: Tensor, source: Tensor) -> None:
    """In the order of the current stream; the host goes on."""
    into.copy_(source, non_blocking=True)


def fill(room: Tensor, values: Tensor) -> None:
    """Done by the host, not the device."""
    room.numpy()[:] = values.numpy()
