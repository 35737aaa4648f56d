"""A group of ranks on which single prefills are measured: time to the first token, waiting, bytes sent.

Chunk i of the one token sequence that all prefills are pieces of always lies in slot i of a rank's pool, whoever
computed it. Cached chunks laid once are so right for every later prefill, and a prefill may write over what another
one wrote.

T: new tokens, P: cached ones.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from headrace.bench.prefill_links import LINK, Link, Namespaces, apply
from headrace.config import EngineConfig
from headrace.engine import ranks as engine_ranks
from headrace.engine.driver import KEEPS_ALL, ending_in
from headrace.engine.ranks import Ranks
from headrace.models.decoder import Decoder
from headrace.models.weights import Progress
from headrace.parallel.group import Group
from headrace.parallel.messages import Group as StepGroup
from headrace.parallel.messages import Part, Step, encode
from headrace.parallel.rank import Hidden, Rank
from headrace.parallel.rate_limit import Limited
from headrace.parallel.supervisor import WorkerSupervisor
from headrace.parallel.torch_transport import TorchTransport
from headrace.parallel.transport import LAST, LoopbackHub, Tag
from headrace.planner.choice import Layout
from headrace.planner.partition import zigzag, zigzag_ranks
from headrace.types import BLOCK_CHUNKS, CHUNK, chunks_for

MAKER = "headrace.bench.prefill_testbed:make"
FIGURES = Tag(510, LAST, 1)
"""Under which a worker tells what it measured; hidden states have piece 0."""

Placement = Literal["own", "round", "last"]
"""Where cached chunks lie: as the strategy itself places new ones; blocks of 2,048 tokens in turn; on the last rank."""


@dataclass(frozen=True, slots=True)
class Run:
    """One prefill: seconds from the order to the logits of the last token; per rank seconds waited, bytes sent."""

    seconds: float
    wait_s: tuple[float, ...]
    bytes_sent: tuple[int, ...]


def median(runs: Sequence[Run]) -> Run:
    """Each figure's median; bytes are those of the last run."""
    waits = zip(*(run.wait_s for run in runs), strict=True)
    return Run(
        statistics.median(run.seconds for run in runs), tuple(map(statistics.median, waits)), runs[-1].bytes_sent
    )


@dataclass(slots=True)
class _Measured:
    """A rank whose link can be set and whose steps are counted. waited: seconds, in the last step."""

    rank: Rank
    waited: float = 0.0
    _before: int = 0

    def link(self, step: Step) -> None:
        transport = self.rank.transport
        if isinstance(transport, Limited):
            transport.close()
            transport = transport.transport
        self.rank.transport = apply(step, transport)

    def run(self, step: Step) -> Hidden:
        traffic = self.rank.transport.traffic
        waited, self._before = traffic.wait_s, sum(traffic.bytes.values())
        hidden = self.rank.run(step)
        self.waited = traffic.wait_s - waited
        return hidden

    def sent(self) -> int:
        """Bytes sent for the last step, once what nobody waited for has gone too (the last layer's keys, relays):
        the links are idle when all ranks have returned."""
        self.rank.workspace.drain()
        return sum(self.rank.transport.traffic.bytes.values()) - self._before


class BedRank:
    """A worker: sets its link, or computes a step and tells its figures, by links that are not counted."""

    def __init__(self, rank: Rank, group: Group) -> None:
        self.measured, self.links = _Measured(rank), uncounted(group)

    def run(self, step: Step) -> None:
        if step.number == LINK:
            self.measured.link(step)
            return
        self.measured.run(step)
        figures = torch.tensor([self.measured.waited, self.measured.sent()], dtype=torch.float64)
        self.links.isend(figures, 0, FIGURES).wait()


def make(config: EngineConfig, group: Group) -> BedRank:
    """What a worker serves with (parallel.launch)."""
    rank = engine_ranks.make(config, group)
    pin(config, group.rank)
    return BedRank(rank, group)


def uncounted(group: Group) -> TorchTransport:
    """The links of the context group with counters of their own."""
    return TorchTransport(group.mesh.get_group("context"))


def pin(config: EngineConfig, rank: int) -> None:
    """This thread, and those that it will start, on cores of the rank's own, where there are as many.

    For when the links are made: their threads run where there is room.
    """
    cores, threads = sorted(os.sched_getaffinity(0)), config.threads or 1
    if len(cores) >= threads * engine_ranks.count(config):
        os.sched_setaffinity(0, cores[rank * threads : (rank + 1) * threads])


