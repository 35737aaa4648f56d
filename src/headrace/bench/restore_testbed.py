"""An engine whose prompt is stored behind a link, to be restored again and again by any split."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from headrace.bench.shapes import CheckpointShape, write_checkpoint
from headrace.engine.llm import LLM
from headrace.engine.stored_prefixes import StoredPrefixes
from headrace.offload.restore.run_costs import Prediction, StoredRun
from headrace.offload.restore.solver import Split, predict, restore_split
from headrace.planner.profile import Profile
from headrace.types import CHUNK, Request, SamplingParams

ELEMENT_BYTES = 2
STORE_S = 60.0
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class SplitPoint(NamedTuple):
    """A split: chunks recomputed from tokens, and chunks projected; the rest is loaded."""

    tokens: int
    x: int


class TimedRestore(NamedTuple):
    """One restore. seconds: from the solver's call to the first token; ttft_s: from the request to it. link_s: the
    copy stream was at work, of which the engine waited waited_s. predicted: by the rates as they were then."""

    seconds: float
    ttft_s: float
    link_s: float
    waited_s: float
    predicted: Prediction


@dataclass(slots=True)
class RestoreTestbed:
    """Opens an engine of a shape whose host tier lies behind a link, prefills a prompt of `chunks` chunks and `suffix`
    tokens, and has it stored. gbps None: as fast as memory is. Raises ValueError for settings that cannot work."""

    shape: CheckpointShape
    folder: Path
    gbps: float | None
    chunks: int
    suffix: int
    latency_ms: float = 0.0
    threads: int | None = None
    max_batch_tokens: int = 2048
    _llm: LLM = field(init=False)
    _prompt: list[int] = field(init=False)
    _ids: itertools.count[int] = field(default_factory=itertools.count)
    _asked: tuple[float, Prediction] | None = None

    def __post_init__(self) -> None:
        if self.chunks < 1 or self.suffix < 1:
            raise ValueError(f"a restore needs at least one chunk and one new token, got {self.chunks}, {self.suffix}")
        if not (self.folder / "config.json").exists():
            write_checkpoint(self.shape, self.folder)
        room = (self.chunks + 2) * CHUNK
        wide = self.shape.layers * (2 * self.shape.kv_heads * self.shape.head_dim + self.shape.hidden) * ELEMENT_BYTES
        self._llm = LLM(
            str(self.folder), dtype="bfloat16", kv_cache_tokens=room + (self.suffix // CHUNK + 2) * CHUNK,
            kv_offloading_size=max(0.1, 1.5 * room * wide / 2**30), kv_link_gbps=self.gbps,
            kv_link_latency_ms=self.latency_ms, max_batch_tokens=self.max_batch_tokens, threads=self.threads,
        )  # fmt: skip
        draw = random.Random(0)
        self._prompt = [draw.randrange(10, 2000) for _ in range(self.chunks * CHUNK + self.suffix)]
        self.ask()

    @property
    def offload(self) -> StoredPrefixes:
        assert self._llm.engine.offload is not None, "the engine was opened with a tier"
        return self._llm.engine.offload

    def ask(self) -> float:
        """Seconds to the first token; afterwards all chunks are stored and none is in the pool."""
        core = self._llm.engine
        began = time.perf_counter()
        core.add(Request(str(next(self._ids)), self._prompt, ONE, arrival_s=time.monotonic()))
        while not core.step():
            pass
        seconds = time.perf_counter() - began
        self._forget()
        return seconds

    def _forget(self) -> None:
        if not self.offload.writeback.wait(STORE_S) or not self.offload.tiers.flush(STORE_S):
            raise ValueError(f"the prompt was not stored within {STORE_S:.0f} s; see the log")
        self._llm.engine.cache.tree.clear()

    def time(self, at: SplitPoint) -> TimedRestore:
        """Restores by this split, whatever the solver thinks of it. Raises ValueError where not all of it came back."""
        counters = self.offload.counters
        link, waited, failures = counters.link_s, counters.waited_s, counters.failures
        self._asked = None
        self.offload.choose = self._choosing(lambda run, _: at)
        began = time.perf_counter()
        ttft = self.ask()
        if self._asked is None or counters.failures > failures:
            raise ValueError("the stored prompt did not come back whole; see the log")
        asked, predicted = self._asked
        return TimedRestore(ttft - (asked - began), ttft, counters.link_s - link, counters.waited_s - waited, predicted)

    def choice(self) -> tuple[StoredRun, Split]:
        """What the solver takes by the rates as they are now."""
        found: list[tuple[StoredRun, Split]] = []

        def choose(run: StoredRun, profile: Profile) -> SplitPoint:
            found.append((run, restore_split(run, profile, self.max_batch_tokens)))
            return SplitPoint(found[0][1].tokens, found[0][1].x)

        self.offload.choose = self._choosing(choose)
        self.ask()
        if not found:
            raise ValueError("no stored chunk was found; see the log")
        return found[0]

    def _choosing(self, pick: Callable[[StoredRun, Profile], SplitPoint]) -> Callable[[StoredRun, Profile, int], Split]:
        def choose(run: StoredRun, profile: Profile, most: int) -> Split:
            at = pick(run, profile)
            predicted = predict(run, profile, at.tokens, at.x, most)
            self._asked = time.perf_counter(), predicted
            return Split(at.tokens, at.x, run.chunks - at.tokens - at.x, predicted.seconds, "given")

        return choose

    def rates(self) -> dict[str, float]:
        return self.offload.profile.as_dict()

    def close(self) -> None:
        self._llm.close()
