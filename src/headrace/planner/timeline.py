"""Clocks, ports and links to tiers of the ranks in a predicted prefill, and what all strategies book on them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Protocol

from headrace.planner.machine import LayerTimes, Machine, ModelShape


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted time to first token; per rank the time spent waiting for arrivals and the bytes sent. period_s: what
    the last layer but one took, which is what a further layer takes; own_s: of it, what each rank computed itself. None
    of models without one."""

    ttft_s: float
    wait_s: tuple[float, ...]
    bytes_sent: tuple[float, ...]
    period_s: float = 0.0
    own_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Loads:
    """What a rank loads from its tiers during a prefill, layer by layer without a pause: seconds on its link to them of
    each layer's activations (x_s), then of its K and V (kv_s). project_s: projecting a layer's activations."""

    x_s: Sequence[float]
    kv_s: Sequence[float]
    project_s: float = 0.0

    def arrivals(self) -> list[float]:
        """When X of layer j has come, [2 j], and its K and V, [2 j + 1]."""
        return list(accumulate(chain.from_iterable(zip(self.x_s, self.kv_s, strict=True))))


class CostModel(Protocol):
    """What a strategy takes. bounds: of P .. P+T; loads: by rank, what of the P cached tokens arrives meanwhile."""

    def __call__(
        self, machine: Machine, shape: ModelShape, ranks: int, bounds: Sequence[int], P: int = 0,
        cached_on: Sequence[float] | None = None, *, loads: Mapping[int, Loads] = ..., full_last_layer: bool = False,
    ) -> Cost: ...  # fmt: skip


NO_LOADS: Mapping[int, Loads] = {}


@dataclass(slots=True)
class Port:
    """Stretches in which it is busy, one after the other; until: the end of the latest that was booked in turn."""

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    until: float = 0.0

    def free(self, moment: float, seconds: float) -> float:
        """From when on, not before this moment, nothing is booked for so long."""
        for at in range(bisect_right(self.ends, moment), len(self.ends)):
            if moment + seconds <= self.begins[at]:
                break
            moment = self.ends[at]
        return moment

    def book(self, begin: float, end: float, in_turn: bool) -> None:
        at = bisect_right(self.ends, begin)
        self.begins.insert(at, begin)
        self.ends.insert(at, end)
        if in_turn:
            self.until = end


@dataclass(slots=True)
class Timeline:
    """Clocks of the ranks, and of their ports and links to tiers: a rank sends one message at a time, receives one at a
    time, and loads from its tiers beside both.

    full_last_layer: the last layer is computed for all rows, as in the papers' models, not for the last row alone.
    """

    times: LayerTimes
    ranks: int
    full_last_layer: bool
    loads: Mapping[int, Loads] = field(default_factory=dict)
    clock: list[float] = field(init=False)
    wait: list[float] = field(init=False)
    sent: list[float] = field(init=False)
    out: list[Port] = field(init=False)
    into: list[Port] = field(init=False)
    _arrivals: dict[int, list[float]] = field(init=False)
    _began: list[tuple[float, list[float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock, self.wait, self.sent = ([0.0] * self.ranks for _ in range(3))
        self.out, self.into = ([Port() for _ in range(self.ranks)] for _ in range(2))
        self._arrivals = {rank: each.arrivals() for rank, each in self.loads.items()}

    @property
    def machine(self) -> Machine:
        return self.times.machine

    def layers(self) -> Iterator[tuple[bool, bool]]:
        """For each layer: whether another follows, and whether only the last row is computed after the projections."""
        for layer in range(self.times.shape.layers):
            more = layer + 1 < self.times.shape.layers
            computed = [now - waited for now, waited in zip(self.clock, self.wait, strict=True)]
            self._began.append((max(self.clock), computed))
            yield more, not (more or self.full_last_layer)

    def send(self, source: int, to: int, size: float, ready: float, in_turn: bool = True) -> float:
        """Books a message of `size` bytes that can leave at `ready`; returns when it has arrived.

        Ports serve messages in the order in which they are booked. One not `in_turn`, of what is still to come, holds
        up none of them: it leaves when it is ready, in the first gap.

        The link's own work is taken from the clocks of both ranks where they stand; a rank that waits for the message
        does it meanwhile.
        """
        if not size:
            return ready
        out, into, seconds = self.out[source], self.into[to], size / self.machine.link_bytes_s
        begin = max(ready, out.until, into.until) if in_turn else ready
        while begin != (later := into.free(out.free(begin, seconds), seconds)):
            begin = later
        end = begin + seconds
        for port in (out, into):
            port.book(begin, end, in_turn)
        self.sent[source] += size
        for rank in (source, to):
            self.work(rank, size * self.machine.link_cpu_s_per_byte)
        return end + self.machine.latency_s

    def project(self) -> None:
        """Each rank projects the activations that it loaded of this layer, all at the same time: where it waits for its
        cached tokens, behind the projections of its rows."""
        for rank, each in self.loads.items():
            if each.project_s:
                self.until(rank, self._arrivals[rank][2 * self._layer])
                self.work(rank, each.project_s)

    def there(self, rank: int, ahead: int = 0) -> float:
        """When the rank has loaded what it loads of this layer, or of one so far ahead."""
        return self._arrivals[rank][2 * (self._layer + ahead) + 1] if rank in self._arrivals else 0.0

    @property
    def _layer(self) -> int:
        return len(self._began) - 1

    def work(self, rank: int, seconds: float) -> None:
        self.clock[rank] += seconds

    def until(self, rank: int, moment: float) -> None:
        """The rank waits for what arrives at `moment`."""
        if moment > self.clock[rank]:
            self.wait[rank] += moment - self.clock[rank]
            self.clock[rank] = moment

    def load(self, P: int, lies: Sequence[float]) -> None:
        """Every holder of cached tokens copies those of the next layer from its pool into the workspace."""
        for holder, share in enumerate(lies):
            self.work(holder, self.times.copy(P * share))

    def fetch(self, rank: int, P: int, lies: Sequence[float], ahead: int) -> list[tuple[float, float]]:
        """Books the way of cached K and V of one layer to a rank, each from where its holder's clock stands, or from
        when the holder has them: of the next layer (ahead 1), but for those of holders that project some, which leave
        behind `project` (0).

        Returns (when it is there, how many tokens) for every holder of some. To be called after the projections of the
        layer before and before its new K and V are sent (0: behind them).
        """
        parts = []
        for holder, share in enumerate(lies):
            projects = holder in self.loads and self.loads[holder].project_s > 0
            if ahead == projects:
                continue
            tokens, now, there = P * share, self.clock[holder], self.there(holder, ahead)
            here = max(now, there)
            if holder != rank:
                size = tokens * self.times.shape.kv_bytes
                here = self.send(holder, rank, size, here, in_turn=not projects and there <= now)
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
        cost = Cost(end + self.times.head() + hops, tuple(self.wait), tuple(self.sent))
        if len(self._began) < 2:
            return cost
        (before, had), (began, have) = self._began[-2:]
        own = tuple(now - then for then, now in zip(had, have, strict=True))
        return replace(cost, period_s=began - before, own_s=own)


def check_bounds(bounds: Sequence[int], ranks: int, start: int) -> None:
    """Raises ValueError unless the bounds cut one shard for each rank from `start` on."""
    if len(bounds) != ranks + 1 or bounds[0] != start or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(f"bounds must be {ranks + 1} rising positions from {start} on, got {tuple(bounds)}")
