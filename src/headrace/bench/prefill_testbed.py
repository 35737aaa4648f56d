"""A group of ranks on which single prefills are measured: time to the first token, waiting, bytes sent.

All prefills are pieces of one token sequence, whose chunk i always lies in slot i of a rank's pool. Cached chunks laid
once are therefore right for every later prefill, and a prefill may write over the chunks of another.

T: new tokens, P: cached ones.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec
import torch

from headrace.bench.prefill_links import Namespaces, RankLink
from headrace.bench.prefill_worker import FIGURES, MAKER, MeasuredRank, pins, uncounted
from headrace.config import EngineConfig
from headrace.console import err
from headrace.engine import ranks as engine_ranks
from headrace.engine.driver import ending_in
from headrace.engine.folders import model_folder
from headrace.engine.ranks import Ranks
from headrace.models.config import read_config
from headrace.models.decoder import Decoder
from headrace.parallel.messages import RankStep, StepGroup, StepPart, encode
from headrace.parallel.rank import Hidden, Rank
from headrace.parallel.supervisor import WorkerSupervisor
from headrace.parallel.transport import LoopbackHub
from headrace.planner.machine import Machine
from headrace.planner.partition import zigzag, zigzag_ranks
from headrace.planner.schedule import Shards
from headrace.planner.tuned_table import TunedTable
from headrace.progress import OnPhase, untold
from headrace.strategies import KEEPS_ALL
from headrace.types import BLOCK_CHUNKS, CHUNK, chunks_for

CachedPlacement = Literal["own", "round", "last"]
"""Where cached chunks lie: as the strategy itself places new ones; blocks of 2,048 tokens in turn; on the last rank."""


@dataclass(frozen=True, slots=True)
class PrefillRun:
    """One prefill: seconds from the order to the logits of the last token; per rank seconds waited, bytes sent."""

    seconds: float
    wait_s: tuple[float, ...]
    bytes_sent: tuple[int, ...]


def median(runs: Sequence[PrefillRun]) -> PrefillRun:
    """Each figure's median; bytes are those of the last run."""
    waits = zip(*(run.wait_s for run in runs), strict=True)
    return PrefillRun(
        statistics.median(run.seconds for run in runs), tuple(map(statistics.median, waits)), runs[-1].bytes_sent
    )


@contextmanager
def open_testbed(config: EngineConfig, *, netns: bool = False, progress: OnPhase = untold) -> Iterator[PrefillTestbed]:
    """A group as the settings say, with room for config.kv_cache_tokens on each rank; closed at the end.

    netns: its workers in network namespaces. Raises what engine.ranks.open_ranks and Namespaces raise, and ValueError
    for a model with recurrent layers or sparse attention.
    """
    model = read_config(model_folder(config.model.folder))
    for has, what in ((model.recurrent, "recurrent layers"), (model.attention.index, "sparse attention")):
        if has is not None:
            raise ValueError(
                f"{model.architecture} has {what}: its prefills are not measured by strategy; the engine plans by what "
                f"its ranks measure at the start"
            )
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    spaces = Namespaces(config.ranks.context) if netns else None
    if spaces is not None:
        config = config.replace(rank_interface=spaces.interface)
    try:
        engine_ranks.set_threads(config)
        config = config.replace(threads=torch.get_num_threads())
        start = None if spaces is None else spaces.start
        opened, decoder = engine_ranks.open_ranks(config, progress, MAKER, start)
        testbed = PrefillTestbed(config, opened, decoder, spaces)
        try:
            yield testbed
        finally:
            opened.close()
            testbed.close()
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
        if spaces is not None:
            spaces.close()


