"""A rank of a prefill testbed: its link can be set, its steps are counted, its figures go to the driver.

parallel.launch starts the workers with `make` (MAKER); the driver counts its own rank by MeasuredRank too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from headrace.bench.prefill_links import LINK, apply
from headrace.config import EngineConfig
from headrace.engine import ranks as engine_ranks
from headrace.parallel.group import Group
from headrace.parallel.messages import RankStep
from headrace.parallel.rank import Hidden, Rank
from headrace.parallel.rate_limit import RateLimitedTransport
from headrace.parallel.torch_transport import TorchTransport
from headrace.parallel.transport import LAST, Tag

MAKER = "headrace.bench.prefill_worker:make"
FIGURES = Tag(510, LAST, 1)
"""Tag of a worker's figures; hidden states have piece 0."""


@dataclass(slots=True)
class MeasuredRank:
    """A rank whose link can be set and whose steps are counted. waited: seconds, in the last step."""

    rank: Rank
    waited: float = 0.0
    _before: int = 0

    def link(self, step: RankStep) -> None:
        transport = self.rank.transport
        if isinstance(transport, RateLimitedTransport):
            transport.close()
            transport = transport.transport
        self.rank.transport = apply(step, transport)

    def run(self, step: RankStep) -> Hidden:
        traffic = self.rank.transport.traffic
        waited, self._before = traffic.wait_s, sum(traffic.bytes.values())
        hidden = self.rank.run(step)
        self.waited = traffic.wait_s - waited
        return hidden

    def sent(self) -> int:
        """Bytes sent for the last step. Waits for sends that the step left under way (the last layer's keys, relays):
        the links are idle when all ranks have returned."""
        self.rank.workspace.drain()
        return sum(self.rank.transport.traffic.bytes.values()) - self._before


class PrefillWorker:
    """A worker: sets its link, or computes a step and tells its figures, by links that are not counted."""

    def __init__(self, rank: Rank, group: Group) -> None:
        self.measured, self.links = MeasuredRank(rank), uncounted(group)

    def run(self, step: RankStep) -> None:
        if step.number == LINK:
            self.measured.link(step)
            return
        self.measured.run(step)
        figures = torch.tensor([self.measured.waited, self.measured.sent()], dtype=torch.float64)
        self.links.isend(figures, 0, FIGURES).wait()


def make(config: EngineConfig, group: Group) -> PrefillWorker:
    """What a worker serves with (parallel.launch)."""
    rank = engine_ranks.make(config, group)
    pin(config, group.rank)
    return PrefillWorker(rank, group)


def uncounted(group: Group) -> TorchTransport:
    """The links of the context group with counters of their own."""
    return TorchTransport(group.mesh.get_group("context"))


def pin(config: EngineConfig, rank: int) -> None:
    """Binds this thread, and those that it will start, to cores of the rank's own if there are enough.

    Called once the engine's links are made, so that their threads are not bound.
    """
    cores, threads = sorted(os.sched_getaffinity(0)), config.model.threads or 1
    if len(cores) >= threads * engine_ranks.count(config):
        os.sched_setaffinity(0, cores[rank * threads : (rank + 1) * threads])
