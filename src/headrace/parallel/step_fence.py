"""Orders what a rank's other threads do with its pool behind the steps that it computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.arrival import Arrival

if TYPE_CHECKING:  # these need torch
    from headrace.device import Device, Event


class StepFence:
    """Steps that a rank was sent, and those that it has computed.

    Rank 0 may have all of a step that it wants while another rank still writes the last layer's keys and values. What
    rank 0 then has stored of that rank's pool, or brought into slots that are free again, comes after the step.

    device: where steps are computed, if not on the CPU. There a step is over on the host when all of it was launched:
    who waits on a stream has that stream wait for the rest.
    """

    def __init__(self, device: Device | None = None) -> None:
        self._device = device
        self._sent = self._computed = 0
        self._ends: dict[int, _StepEnd] = {}
        self._lock = threading.Lock()

    def sent(self) -> None:
        """One more step has come: told in the order in which steps and commands come."""
        with self._lock:
            self._sent += 1

    def computed(self) -> None:
        """One more step has been computed, or has failed. Rank 0 is sent none and waits for none."""
        with self._lock:
            self._computed += 1
            ended = self._ends.pop(self._computed, None)
        if ended is not None:
            ended.launched(self._device)

    def here(self) -> Callable[[], None]:
        """What waits until the steps sent so far are computed, and for none that come later. On a device it has the
        caller's current stream wait."""
        with self._lock:
            if self._computed >= self._sent:
                return lambda: None
            return self._ends.setdefault(self._sent, _StepEnd()).wait


class _StepEnd(Arrival):
    """The end of a step that somebody waits for. over: behind it on the stream that computes; None on the CPU."""

    __slots__ = ("_device", "_over")

    def __init__(self) -> None:
        super().__init__()
        self._device: Device | None = None
        self._over: Event | None = None

    def launched(self, device: Device | None) -> None:
        if device is not None:
            self._device, self._over = device, device.current_stream().record_event()
        self.end()

    def wait(self) -> None:
        super().wait()
        if self._device is not None and self._over is not None:
            self._device.current_stream().wait_event(self._over)
