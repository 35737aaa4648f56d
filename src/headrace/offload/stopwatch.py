"""The time that work takes where it is done: a device is told to do it, and does it later."""

from __future__ import annotations

import time

from headrace.device import Device


class Stopwatch:
    """Begins now, on the current stream of a device, or (None) on the host."""

    def __init__(self, device: Device | None = None) -> None:
        self._device, self._seconds, self._began_s = device, 0.0, time.perf_counter()
        if device is not None:
            self._began, self._ended = device.event(timing=True), device.event(timing=True, blocking=True)
            self._began.record(device.current_stream())

    def stop(self) -> None:
        """What the current stream was given up to now counts."""
        self._seconds = time.perf_counter() - self._began_s
        if self._device is not None:
            self._ended.record(self._device.current_stream())

    def seconds(self) -> float:
        """Between begin and stop; waits until the device has come so far."""
        if self._device is None:
            return self._seconds
        self._ended.synchronize()
        return self._began.elapsed_time(self._ended) / 1e3
