"""How fast link and arithmetic are while decoding streams: the inputs of streaming.decode_split at each step.

KVPR's profiler measures once, at start; here each transfer, projection and operation counts, by the mean of the latest
(not the median: on a shared machine, operations that now and then take twice as long add to the total).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.offload.streaming.decode_split import LayerCosts, chunks_to_project
from headrace.offload.ticket import Ticket

LATEST = 31
"""Observations that count."""
LEAST_BYTES = 1 << 16
"""Shorter transfers say little about the rate."""


@dataclass(frozen=True, slots=True)
class OperationWork:
    """An operation, one layer over one batch, beside its chunks: rows computed, and bytes in: its slice of the next
    layer's weights, and hidden states."""

    rows: int
    weight_bytes: int = 0
    hidden_bytes: int = 0


class Operation(NamedTuple):
    """Chunks of an operation by how they come, and what it takes beside them."""

    loaded: int
    projected: int
    work: OperationWork


class RecentMean:
    """A figure by its latest observations: their mean without the least and the greatest; 0 before the first."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=LATEST)

    def observe(self, value: float) -> None:
        self._latest.append(value)

    def forget(self) -> None:
        self._latest.clear()

    @property
    def value(self) -> float:
        known = sorted(self._latest)
        return statistics.fmean(known[1:-1] if len(known) > 2 else known) if known else 0.0


@dataclass(slots=True)
class Throughput:
    """kv_bytes, x_bytes: of a chunk of one layer. link: seconds a byte; project: seconds a chunk; rest: seconds of an
    operation beside projecting and waiting, by its rows."""

    kv_bytes: int
    x_bytes: int
    x_resident: bool
    link: RecentMean = field(default_factory=RecentMean)
    project: RecentMean = field(default_factory=RecentMean)
    rest: dict[int, RecentMean] = field(default_factory=dict)

    def carried(self, ticket: Ticket) -> None:
        """A transfer that ended."""
        if ticket.size >= LEAST_BYTES:
            self.link.observe(ticket.busy_s / ticket.size)

    def projected(self, chunks: int, seconds: float) -> None:
        if chunks:
            self.project.observe(seconds / chunks)

    def computed(self, work: OperationWork, seconds: float) -> None:
        self.rest.setdefault(work.rows, RecentMean()).observe(max(0.0, seconds))

    def costs(self, work: OperationWork) -> LayerCosts:
        """What an operation costs, as far as is known."""
        rest = self.rest.get(work.rows)
        return LayerCosts(
            kv_bytes=self.kv_bytes, x_bytes=self.x_bytes, link_s=1.0 / max(self.link.value, 1e-15),
            project_s=self.project.value, compute_s=0.0 if rest is None else rest.value,
            weight_bytes=work.weight_bytes, hidden_bytes=work.hidden_bytes, x_resident=self.x_resident,
        )  # fmt: skip

    def seconds(self, operations: Sequence[Operation]) -> float:
        """Predicted time of a step: its operations one after the other, each waiting for its X and then for the rest,
        which the link carries in the order of streaming.schedule. The steady state of `split`, and how it begins."""
        x_s = [each.projected * self.x_bytes * (not self.x_resident) * self.link.value for each in operations]
        kv_s = [each.loaded * self.kv_bytes * self.link.value for each in operations]
        x_there, free = x_s[0], x_s[0] + kv_s[0]
        end = 0.0
        for at, each in enumerate(operations):
            there, free = free, max(free, end)
            next_x = free + sum(x_s[at + 1 : at + 2])
            weights = (each.work.weight_bytes + each.work.hidden_bytes) * self.link.value
            projected = max(end, x_there) + each.projected * self.project.value if each.projected else end
            x_there, free = next_x, next_x + weights + sum(kv_s[at + 1 : at + 2])
            rest = self.rest.get(each.work.rows)
            end = max(projected, there) + (0.0 if rest is None else rest.value)
        return end

    def split(self, stored: int, whole: int, work: OperationWork) -> int:
        """Chunks to project, of `stored` ones of which the first `whole` may be."""
        return chunks_to_project(stored, whole, self.costs(work))
