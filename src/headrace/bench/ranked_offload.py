"""`headrace bench offload --ranks N`: streamed decoding on N ranks, each with its share of KV behind a link of its own,
beside one rank with all of it behind one such link."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.bench.benchmark import Case
from headrace.bench.limits import alternate, threads
from headrace.bench.table import Column
from headrace.engine.driver import Driver
from headrace.engine.llm import LLM
from headrace.types import Request, SamplingParams

PLACED: Mapping[str, str] = {"sequences": "single", "blocks": "ring-kv"}
"""How KV is spread over the ranks -> the strategy whose prefill leaves it so: whole sequences, or blocks of each."""

COLUMNS = (
    Column("schedule", "name"),
    Column("link", "gbps", "GB/s", ",g", width=5),
    Column("spread", width=len("sequences")),
    Column("one rank", "one_tokens_s", "tokens/s", ",.2f"),
    Column("ranks", "tokens_s", "tokens/s", ",.2f"),
    Column("gain", unit="times", form=",.2f", limit=1.7, bound="at least"),
    Column("waited", "waited_share", "%", ",.0f", 100),
    Column("largest", "largest_share", "of KV, %", ",.0f", 100),
)
"""waited: rank 0's part of the time in which it waited for KV. largest: what the rank with most of the KV has of it."""


class Decoding(NamedTuple):
    """What is decoded: sequences of `context` tokens at first, `steps` tokens of each in each of at most `rounds`."""

    model: str
    sequences: int
    context: int
    rounds: int
    steps: int

    @property
    def length(self) -> int:
        return self.context + self.rounds * self.steps + 16


@dataclass(slots=True)
class StreamingEngine:
    """An engine that, within a `with` block, has all sequences prefilled and is ready to decode. threads: of a rank."""

    decoding: Decoding
    settings: dict[str, Any]
    threads: int
    runs: list[float] = field(default_factory=list)
    _llm: LLM = field(init=False)

    def __enter__(self) -> StreamingEngine:
        asked = self.decoding
        self._llm = LLM(
            asked.model, dtype="bfloat16", max_model_len=asked.length, max_sequences=asked.sequences,
            enable_prefix_caching=False, kv_offloading_size=8.0, offload_staging_mb=4096, threads=self.threads,
            **self.settings,
        )  # fmt: skip
        try:
            self._prefill()
        except BaseException:
            self._llm.close()
            raise
        return self

    def _prefill(self) -> None:
        rng, engine, asked = random.Random(0), self._llm.engine, self.decoding
        params = SamplingParams(temperature=0.0, max_tokens=asked.length - asked.context, ignore_eos=True)
        for index in range(asked.sequences):
            prompt = [rng.randrange(10, self._llm.capacity.vocab_size) for _ in range(asked.context)]
            engine.add(Request(str(index), prompt, params, arrival_s=time.monotonic()))
        while engine.scheduler.waiting or any(each.remaining > 1 for each in engine.scheduler.running):
            engine.step()

    def decode(self) -> None:
        """A round, whose tokens/s are noted."""
        began, tokens = time.perf_counter(), 0
        with threads(self.threads):
            for _ in range(self.decoding.steps):
                tokens += len(self._llm.engine.step())
        self.runs.append(tokens / (time.perf_counter() - began))

    @property
    def waited_s(self) -> float:
        """Seconds that rank 0 has waited for what comes in."""
        executor: Any = self._llm.engine.loaded.executor
        own: Any = executor.rank.storage if isinstance(executor, Driver) else executor.streamer.transfers
        return float(own.totals.waited_s)

    @property
    def largest_share(self) -> float:
        """What the rank that has most of the KV has of it."""
        pool = self._llm.engine.cache.pool
        held = [pool.per_rank - pool.free_of(rank) for rank in range(pool.ranks)]
        return max(held) / sum(held)

    def __exit__(self, *_: object) -> None:
        for request in list(self._llm.engine._active):
            self._llm.engine.abort(request)
        self._llm.close()


def measured(one: StreamingEngine, ranks: int, spread: str, repeats: int) -> Case:
    """One case: rounds of the engine with one rank and of one with several, in turns. spread: of PLACED."""
    count = max(1, one.threads // ranks)
    several = {"context_parallel_size": ranks, "prefill_strategy": PLACED[spread]}
    decoding = one.decoding
    with StreamingEngine(decoding, one.settings | several, count) as other:
        one.runs.clear()
        waited = other.waited_s
        alternate({"one": one.decode, "ranks": other.decode}, repeats)
        waited, largest = other.waited_s - waited, other.largest_share
    spent = sum(decoding.steps * decoding.sequences / run for run in other.runs)
    alone, together = (statistics.median(each.runs[1:]) for each in (one, other))
    return {
        "ranks": ranks, "spread": spread, "sequences": decoding.sequences, "context": decoding.context,
        "one_tokens_s": alone, "tokens_s": together, "gain": together / alone, "waited_share": waited / spent,
        "largest_share": largest, "one_runs": [round(run, 3) for run in one.runs[1:]],
        "runs": [round(run, 3) for run in other.runs[1:]],
    }  # fmt: skip
