"""What a rank has streamed since its start: counted where it moves, told as figures of the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.stats import StreamStats
from headrace.types import CHUNK


@dataclass(slots=True)
class StreamingTotals:
    """Of the steps so far: chunks of all layers loaded and projected, bytes in and out, seconds predicted, spent, and
    spent waiting for what comes in."""

    steps: int = 0
    loaded: int = 0
    projected: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    predicted_s: float = 0.0
    seconds: float = 0.0
    waited_s: float = 0.0

    def copy(self) -> StreamingTotals:
        return replace(self)

    def told(self, schedule: str, layers: int) -> StreamStats:
        """As figures of an engine. Tokens are means over the layers, which windows may make differ."""
        return StreamStats(
            steps={schedule: self.steps},
            loaded_tokens=self.loaded * CHUNK // layers,
            projected_tokens=self.projected * CHUNK // layers,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            seconds=self.seconds,
            waited_s=self.waited_s,
        )
