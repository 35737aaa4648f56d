"""What transports of a device's tensors have in common: transfers that end on a stream, and bytes of tensors.

A transfer is handed over by a thread and ends with an event. `wait` has the caller's current stream wait for that: what
is computed after it reads what came, or may write where it was sent from. The host waits no longer than until the
transfer is handed over.
"""

from __future__ import annotations

import threading
import time

from torch import Tensor

from headrace.device import Device, Event
from headrace.parallel.transport import RankLost, Traffic


class DeviceTransfer:
    """A Transfer (parallel.transport). `x` is kept until it is over, so that nobody else is given its memory.

    begun: behind what used x before, by default all that the current stream was given; over: behind the copy or the
    message itself. relayed: what carries on what was received, set before it is handed over.
    """

    def __init__(self, device: Device, traffic: Traffic, x: Tensor, begun: Event | None = None) -> None:
        self._device, self._traffic, self.x = device, traffic, x
        self.begun, self.over = begun or device.event(blocking=True), device.event(blocking=True)
        if begun is None:
            self.begun.record(device.current_stream())
        self.relayed: DeviceTransfer | None = None
        self._handed = threading.Event()
        self._error: str | None = None

    def hand_over(self, error: str | None = None) -> None:
        """`over` is recorded; or the message is lost, and why."""
        self._error = self._error or error
        self._handed.set()

    @property
    def done(self) -> bool:
        return self._handed.is_set() and (self._error is not None or self.over.query())

    def wait_handed(self) -> None:
        """Until it is handed over, whenever it is over. Raises RankLost."""
        if not self._handed.is_set():
            began = time.perf_counter()
            self._handed.wait()
            self._traffic.wait_s += time.perf_counter() - began
        if self._error is not None:
            raise RankLost(self._error)

    def wait(self) -> None:
        self.wait_handed()
        self._device.current_stream().wait_event(self.over)

    def drain(self) -> None:
        self.wait()
        if self.relayed is not None:
            self.relayed.wait()
