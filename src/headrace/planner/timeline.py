"""Clocks, ports and links to tiers of the ranks in a predicted prefill, and what all strategies book on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from headrace.planner.machine import LayerTimes, Machine, ModelShape


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted time to first token; per rank the time spent waiting for arrivals and the bytes sent. period_s: what
    the last layer but one took, which is what a further layer takes; 0 of models without one."""

    ttft_s: float
    wait_s: tuple[float, ...]
    bytes_sent: tuple[float, ...]
    period_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Loads:
    """What a rank loads from its tiers during a prefill, layer by layer without a pause: seconds on its link to them of
    each layer's activations (x_s), then of its K and V (kv_s). project_s: projecting a layer's activations."""

    x_s: Sequence[float]
    kv_s: Sequence[float]
    project_s: float = 0.0


class CostModel(Protocol):
    """What a strategy takes. bounds: of P .. P+T; loads: by rank, what of the P cached tokens arrives meanwhile."""

    def __call__(
        self, machine: Machine, shape: ModelShape, ranks: int, bounds: Sequence[int], P: int = 0,
        cached_on: Sequence[float] | None = None, *, loads: Mapping[int, Loads] = ..., full_last_layer: bool = False,
    ) -> Cost: ...  # fmt: skip


NO_LOADS: Mapping[int, Loads] = {}


@dataclass(slots=True)
class Timeline:
    """Clocks of the ranks, and of their ports and links to tiers: a rank sends one message at a time, receives one at a
    time, and loads from its tiers beside both.

    there: when each rank has what it loads of the latest layer that was asked for.

    full_last_layer: the last layer is computed for all rows, as in the papers' models, not for the last row alone.
    """

    times: LayerTimes
    ranks: int
    full_last_layer: bool
    loads: Mapping[int, Loads] = field(default_factory=dict)
    clock: list[float] = field(init=False)
    wait: list[float] = field(init=False)
    sent: list[float] = field(init=False)
    out: list[float] = field(init=False)
    into: list[float] = field(init=False)
    tier: list[float] = field(init=False)
    there: list[float] = field(init=False)
    _asked: int = 0
    _began: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock, self.wait, self.sent, self.out, self.into = ([0.0] * self.ranks for _ in range(5))
        self.tier, self.there = [0.0] * self.ranks, [0.0] * self.ranks

    @property
    def machine(self) -> Machine:
        return self.times.machine

    def layers(self) -> Iterator[tuple[bool, bool]]:
        """For each layer: whether another follows, and whether only the last row is computed after the projections."""
        for layer in range(self.times.shape.layers):
            more = layer + 1 < self.times.shape.layers
            self._began.append(max(self.clock))
            self._project(layer)
            yield more, not (more or self.full_last_layer)

    def send(self, source: int, to: int, size: float, ready: float) -> float:
        """Books a message of `size` bytes that can leave at `ready`; returns when it has arrived.

        The link's own work is taken from the clocks of both ranks where they stand; a rank that waits for the message
        does it meanwhile.
        """
        if not size:
            return ready
        end = max(ready, self.out[source], self.into[to]) + size / self.machine.link_bytes_s
        self.out[source] = self.into[to] = end
        self.sent[source] += size
        for rank in (source, to):
            self.work(rank, size * self.machine.link_cpu_s_per_byte)
        return end + self.machine.latency_s

    def _project(self, layer: int) -> None:
        """Each rank projects the activations that it loaded of this layer, all at the same time."""
        for rank, each in self.loads.items():
            if each.project_s:
                self.until(rank, sum(each.x_s[: layer + 1]) + sum(each.kv_s[:layer]))
                self.work(rank, each.project_s)

    def ask(self) -> None:
        """Books what every rank loads of the next layer on its link to its tiers."""
        for rank, each in self.loads.items():
            self.tier[rank] += each.x_s[self._asked] + each.kv_s[self._asked]
            self.there[rank] = self.tier[rank]
        self._asked += 1

    def work(self, rank: int, seconds: float) -> None:
        self.clock[rank] += seconds

    def until(self, rank: int, moment: float) -> None:
        """The rank waits for what arrives at `moment`."""
        if moment > self.clock[rank]:
            self.wait[rank] += moment - self.clock[rank]
            self.clock[rank] = moment

    def load(self, P: int, lies: Sequence[float]) -> None:
        """Every holder of cached tokens has those of the next layer come, and copies them from its pool into the
        workspace."""
        self.ask()
        for holder, share in enumerate(lies):
            self.work(holder, self.times.copy(P * share))

    def fetch(self, rank: int, P: int, lies: Sequence[float]) -> list[tuple[float, float]]:
        """Books the way of all cached K and V of one layer to a rank, each from where its holder's clock stands, or
        from when the holder has them.

        Returns (when it is there, how many tokens) for every holder of some. A layer's are sent one layer ahead: to be
        called after the projections of the layer before and before its new K and V are sent (a port serves messages in
        the order in which they are booked).
        """
        parts = []
        for holder, share in enumerate(lies):
            tokens, here = P * share, max(self.clock[holder], self.there[holder])
            if holder != rank:
                here = self.send(holder, rank, tokens * self.times.shape.kv_bytes, here)
            if tokens:
                parts.append((here, tokens))
        return parts

    def cost(self, last: int, *, alone: bool = False) -> Cost:
        """When rank `last`, which computes the last row, is through, and rank 0, which makes the logits.

        `alone`: one rank computes all; else the way of the step to the ranks and of the hidden state back is added.
        """
        waited_for = [last] if alone else range(self.ranks) if self.full_last_layer else [0, last]
        hops = 0.0 if alone or self.ranks == 1 else 2 * self.machine.latency_s
        end = max(self.clock[rank] for rank in waited_for)
        period = self._began[-1] - self._began[-2] if len(self._began) > 1 else 0.0
        return Cost(end + self.times.head() + hops, tuple(self.wait), tuple(self.sent), period)


def check_bounds(bounds: Sequence[int], ranks: int, start: int) -> None:
    """Raises ValueError unless the bounds cut one shard for each rank from `start` on."""
    if len(bounds) != ranks + 1 or bounds[0] != start or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(f"bounds must be {ranks + 1} rising positions from {start} on, got {tuple(bounds)}")
