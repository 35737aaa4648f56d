"""A link as slow as one likes, between the engine's memory and where KV and weights are kept. For experiments."""

from __future__ import annotations

import time


class EmulatedLink:
    """A link between two memories: a transfer of n bytes takes at least latency_s + n / bytes_s, one after the other.

    bytes_s None: as fast as the machine is. Waits by sleeping, so that nothing is taken from the computation.
    """

    def __init__(self, bytes_s: float | None = None, latency_s: float = 0.0) -> None:
        if (bytes_s is not None and not bytes_s > 0) or not latency_s >= 0:
            raise ValueError(f"a link needs bytes_s above 0 and latency_s of at least 0, got {bytes_s}, {latency_s}")
        self.bytes_s, self.latency_s = bytes_s, latency_s
        self._free = 0.0

    @property
    def slow(self) -> bool:
        """Whether it makes transfers wait."""
        return self.bytes_s is not None or self.latency_s > 0

    def twin(self) -> EmulatedLink:
        """Another link like this one, with nothing on it: the way back."""
        return EmulatedLink(self.bytes_s, self.latency_s)

    def carried(self, size: int, began: float) -> None:
        """Returns when a transfer of `size` bytes that began at `began` (time.perf_counter) has arrived."""
        taken = self.latency_s + (0.0 if self.bytes_s is None else size / self.bytes_s)
        self._free = max(self._free, began) + taken
        wait = self._free - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