@contextmanager
def open_bed(config: EngineConfig, *, netns: bool = False, progress: Progress | None = None) -> Iterator[Bed]:
    """A group as the settings say, with room for config.kv_cache_tokens on each rank; closed at the end.

    netns: its workers in network namespaces. Raises what engine.ranks.open_ranks and Namespaces raise.
    """
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    spaces = Namespaces(config.context_parallel_size) if netns else None
    if spaces is not None:
        config = replace(config, rank_interface=spaces.interface)
    try:
        engine_ranks.set_threads(config)
        config = replace(config, threads=torch.get_num_threads())
        start = None if spaces is None else spaces.start
        opened, decoder = engine_ranks.open_ranks(config, progress, MAKER, start)
        pin(config, 0)
        bed = Bed(config, opened, decoder, spaces)
        try:
            yield bed
        finally:
            opened.close()
            bed.close()
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
        if spaces is not None:
            spaces.close()


class Bed:
    """The driver.

    machine: the profile as measured, with the ranks' own link; link: the one in force. logits: of the last prefill's
    last token, [1, vocabulary].
    """

    def __init__(self, config: EngineConfig, opened: Ranks, decoder: Decoder, spaces: Namespaces | None) -> None:
        self.config, self.machine, self.shape = config, opened.machine, opened.shape
        self.group, self.size = opened.group, opened.group.context.size
        self.link, self._spaces, self._links = Link(), spaces, uncounted(opened.group)
        self._crew.on_failure(self._links.fail)
        self._rank, self.steps = _Measured(opened.rank), 0
        storage = opened.rank.storage
        alone = Rank(decoder, storage, opened.rank.kernels.backend.capabilities.name, LoopbackHub(1).transport(0))
        self._alone, self._slots = _Measured(alone), storage.slots
        drawn = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(decoder.config.vocab_size, (storage.slots * CHUNK,), generator=drawn).tolist()
        self.logits = torch.empty(0)
        self._laid: set[tuple[int, int]] = set()
        """(rank, chunk) that hold the whole chunk."""

    def close(self) -> None:
        """Ends the threads of the bed's own links; the group is closed by its owner."""
        self._rank.link(Link().step(0))
        self._links.close()

    def set_link(self, link: Link) -> None:
        """From now on. Raises ValueError for what the link cannot be."""
        if self._spaces is not None:
            self._spaces.limit(link)
        else:
            step = link.step(self.machine.link_bytes_s)
            self._send(step)
            self._rank.link(step)
        self.link = link

    def run(self, strategy: str, cut: Layout, P: int = 0, placement: Placement = "own") -> Run:
        """Prefills cut.bounds[0] .. cut.bounds[-1] by one of parallel.rank.STRATEGIES on P cached tokens, which are
        laid first where they are not there. Raises ValueError for what does not fit, RankLost."""
        end = cut.bounds[-1]
        self._check(P, end)
        cached = self.cached(strategy, P, placement)
        ranks, owners = _owners(strategy, cut.ranks, cached, chunks_for(end), self.size)
        self._lay(cached)
        part = self._part(P, cut.bounds, ranks, owners)
        try:
            return self._timed(strategy, part)
        finally:
            self._wrote(part, owners)

    def runs(self, cuts: Mapping[str, Layout], P: int, placement: Placement) -> dict[str, Callable[[], Run]]:
        """`run` of each strategy, to be called."""
        return {name: partial(self.run, name, cut, P, placement) for name, cut in cuts.items()}

    def alone(self, T: int, P: int = 0) -> Run:
        """The same on rank 0 by itself, without the group."""
        self._check(P, P + T)
        self._lay([0] * (P // CHUNK))
        owners = [0] * chunks_for(P + T)
        part = self._part(P, (P, P + T), (0,), owners)
        step = Step(0, [StepGroup("single", [part])])
        began = time.perf_counter()
        hidden = self._alone.run(step)
        self._logits(hidden, part)
        seconds = time.perf_counter() - began
        self._wrote(part, owners)
        return Run(seconds, (self._alone.waited,), (self._alone.sent(),))

    def cached(self, strategy: str, P: int, placement: Placement) -> list[int]:
        """The rank that holds each cached chunk."""
        if placement == "last" or (placement == "own" and strategy in KEEPS_ALL):
            return [self.size - 1] * (P // CHUNK)
        return [chunk // BLOCK_CHUNKS % self.size for chunk in range(P // CHUNK)]

    def cached_on(self, strategy: str, P: int, placement: Placement) -> list[float]:
        """Cached tokens on each rank, as the planner asks for them."""
        cached = self.cached(strategy, P, placement)
        return [float(CHUNK * cached.count(rank)) for rank in range(self.size)]

    def _check(self, P: int, end: int) -> None:
        if P % CHUNK or P < 0:
            raise ValueError(f"cached must be a multiple of {CHUNK}, got {P}")
        if end <= P:
            raise ValueError(f"tokens must be at least 1, got {end - P}")
        if end > self._slots * CHUNK:
            raise ValueError(f"{end} tokens do not fit in the {self._slots * CHUNK} of each rank's cache")

    def _part(self, P: int, bounds: Sequence[int], ranks: Sequence[int], owners: Sequence[int]) -> Part:
        end = bounds[-1]
        slots = [owner * self._slots + chunk for chunk, owner in enumerate(owners)]
        return Part(self.tokens[P:end], P, slots, list(bounds), list(ranks), 1, end)

    def _lay(self, cached: list[int]) -> None:
        """Fills cached chunks that are not there by one prefill of them all; not timed."""
        if self._laid.issuperset((rank, chunk) for chunk, rank in enumerate(cached)):
            return
        P = CHUNK * len(cached)
        part = self._part(0, zigzag(P, self.size, CHUNK), zigzag_ranks(self.size), cached)
        self._timed("ring-kv", part)
        self._wrote(part, cached)

    def _wrote(self, part: Part, owners: Sequence[int]) -> None:
        new = range(part.start // CHUNK, chunks_for(part.end))
        self._laid |= {(owners[chunk], chunk) for chunk in new}
        if part.end % CHUNK:
            self._laid.discard((owners[new[-1]], new[-1]))

    def _timed(self, strategy: str, part: Part) -> Run:
        self.steps += 1
        step = Step(self.steps, [StepGroup(strategy, [part])])  # type: ignore[arg-type]
        body = encode(step)
        began = time.perf_counter()
        self._crew.send(body)
        hidden = self._rank.run(step)
        self._logits(hidden, part)
        seconds = time.perf_counter() - began
        told = [[self._rank.waited, self._rank.sent()], *self._heard()]
        return Run(seconds, tuple(wait for wait, _ in told), tuple(round(size) for _, size in told))

    def _logits(self, hidden: Hidden, part: Part) -> None:
        with torch.inference_mode():
            self.logits = self._alone.rank.decoder.logits(hidden[0, 0, part.end - 1][None])

    def _heard(self) -> list[list[float]]:
        """What the workers measured; they have nothing left to do then."""
        told = [torch.empty(2, dtype=torch.float64) for _ in range(1, self.size)]
        for work in [self._links.irecv(x, rank, FIGURES) for rank, x in enumerate(told, 1)]:
            work.wait()
        return [x.tolist() for x in told]

    @property
    def _crew(self) -> WorkerSupervisor:
        crew = self.group.crew
        assert crew is not None, "rank 0 has the crew"
        return crew

    def _send(self, step: Step) -> None:
        self._crew.send(encode(step))


def _owners(
    strategy: str, ranks: Sequence[int], cached: list[int], chunks: int, size: int
) -> tuple[tuple[int, ...], list[int]]:
    """Who computes the shards, and who owns each chunk, cached and new ones: the rules of engine.driver.

    A block has one owner; chain and single keep all new chunks on the last of `ranks`, or on the owner of the block
    that they go on with, which then changes places with it; the others take blocks in turn.
    """
    begun = cached[-1] if len(cached) % BLOCK_CHUNKS else None
    new = range(len(cached), chunks)
    if strategy in KEEPS_ALL:
        keeper = ranks[-1] if begun is None else begun
        return ending_in(ranks, keeper), cached + [keeper] * len(new)
    full = -(-len(cached) // BLOCK_CHUNKS) * BLOCK_CHUNKS
    return tuple(ranks), cached + [begun if begun is not None and i < full else i // BLOCK_CHUNKS % size for i in new]
