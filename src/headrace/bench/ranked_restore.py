"""A partly stored prompt over several ranks: what the engine chooses beside every other way to do it.

A way is who loads the stored chunks (one rank, or all of them block by block), how many of these are computed again,
the strategy of what is computed, and where a chain is cut. The engine's own choice, the best few of a sweep, restoring
on one rank and recomputing on all are measured in turns, the hopeless ones once. The prompts of a link share their
beginning, so that it is computed and stored only once.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

from headrace.bench.benchmark import Case
from headrace.bench.restore_testbed import ELEMENT_BYTES, ONE, STORE_S
from headrace.bench.shapes import CheckpointShape, write_checkpoint
from headrace.engine.driver import Advise, Driver
from headrace.engine.llm import LLM
from headrace.engine.stored_prefixes import Choose, StoredPrefixes
from headrace.offload.restore.ranked_plan import best_way
from headrace.offload.restore.run_costs import StoredRun
from headrace.offload.restore.solver import Split, predict, restore_split
from headrace.planner.choice import StrategyChoice
from headrace.planner.profile import Profile
from headrace.strategies import OFFERED
from headrace.types import CHUNK, Request

Loaders = Literal["one", "all"]
NEVER = float("inf")
FINALISTS = 2
WARM = 3
QUARTERS = 4
HOPELESS, LEAST = 1.2, (4, 8)
"""Ways that are predicted to take so many times the best seen are not tried once so many were, of slow answers and of
others: their rates follow what was seen too."""
LOST = 1.5
"""A way that took so many times the best is not measured again."""
SLOW_S, SWEEP_S, ROW_S = 2.0, 40.0, 60.0
"""Answers that take longer are slow, and warmed up for only once. Seconds of a row after which no way is tried for the
first time, and none is repeated."""
NEAR = 8
"""Chunks by which the chosen split's neighbours differ from it."""
SHIFTS = (-0.08, 0.08)
"""Shares of the tokens by which a chain's inner bounds are moved from where the planner cuts it."""


class Way(NamedTuple):
    """loaders: who loads; recomputed: stored chunks that are computed again; strategy: None: as the planner chooses.
    shift: of a chain's inner bounds, as a share of the tokens that it computes."""

    loaders: Loaders
    recomputed: int
    strategy: str | None
    shift: float = 0.0


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
    `stored` of the `tokens` tokens of each prompt are there (see `store`), the rest is new each time. Raises ValueError
    for settings that cannot work.

    cold_s: seconds of the prompt that was stored; None before."""

    shape: CheckpointShape
    folder: Path
    ranks: int
    gbps: float | None
    tokens: int
    latency_ms: float = 0.0
    stored: int = 0
    cold_s: float | None = None
    _llm: LLM = field(init=False)
    _advise: Advise = field(init=False)
    _stored: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory)
    _prefix: list[int] = field(default_factory=list)
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
        self._advise = self.driver.advise

    def store(self, tokens: int) -> None:
        """From now on so many tokens of each prompt are stored: the beginning of one that is computed cold at first."""
        if tokens and not self._prefix:
            self._prefix, self.stored = self._some(self.tokens), self.tokens
            self.cold_s = self.ask(None).ttft_s
        self.stored = tokens
        self._runs.clear()

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
        self.driver.advise = self._advise if way is None or not way.shift else partial(self._shifted, way.shift)
        asked: list[tuple[Split, StoredRun]] = []

        def choose(run: StoredRun, profile: Profile, most: int) -> Split:
            self._runs[loaders_of(run)] = run
            asked.append(((restore_split if way is None else _forced(way))(run, profile, most), run))
            return asked[-1][0]

        self.offload.choose = choose
        core, failures = self._llm.engine, self.offload.counters.failures
        prompt = self._prefix[: self.stored] + self._some(self.tokens - self.stored + 1)
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

    def _shifted(self, shift: float, tokens: int, start: int, *more: Any) -> StrategyChoice:
        """The planner's choice, with a chain that is cut elsewhere."""
        choice = self._advise(tokens, start, *more)
        return replace(choice, bounds=moved(choice.bounds, shift)) if choice.strategy == "chain" else choice

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


def moved(bounds: Sequence[int], shift: float) -> tuple[int, ...]:
    """A chain's bounds with its inner ones moved by a share of its tokens, in whole chunks."""
    first, *inner, last = bounds
    by = round(shift * (last - first) / CHUNK) * CHUNK
    return (first, *(min(max(bound + by, first), last) for bound in inner), last)


