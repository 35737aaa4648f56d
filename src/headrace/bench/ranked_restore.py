"""A partly stored prompt over several ranks: what the engine chooses beside every other way to do it.

A way is who loads the stored chunks (one rank, or all of them block by block), how many of these are computed again,
and the strategy of what is computed. The engine's own choice, the best few of a sweep, restoring on one rank and
recomputing on all are measured in turns.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

from headrace.bench.benchmark import Case
from headrace.bench.restore_testbed import ELEMENT_BYTES, ONE, STORE_S
from headrace.bench.shapes import CheckpointShape, write_checkpoint
from headrace.engine.driver import Driver
from headrace.engine.llm import LLM
from headrace.engine.stored_prefixes import Choose, StoredPrefixes
from headrace.offload.restore.ranked_plan import best_way
from headrace.offload.restore.run_costs import StoredRun
from headrace.offload.restore.solver import Split, predict, restore_split
from headrace.planner.profile import Profile
from headrace.strategies import OFFERED
from headrace.types import CHUNK, Request

Loaders = Literal["one", "all"]
NEVER = float("inf")
FINALISTS = 2
WARM = 5
QUARTERS = 4
HOPELESS, LEAST = 1.2, (4, 8)
"""Ways that are predicted to take so many times the best seen are not tried once so many were, of slow answers and of
others: their rates follow what was seen too."""
SLOW_S = 2.0
"""Answers that take longer are slow: they are measured only twice."""
NEAR = 8
"""Chunks by which the chosen split's neighbours differ from it."""


class Way(NamedTuple):
    """loaders: who loads; recomputed: stored chunks that are computed again; strategy: None: as the planner chooses."""

    loaders: Loaders
    recomputed: int
    strategy: str | None


class RankedAnswer(NamedTuple):
    """ttft_s: seconds to the first token; strategy of the last slice; reason of the restore, "" without one. way: how
    it was computed. predicted_s: what was predicted of the restore, None without one."""

    ttft_s: float
    strategy: str
    reason: str
    way: Way
    predicted_s: float | None = None


@dataclass(slots=True)
class RankedTestbed:
    """Ranks on this machine, each with a link of its own to a directory that all read, so that any may load any chunk;
    `stored` of the `tokens` tokens of each prompt are there, the rest is new each time. Raises ValueError for settings
    that cannot work."""

    shape: CheckpointShape
    folder: Path
    ranks: int
    gbps: float | None
    tokens: int
    stored: int
    latency_ms: float = 0.0
    _llm: LLM = field(init=False)
    _stored: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory)
    _prefix: list[int] = field(init=False)
    cold_s: float | None = None
    _runs: dict[Loaders, StoredRun] = field(default_factory=dict)
    _draw: random.Random = field(default_factory=lambda: random.Random(0))
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        if not (self.folder / "config.json").exists():
            write_checkpoint(self.shape, self.folder)
        wide = 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim * ELEMENT_BYTES
        self._llm = LLM(
            str(self.folder), dtype="bfloat16", context_parallel_size=self.ranks, kv_link_gbps=self.gbps,
            kv_link_latency_ms=self.latency_ms, kv_cache_tokens=self.tokens + 4 * CHUNK,
            kv_offload_path=self._stored.name, kv_offload_write="ended",
            kv_offload_disk_size=max(0.1, 8 * self.tokens * wide / 2**30), max_model_len=self.tokens + 2 * CHUNK,
        )  # fmt: skip
        self._prefix = self._some(self.stored)
        if self.stored:
            self.cold_s = self.ask(None).ttft_s

    @property
    def driver(self) -> Driver:
        driver = self._llm.engine.loaded.executor
        assert isinstance(driver, Driver), "the engine has several ranks"
        return driver

    @property
    def offload(self) -> StoredPrefixes:
        assert self._llm.engine.offload is not None, "the engine was opened with a tier"
        return self._llm.engine.offload

    def _some(self, count: int) -> list[int]:
        return [self._draw.randrange(10, 2000) for _ in range(count)]

    def ask(self, way: Way | None) -> RankedAnswer:
        """Answers the prompt in this way, or as the engine chooses. Afterwards the prompt's beginning is stored and no
        chunk is in the pool. Raises ValueError where what was stored did not come back."""
        self.driver.allowed = OFFERED if way is None or way.strategy is None else (way.strategy,)
        asked: list[tuple[Split, StoredRun]] = []

        def choose(run: StoredRun, profile: Profile, most: int) -> Split:
            self._runs[loaders_of(run)] = run
            asked.append(((restore_split if way is None else _forced(way))(run, profile, most), run))
            return asked[-1][0]

        self.offload.choose = choose
        core, failures = self._llm.engine, self.offload.counters.failures
        prompt = self._prefix + self._some(self.tokens - self.stored + 1)
        name = str(next(self._ids))
        began = time.perf_counter()
        core.add(Request(name, prompt, ONE, arrival_s=time.monotonic()))
        (sequence,) = core.scheduler.waiting
        while not core.step():
            pass
        seconds = time.perf_counter() - began
        if not self.offload.writeback.wait(STORE_S) or not self.offload.tiers.flush(STORE_S):
            raise ValueError(f"the prompt was not stored within {STORE_S:.0f} s; see the log")
        core.cache.tree.clear()
        if self.offload.counters.failures > failures:
            raise ValueError("the stored chunks did not come back whole; see the log")
        if not asked:
            return RankedAnswer(seconds, sequence.strategy, "", Way("one", 0, sequence.strategy))
        split, run = asked[best_way(asked)]
        taken = Way(loaders_of(run) if split.load else "one", split.tokens, sequence.strategy)
        return RankedAnswer(seconds, sequence.strategy, sequence.restore_reason, taken, split.predicted_s)

    def predicted(self, way: Way) -> float:
        """Seconds, by the rates as they are now; NEVER where nobody can load like that."""
        profile, most = self.offload.profile, self.offload.max_batch_tokens
        assert profile.by_strategy is not None and way.strategy is not None
        run = self._runs.get(way.loaders)
        if run is None or way.recomputed == run.chunks:
            return float(profile.by_strategy.by_strategy(0, self.tokens + 1).get(way.strategy, NEVER))
        return predict(run, profile, way.recomputed, 0, most, way.strategy).seconds

    def close(self) -> None:
        self._llm.close()
        self._stored.cleanup()


