"""A rank of a prefill testbed: its link can be set, its steps are counted, its figures go to the driver.

parallel.launch starts the workers with `make` (MAKER); the driver counts its own rank by MeasuredRank too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from headrace.bench.prefill_links import LINK, apply
from headrace.config import EngineConfig
from headrace.engine import ranks as engine_ranks
from headrace.parallel.group import Group
from headrace.parallel.messages import RankStep
from headrace.parallel.rank import Hidden, Rank
from headrace.parallel.rate_limit import RateLimitedTransport
from headrace.parallel.threads import one_rank_computes
from headrace.parallel.torch_transport import TorchTransport
from headrace.parallel.transport import LAST, Apart, Tag

MAKER = "headrace.bench.prefill_worker:make"
FIGURES = Tag(Apart.probe, LAST, 1)
"""Tag of a worker's figures; hidden states have piece 0."""


@dataclass(slots=True)
class MeasuredRank:
    """A rank whose link can be set and whose steps are counted. waited: seconds, in the last step.

    pinned: its own cores; a step that it computes by itself may use `everywhere`.
    """

    rank: Rank
    pinned: set[int] = field(default_factory=set)
    waited: float = 0.0
    everywhere: set[int] = field(default_factory=lambda: os.sched_getaffinity(0))
    _before: int = 0

    def link(self, step: RankStep) -> None:
        transport = self.rank.transport
        if isinstance(transport, RateLimitedTransport):
            transport.close()
            transport = transport.transport
        self.rank.transport = apply(step, transport)

    def run(self, step: RankStep) -> Hidden:
        self.settle(one_rank_computes(step))
        traffic = self.rank.transport.traffic
        waited, self._before = traffic.wait_s, sum(traffic.bytes.values())
        hidden = self.rank.run(step)
        self.waited = traffic.wait_s - waited
        return hidden

    def settle(self, whole: bool) -> None:
        """Prepares the calling thread for a step that one rank computes by itself (`whole`), or for any other."""
        if self.pinned:
            os.sched_setaffinity(0, self.everywhere if whole else self.pinned)
        if self.rank.threads is not None:
            self.rank.threads.use(whole)

    def sent(self) -> int:
        """Bytes sent for the last step. Waits for sends that the step left under way (the last layer's keys, relays):
        the links are idle when all ranks have returned."""
        self.rank.workspace.drain()
        return sum(self.rank.transport.traffic.bytes.values()) - self._before


class PrefillWorker:
    """A worker: sets its link, or computes a step and tells its figures, by links that are not counted."""

    def __init__(self, config: EngineConfig, rank: Rank, group: Group) -> None:
        self.measured, self.links = MeasuredRank(rank, pins(config, group.rank)), uncounted(group)

    def run(self, step: RankStep) -> None:
        if step.number == LINK:
            self.measured.link(step)
            return
        self.measured.run(step)
        figures = torch.tensor([self.measured.waited, self.measured.sent()], dtype=torch.float64)
        self.links.isend(figures, 0, FIGURES).wait()


def make(config: EngineConfig, group: Group) -> PrefillWorker:
    """What a worker serves with (parallel.launch)."""
    return PrefillWorker(config, engine_ranks.make(config, group), group)


def uncounted(group: Group) -> TorchTransport:
    """The links of the context group with counters of their own."""
    return TorchTransport(group.mesh.get_group("context"))


def pins(config: EngineConfig, rank: int) -> set[int]:
    """The cores that the main thread of a rank, and those that it starts, are bound to; none where there are fewer than
    threads. The links' threads, which run by then, are not bound.
    """
    cores, threads = sorted(os.sched_getaffinity(0)), config.model.threads or 1
    if len(cores) < threads * engine_ranks.count(config):
        return set()
    return set(cores[rank * threads : (rank + 1) * threads])