def shifted(found: Mapping[Way, float]) -> list[Way]:
    """Other cuts of the fastest chain, where that is worth a try."""
    chains = [way for way in found if way.strategy == "chain" and found[way] < HOPELESS * min(found.values())]
    return [min(chains, key=found.__getitem__)._replace(shift=shift) for shift in SHIFTS] if chains else []


Answers = dict[Way | None, list[RankedAnswer]]


def swept(testbed: RankedTestbed, some: Sequence[Way], slow: bool, until_s: float) -> Answers:
    """Answers by the ways that may be the best: the likeliest next, by what was seen so far; then other cuts of a
    chain. At least two, and none for the first time after `until_s` (time.monotonic)."""
    left, found, least = list(some), Answers(), LEAST[not slow]
    while left and (len(found) < 2 or time.monotonic() < until_s):
        predicted = {way: testbed.predicted(way) for way in left}
        way = min(left, key=predicted.__getitem__)
        if predicted[way] == NEVER or (
            len(found) >= least and predicted[way] > HOPELESS * min(_seconds(found).values())
        ):
            break
        left.remove(way)
        found[way] = [testbed.ask(way)]
    for way in shifted(_seconds(found)):
        if time.monotonic() < until_s:
            found[way] = [testbed.ask(way)]
    return found


def _seconds(found: Answers) -> dict[Way, float]:
    return {way: statistics.median(each.ttft_s for each in seen) for way, seen in found.items() if way and seen}


def measured(testbed: RankedTestbed, repeats: int) -> Case:
    """One case: warmed up, swept, and what matters measured again in turns. Answers of one and the same way are one
    sample, whoever chose it; the first of each way counts."""
    began, chunks = time.monotonic(), testbed.stored // CHUNK
    one, recompute = Way("one", 0, "single"), Way("one", chunks, None)
    last = testbed.ask(None)
    slow = last.ttft_s > SLOW_S
    for _ in range(0 if slow else WARM - 1):
        last = testbed.ask(None)
    found = swept(testbed, [*ways(chunks), *around(last.way, chunks)], slow, began + SWEEP_S)
    tried = len(found)
    seconds = _seconds(found)
    finalists = sorted(seconds, key=seconds.__getitem__)[:FINALISTS]
    asked: list[Way | None] = [None, *finalists, one]
    if testbed.cold_s is None or testbed.cold_s < 2 * last.ttft_s:
        asked.append(recompute)
    found[None] = [last]
    for way in asked:
        if way not in found:
            found[way] = [testbed.ask(way)]
    for turn in range(1, repeats):
        for way in dict.fromkeys(asked):
            least = min(each.ttft_s for each in found[way])
            late = turn > 1 and time.monotonic() > began + ROW_S
            if not late and least <= LOST * min(_seconds(found).values()):
                found[way].append(testbed.ask(way))
    kept: Answers = {way: found[way] for way in asked}
    return _summed(testbed, kept, one, recompute) | {
        "swept": tried, "repeats": max(map(len, kept.values())), "row_s": time.monotonic() - began,
    }  # fmt: skip


def _summed(testbed: RankedTestbed, found: Answers, one: Way, recompute: Way) -> Case:
    chosen = found[None][-1]
    same = [each for way in found if way is None or way == chosen.way for each in found[way]]
    chosen_s = statistics.median(each.ttft_s for each in same if each.way == chosen.way)
    middle = _seconds(found)
    middle[chosen.way] = chosen_s
    all_s = middle.get(recompute, testbed.cold_s)
    assert all_s is not None, "it was measured now or as the prompt was stored"
    best, end_s = min(middle, key=middle.__getitem__), min(middle[one], all_s)
    return {
        "stored": testbed.stored, "chosen_s": chosen_s, "strategy": chosen.strategy, "reason": chosen.reason,
        "chosen_loaders": chosen.way.loaders, "chosen_recomputed": chosen.way.recomputed,
        "predicted_s": chosen.predicted_s, "best_s": middle[best], "best_loaders": best.loaders,
        "best_recomputed": best.recomputed, "best_strategy": best.strategy,
        "best_shift": best.shift, "to_best": chosen_s / middle[best],
        "one_s": middle[one], "all_s": all_s, "to_ends": chosen_s / end_s, "gain": end_s / chosen_s,
    }  # fmt: skip
