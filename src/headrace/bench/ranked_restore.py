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
from headrace.offload.restore.rates import Rates
from headrace.offload.restore.solver import Split, StoredRun, predict, restore_split
from headrace.strategies import OFFERED
from headrace.types import CHUNK, Request

Loaders = Literal["one", "all"]
NEVER = float("inf")
FINALISTS = 3
WARM = 2
QUARTERS = 4


class Way(NamedTuple):
    """loaders: who loads; recomputed: stored chunks that are computed again; strategy: None: as the planner chooses."""

    loaders: Loaders
    recomputed: int
    strategy: str | None


class RankedAnswer(NamedTuple):
    """ttft_s: seconds to the first token; strategy of the last slice; reason of the restore, None without one."""

    ttft_s: float
    strategy: str
    reason: str | None


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
            self.ask(None)

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
        self.offload.choose = restore_split if way is None else _forced(way)
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
        return RankedAnswer(seconds, sequence.strategy, sequence.restore_reason)

    def close(self) -> None:
        self._llm.close()
        self._stored.cleanup()


def _forced(way: Way) -> Choose:
    """A solver that takes this way alone."""

    def choose(run: StoredRun, rates: Rates, most: int) -> Split:
        recomputed = min(way.recomputed, run.chunks)
        load, wrong = run.chunks - recomputed, (len(set(run.ranks)) > 1) != (way.loaders == "all")
        if wrong and load:
            return Split(recomputed, 0, load, NEVER, "given")
        closing = way.strategy if load and way.strategy is not None else ""
        found = predict(run, rates, recomputed, 0, most, closing)
        return Split(recomputed, 0, load, found.seconds, "given", closing)

    return choose


def ways(chunks: int) -> list[Way]:
    """The sweep: quarters of the stored chunks, each way to load, each strategy."""
    strategies = [name for name in OFFERED if name != "gather"]
    if not chunks:
        return [Way("one", 0, name) for name in strategies]
    some = sorted({chunks * part // QUARTERS for part in range(QUARTERS)})
    loads: Sequence[Loaders] = ("one", "all")
    found = [Way(loaders, count, name) for loaders in loads for count in some for name in strategies]
    return found + [Way("one", chunks, name) for name in strategies]


def measured(testbed: RankedTestbed, repeats: int) -> Case:
    """One case: warmed up, swept, and what matters measured again in turns."""
    chunks = testbed.stored // CHUNK
    one, recompute = Way("one", 0, "single"), Way("one", chunks, None)
    for _ in range(WARM):
        for way in (one, Way("all", 0, None), Way("all", chunks // 2, None), recompute):
            testbed.ask(way)
    swept = {way: testbed.ask(way).ttft_s for way in ways(chunks)}
    finalists = sorted(swept, key=swept.__getitem__)[:FINALISTS]
    found: dict[Way | None, list[RankedAnswer]] = {way: [] for way in (None, *finalists, one, recompute)}
    for _ in range(repeats):
        for asked, answers in found.items():
            answers.append(testbed.ask(asked))
    middle = {way: statistics.median(each.ttft_s for each in seen) for way, seen in found.items()}
    best = min((way for way in middle if way is not None), key=middle.__getitem__)
    chosen = found[None][-1]
    return {
        "stored": testbed.stored, "chosen_s": middle[None], "strategy": chosen.strategy, "reason": chosen.reason,
        "best_s": middle[best], "best_loaders": best.loaders, "best_recomputed": best.recomputed,
        "best_strategy": best.strategy, "to_best": middle[None] / middle[best], "one_s": middle[one],
        "all_s": middle[recompute], "to_ends": middle[None] / min(middle[one], middle[recompute]),
        "gain": min(middle[one], middle[recompute]) / middle[None], "swept": len(swept), "repeats": repeats,
    }  # fmt: skip
