"""`headrace bench structured`: what the shape of an answer costs a decode step, and what forced tokens save."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.bench.benchmark import Benchmark, Case, one_of, option
from headrace.bench.table import Column
from headrace.bench.vocabularies import with_tokenizer
from headrace.console import working
from headrace.types import Request, SamplingParams, Structured

PROMPT = 48
GOAL = 0.03
"""Most that a shape may add to a step."""

TEXT = Structured(regex=r"(.|\n)*")
RECORD = Structured(
    json={
        "type": "object",
        "properties": {"title": {"type": "string"}, "text": {"type": "string"}, "pages": {"type": "integer"}},
        "required": ["title", "text", "pages"],
        "additionalProperties": False,
    }
)
CHECKLIST = Structured(
    json={
        "type": "object",
        "properties": {f"requirement number {n} is met": {"type": "boolean"} for n in range(1, 9)},
        "required": [f"requirement number {n} is met" for n in range(1, 9)],
        "additionalProperties": False,
    }
)
SAMPLED = SamplingParams(temperature=1.0, seed=1, max_tokens=4096, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4096, ignore_eos=True)
KINDS: dict[str, tuple[SamplingParams, SamplingParams]] = {
    "any text": (GREEDY, replace(GREEDY, structured=TEXT)),
    "record": (GREEDY, replace(GREEDY, structured=RECORD)),
    "any text, sampled": (SAMPLED, replace(SAMPLED, structured=TEXT)),
}
"""Parameters without a shape and with one."""


@dataclass
class StructuredBench(Benchmark):
    """What the shape of an answer costs a decode step.

    Beside the same without a shape, in turns. The last line is of whole answers with many forced tokens: sampled one by
    one, and appended at once.
    """

    name = "structured"
    model: str = option("Shape with random weights: S1, S2, S3.", "S1", argument=True, parse=one_of("S1", "S2", "S3"))
    sequences: int = option("Sequences decoded together.", 16, min=1)
    repeats: int = option("Rounds, with a shape and without in turn.", 24, min=1)
    steps: int = option("Decode steps of each in a round.", 4, min=1)

    def cases(self) -> Iterator[Case]:
        from headrace.engine.llm import LLM

        with tempfile.TemporaryDirectory() as folder:
            with working("writing a tokenizer"):
                with_tokenizer(self.model, Path(folder))
            most = 2 * self.sequences
            with LLM(folder, dtype="bfloat16", kv_cache_tokens=most * 512, max_sequences=most) as llm:
                for name, pair in KINDS.items():
                    self.progress(name)
                    yield self._case(llm, name, pair)
                self.progress("checklist")
                yield self._jumps(llm)

    def case_count(self) -> int:
        return len(KINDS) + 1

    def columns(self) -> tuple[Column, ...]:
        return (
            Column("answer", "name", width=len("any text, sampled")),
            Column("without", "free_ms", "ms", ",.2f"),
            Column("shaped", "shaped_ms", "ms", ",.2f"),
            Column("more", "overhead", "%", ",.2f", 100, limit=lambda case: case.get("limit"), bound="at most"),
            Column("waited", "waited_ms", "ms", ",.3f"),
        )

    def _case(self, llm: Any, name: str, pair: tuple[SamplingParams, SamplingParams]) -> Case:
        """The same engine decodes one group of sequences and the other in turn, a few steps each, so that both meet the
        same disturbances."""
        engine = llm.engine
        groups = [self._group(llm, params, seed) for seed, params in enumerate(pair)]
        times: tuple[list[float], list[float]] = [], []
        ratios, waited = [], engine.stats().structured.waited_s
        for number in range(self.repeats):
            found = [0.0, 0.0]
            for which in (0, 1) if number % 2 else (1, 0):
                engine.scheduler.running = groups[which]
                block = self._steps(engine)
                found[which] = statistics.median(block)
                times[which].extend(block)
            ratios.append(found[1] / found[0])
        waited = engine.stats().structured.waited_s - waited
        engine.scheduler.running = [*groups[0], *groups[1]]
        for request in list(engine._active):
            engine.abort(request)
        free, shaped = (statistics.median(each) for each in times)
        return {
            "name": name, "model": self.model, "sequences": self.sequences, "steps": len(times[0]),
            "free_ms": 1e3 * free, "shaped_ms": 1e3 * shaped, "overhead": statistics.median(ratios) - 1, "limit": GOAL,
            "waited_ms": 1e3 * waited / len(times[1]),
        }  # fmt: skip

    def _group(self, llm: Any, params: SamplingParams, seed: int) -> list[Any]:
        """Sequences that decode, taken out of the scheduler's turns."""
        engine = llm.engine
        self._add(llm, params, seed)
        while engine.scheduler.waiting or any(each.remaining > 1 for each in engine.scheduler.running):
            engine.step()
        group, engine.scheduler.running = engine.scheduler.running, []
        return list(group)

    def _steps(self, engine: Any) -> list[float]:
        """Seconds of some steps that decode every sequence; the first plans anew, and is left out."""
        times: list[float] = []
        engine.step()
        while len(times) < self.steps:
            began = time.perf_counter()
            deltas = engine.step()
            times.append(time.perf_counter() - began)
            if len(deltas) != self.sequences:
                raise RuntimeError("a sequence has ended before its steps were measured; take fewer repeats")
        return times

    def _add(self, llm: Any, params: SamplingParams, seed: int) -> None:
        source = random.Random(seed)
        for index in range(self.sequences):
            prompt = [source.randrange(300, llm.capacity.vocab_size) for _ in range(PROMPT)]
            llm.engine.add(Request(f"{seed}-{index}", prompt, params, arrival_s=time.monotonic()))

    def _jumps(self, llm: Any) -> Case:
        """Whole answers, most of whose tokens are forced: appended unsampled, or sampled one by one."""
        params = SamplingParams(temperature=0.0, max_tokens=400, structured=CHECKLIST)
        times: tuple[list[float], list[float]] = [], []
        for number in range(2 * max(2, self.repeats // 12)):
            llm.engine.structured.jump_ahead = jumps = number % 4 in (1, 2)
            began = time.perf_counter()
            self._add(llm, params, number // 2)
            while llm.engine.has_work:
                llm.engine.step()
            times[jumps].append(time.perf_counter() - began)
        llm.engine.structured.jump_ahead = True
        stepped, jumped = (statistics.median(each) for each in times)
        return {
            "name": "checklist, whole", "model": self.model, "sequences": self.sequences, "free_ms": 1e3 * stepped,
            "shaped_ms": 1e3 * jumped, "overhead": jumped / stepped - 1, "waited_ms": None, "faster": stepped / jumped,
        }  # fmt: skip