def loaders_of(run: StoredRun) -> Loaders:
    return "all" if len(set(run.ranks)) > 1 else "one"


def _forced(way: Way) -> Choose:
    """A solver that takes this way alone."""

    def choose(run: StoredRun, profile: Profile, most: int) -> Split:
        recomputed = min(way.recomputed, run.chunks)
        load, wrong = run.chunks - recomputed, loaders_of(run) != way.loaders
        if wrong and load:
            return Split(recomputed, 0, load, NEVER, "given")
        closing = way.strategy if load and way.strategy is not None else ""
        found = predict(run, profile, recomputed, 0, most, closing)
        return Split(recomputed, 0, load, found.seconds, "given", closing)

    return choose


def ways(chunks: int) -> list[Way]:
    """The sweep: quarters of the stored chunks, each way to load, each strategy."""
    if not chunks:
        return [Way("one", 0, name) for name in OFFERED if name != "ring-q"]
    some = sorted({chunks * part // QUARTERS for part in range(QUARTERS)})
    loads: Sequence[Loaders] = ("one", "all")
    found = [Way(loaders, count, name) for loaders in loads for count in some for name in OFFERED]
    return found + [Way("one", chunks, name) for name in OFFERED if name != "ring-q"]


def around(way: Way, chunks: int) -> list[Way]:
    """The same with a little more or less of it computed again."""
    some = [way.recomputed - NEAR, way.recomputed + NEAR] if way.recomputed < chunks else []
    return [way._replace(recomputed=count) for count in some if 0 <= count < chunks]


def swept(testbed: RankedTestbed, some: Sequence[Way], slow: bool) -> dict[Way, float]:
    """Seconds of the ways that may be the best: the likeliest next, by what was seen so far."""
    left, found, least = list(some), dict[Way, float](), LEAST[not slow]
    while left:
        predicted = {way: testbed.predicted(way) for way in left}
        way = min(left, key=predicted.__getitem__)
        if predicted[way] == NEVER or (len(found) >= least and predicted[way] > HOPELESS * min(found.values())):
            break
        left.remove(way)
        found[way] = testbed.ask(way).ttft_s
    return found


def measured(testbed: RankedTestbed, repeats: int) -> Case:
    """One case: warmed up, swept, and what matters measured again in turns. Answers of one and the same way are one
    sample, whoever chose it."""
    chunks = testbed.stored // CHUNK
    one, recompute = Way("one", 0, "single"), Way("one", chunks, None)
    warm = [testbed.ask(None)]
    slow = warm[0].ttft_s > SLOW_S
    warm += [testbed.ask(None) for _ in range(1 if slow else WARM - 1)]
    first = swept(testbed, [*ways(chunks), *around(warm[-1].way, chunks)], slow)
    finalists = sorted(first, key=first.__getitem__)[:FINALISTS]
    asked: list[Way | None] = [None, *finalists, one]
    if testbed.cold_s is None or testbed.cold_s < 2 * warm[-1].ttft_s:
        asked.append(recompute)
    found: dict[Way | None, list[RankedAnswer]] = {way: [] for way in asked}
    for _ in range(2 if slow else repeats):
        for way, answers in found.items():
            answers.append(testbed.ask(way))
    return _summed(testbed, found, one, recompute) | {"swept": len(first), "repeats": repeats}


def _summed(testbed: RankedTestbed, found: dict[Way | None, list[RankedAnswer]], one: Way, recompute: Way) -> Case:
    chosen = found[None][-1]
    same = [each for way in found if way is None or way == chosen.way for each in found[way]]
    chosen_s = statistics.median(each.ttft_s for each in same if each.way == chosen.way)
    middle = {way: statistics.median(each.ttft_s for each in seen) for way, seen in found.items() if way is not None}
    middle[chosen.way] = chosen_s
    all_s = middle.get(recompute, testbed.cold_s)
    assert all_s is not None, "it was measured now or as the prompt was stored"
    best, end_s = min(middle, key=middle.__getitem__), min(middle[one], all_s)
    return {
        "stored": testbed.stored, "chosen_s": chosen_s, "strategy": chosen.strategy, "reason": chosen.reason,
        "chosen_loaders": chosen.way.loaders, "chosen_recomputed": chosen.way.recomputed,
        "predicted_s": chosen.predicted_s, "best_s": middle[best], "best_loaders": best.loaders,
        "best_recomputed": best.recomputed, "best_strategy": best.strategy, "to_best": chosen_s / middle[best],
        "one_s": middle[one], "all_s": all_s, "to_ends": chosen_s / end_s, "gain": end_s / chosen_s,
    }  # fmt: skip