class PrefillTestbed:
    """The driver of the group.

    machine: the profile as measured, with the ranks' own link; link: the one in force. logits: of the last prefill's
    last token, [1, vocabulary].
    """

    def __init__(self, config: EngineConfig, opened: Ranks, decoder: Decoder, spaces: Namespaces | None) -> None:
        self.config, self.machine, self.shape = config, opened.profile.machine, opened.profile.shape
        self.group, self.size = opened.group, opened.group.context.size
        self.link, self._spaces, self._links = RankLink(), spaces, uncounted(opened.group)
        self._workers.on_failure(self._links.fail)
        self._rank, self.steps = MeasuredRank(opened.rank, pins(config, 0)), 0
        storage = opened.rank.storage
        alone = Rank(decoder, storage, opened.rank.kernels.backend.capabilities.name, LoopbackHub(1).transport(0))
        self._alone, self._slots = MeasuredRank(alone), storage.slots
        drawn = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(decoder.config.vocab_size, (storage.slots * CHUNK,), generator=drawn).tolist()
        self.logits = torch.empty(0)
        self._laid: set[tuple[int, int]] = set()
        """(rank, chunk) that hold the whole chunk."""

    @property
    def crowding(self) -> float:
        """Threads of all ranks of this host for each of its cores, at least 1."""
        threads = self._rank.rank.threads
        return 1.0 if threads is None else threads.crowding

    def close(self) -> None:
        """Ends the threads of the testbed's own links; the group is closed by its owner."""
        self._rank.link(RankLink().step(0))
        self._links.close()

    def set_link(self, link: RankLink) -> None:
        """Sets the link, and warns if the ranks' own is too slow for it. Raises ValueError for what it cannot be."""
        if self._spaces is not None:
            self._spaces.limit(link)
        else:
            step = link.step(self.machine.link_bytes_s)
            self._send(step)
            self._rank.link(step)
        self.link = link
        if not link.imitable(self.machine.link_bytes_s):
            own = self.machine.link_bytes_s / 1e9
            err.print(f"the ranks' own link carries {own:.2f} GB/s: {link} is not reached", style="yellow")

    def check_table(self, table: TunedTable | None) -> None:
        """Raises ValueError for a table of another machine, model or group; only says that it is for another link."""
        if table is None:
            return
        here = engine_ranks.stamp(self.config, self.shape, self.machine)
        table.check(msgspec.structs.replace(here, link=table.stamp.link))
        if table.stamp.link != here.link:
            err.print(f"the table was tuned on another link: {table.stamp.link}", style="yellow")

    def planned_on(self, table: TunedTable | None) -> Machine:
        """What the planner goes by: the table's profile, else the measured one, behind the link in force."""
        return self.link.profile(self.machine if table is None else table.machine)

    def run(self, strategy: str, cut: Shards, P: int = 0, placement: CachedPlacement = "own") -> PrefillRun:
        """Prefills cut.bounds[0] .. cut.bounds[-1] by one of headrace.strategies on P cached tokens, which are
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

    def runs(
        self, cuts: Mapping[str, Shards], P: int, placement: CachedPlacement
    ) -> dict[str, Callable[[], PrefillRun]]:
        """`run` of each strategy, to be called."""
        return {name: partial(self.run, name, cut, P, placement) for name, cut in cuts.items()}

    def alone(self, T: int, P: int = 0) -> PrefillRun:
        """The same on rank 0 by itself, without the group, with its own share of the cores."""
        return self._without_group(T, P, whole=False)

    def one_engine(self, T: int, P: int = 0) -> PrefillRun:
        """The same with the cores of all ranks of this host."""
        return self._without_group(T, P, whole=True)

    def _without_group(self, T: int, P: int, whole: bool) -> PrefillRun:
        self._check(P, P + T)
        self._lay([0] * (P // CHUNK))
        owners = [0] * chunks_for(P + T)
        part = self._part(P, (P, P + T), (0,), owners)
        step = RankStep(0, [StepGroup("single", [part])])
        self._rank.settle(whole)
        began = time.perf_counter()
        hidden = self._alone.run(step)
        self._logits(hidden, part)
        seconds = time.perf_counter() - began
        self._wrote(part, owners)
        return PrefillRun(seconds, (self._alone.waited,), (self._alone.sent(),))

    def cached(self, strategy: str, P: int, placement: CachedPlacement) -> list[int]:
        """The rank that holds each cached chunk."""
        if placement == "last" or (placement == "own" and strategy in KEEPS_ALL):
            return [self.size - 1] * (P // CHUNK)
        return [chunk // BLOCK_CHUNKS % self.size for chunk in range(P // CHUNK)]

    def cached_on(self, strategy: str, P: int, placement: CachedPlacement) -> list[float]:
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

    def _part(self, P: int, bounds: Sequence[int], ranks: Sequence[int], owners: Sequence[int]) -> StepPart:
        end = bounds[-1]
        slots = [owner * self._slots + chunk for chunk, owner in enumerate(owners)]
        return StepPart(self.tokens[P:end], P, slots, list(bounds), list(ranks), 1, end)

    def _lay(self, cached: list[int]) -> None:
        """Fills cached chunks that are not there by one prefill of them all; not timed."""
        if self._laid.issuperset((rank, chunk) for chunk, rank in enumerate(cached)):
            return
        P = CHUNK * len(cached)
        part = self._part(0, zigzag(P, self.size, CHUNK), zigzag_ranks(self.size), cached)
        self._timed("ring-kv", part)
        self._wrote(part, cached)

    def _wrote(self, part: StepPart, owners: Sequence[int]) -> None:
        new = range(part.start // CHUNK, chunks_for(part.end))
        self._laid |= {(owners[chunk], chunk) for chunk in new}
        if part.end % CHUNK:
            self._laid.discard((owners[new[-1]], new[-1]))

    def _timed(self, strategy: str, part: StepPart) -> PrefillRun:
        self.steps += 1
        step = RankStep(self.steps, [StepGroup(strategy, [part])])
        body = encode(step)
        began = time.perf_counter()
        self._workers.send(body)
        hidden = self._rank.run(step)
        self._logits(hidden, part)
        seconds = time.perf_counter() - began
        told = [[self._rank.waited, self._rank.sent()], *self._heard()]
        return PrefillRun(seconds, tuple(wait for wait, _ in told), tuple(round(size) for _, size in told))

    def _logits(self, hidden: Hidden, part: StepPart) -> None:
        with torch.inference_mode():
            self.logits = self._alone.rank.decoder.logits(hidden[0, 0, part.end - 1][None])

    def _heard(self) -> list[list[float]]:
        """What the workers measured; they have nothing left to do then."""
        told = [torch.empty(2, dtype=torch.float64) for _ in range(1, self.size)]
        for work in [self._links.irecv(x, rank, FIGURES) for rank, x in enumerate(told, 1)]:
            work.wait()
        return [x.tolist() for x in told]

    @property
    def _workers(self) -> WorkerSupervisor:
        workers = self.group.workers
        assert workers is not None, "rank 0 supervises the workers"
        return workers

    def _send(self, step: RankStep) -> None:
        self._workers.send(encode(step))


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
