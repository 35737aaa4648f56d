"""`headrace bench fairness`: how long a tenant's short prompts wait behind another tenant's long ones."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace.bench.benchmark import Benchmark, Case, a_model, option
from headrace.bench.shapes import SHAPES, checkpoint
from headrace.bench.table import Column
from headrace.config.scheduler import SchedulingPolicy
from headrace.types import Request, SamplingParams

GOAL = 0.97
"""Least throughput beside first come, first served."""
BUDGETS = 2
"""A short prompt may wait for so many full steps: the rest of one, and the one that computes it."""
FULL = 0.9
"""A step of this part of the budget counts as full."""
QUICK = (4, 512, 256)
"""Prompts, their tokens and the budget of a quick run."""


@dataclass
class Round:
    """What one run has shown; times in seconds. ttfts: of the short prompts; full: of full steps."""

    ttfts: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)
    own: float = 0.0
    seconds: float = 0.0
    tokens: int = 0


@dataclass
class FairnessBench(Benchmark):
    """Short prompts behind another tenant's long ones.

    One tenant sends all its long prompts at once; from then on another sends a short one each interval. The goal is two
    full steps and the prompt's own time, and no less throughput than by --scheduling-policy fcfs, measured in turns.
    """

    name = "fairness"
    model: str = option(
        "Shape with random weights (S1, S2, S3), 'tiny', or a folder.", "S1", argument=True, parse=a_model
    )
    prompts: int = option("Long prompts.", 200, min=1)
    length: int = option("Tokens of each.", 4096, min=1)
    answer: int = option("Tokens of their answers.", 16, min=1)
    short: int = option("Tokens of a short prompt.", 100, min=1)
    interval: float = option("Seconds between short prompts.", 1.0, min=0.01)
    budget: int = option("max_batch_tokens.", 2048, min=64)
    kv_tokens: int = option("kv_cache_tokens.", 65_536, min=64)
    rounds: int = option("Runs with each policy, in turns.", 1, min=1)
    quick: bool = option("Few and short prompts: shows that it runs, measures nothing.", False)

    def __post_init__(self) -> None:
        self._usual = self.length
        if self.quick:
            self.prompts, self.length, self.budget = QUICK
            self.interval, self.rounds = 0.05, 1
        if self.length + self.answer > self.kv_tokens:
            raise ValueError(f"kv_tokens {self.kv_tokens:,} do not hold a prompt of {self.length:,} and its answer")

    def cases(self) -> Iterator[Case]:
        found: dict[SchedulingPolicy, list[Round]] = {"fcfs": [], "fair": []}
        for number in range(self.rounds):
            for policy in list(found) if number % 2 == 0 else list(reversed(found)):
                self.progress(f"{policy}, round {number + 1}")
                found[policy].append(self._round(policy))
        for policy, rounds in found.items():
            yield self._case(policy, rounds, found["fcfs"])

    def case_count(self) -> int:
        return 2 * self.rounds

    def quick_lengths(self) -> dict[int, int]:
        return {self._usual: self.length} if self.quick else {}

    def columns(self) -> tuple[Column, ...]:
        goal = None if self.quick else GOAL
        return (
            Column("policy", "policy", width=4),
            Column("short prompts", "requests", form=",", optional=True),
            Column("TTFT median", "ttft_median_ms", "ms", ",.0f", optional=True),
            Column("95 %", "ttft_p95_ms", "ms", ",.0f"),
            Column("most", "ttft_max_ms", "ms", ",.0f", limit=lambda case: case.get("limit_ms"), bound="at most"),
            Column("full step", "full_ms", "ms", ",.0f", optional=True),
            Column("prompts", "tokens_s", "tokens/s", ",.0f", optional=True),
            Column("beside fcfs", "ratio", form=".3f", limit=lambda case: goal if case["policy"] == "fair" else None),
        )

    def _case(self, policy: str, rounds: list[Round], first_come: list[Round]) -> Case:
        ttfts = sorted(1e3 * each for one in rounds for each in one.ttfts)
        full = 1e3 * statistics.median(each for one in rounds for each in one.full)
        own = 1e3 * statistics.median(one.own for one in rounds)
        rates = [[one.tokens / one.seconds for one in some] for some in (rounds, first_come)]
        limit = BUDGETS * full + own if policy == "fair" and not self.quick else None
        return {
            "policy": policy, "model": self.model, "prompts": self.prompts, "length": self.length,
            "short": self.short, "interval_s": self.interval, "budget": self.budget, "rounds": self.rounds,
            "requests": len(ttfts), "ttft_median_ms": statistics.median(ttfts),
            "ttft_p95_ms": ttfts[min(len(ttfts) - 1, int(0.95 * len(ttfts)))], "ttft_max_ms": ttfts[-1],
            "full_ms": full, "own_ms": own, "limit_ms": limit, "tokens_s": statistics.median(rates[0]),
            "ratio": statistics.median(one / other for one, other in zip(*rates, strict=True)),
        }  # fmt: skip

    def _round(self, policy: SchedulingPolicy) -> Round:
        from headrace.engine.llm import LLM

        model = str(checkpoint(self.model)) if self.model in SHAPES else self.model
        settings: dict[str, Any] = dict(kv_cache_tokens=self.kv_tokens, max_batch_tokens=self.budget)
        with LLM(model, scheduling_policy=policy, **settings) as llm:
            return _Run(self, llm.engine, llm.capacity.vocab_size).measured()


class _Run:
    """One engine. Requests come between steps, as from a server's process, and count from when they were due."""

    def __init__(self, bench: FairnessBench, engine: Any, vocabulary: int) -> None:
        self.bench, self.engine, self.vocabulary = bench, engine, vocabulary
        self.random = random.Random(7)
        self.found = Round()
        self.due: dict[str, float] = {}

    def measured(self) -> Round:
        bench, found = self.bench, self.found
        for number in range(2):  # the first one warms up
            self._add(f"alone-{number}", bench.short, 1, "few")
            began = time.perf_counter()
            self._step()
            found.own = time.perf_counter() - began
        found.tokens = 0
        began = time.perf_counter()
        for number in range(bench.prompts):
            self._add(f"many-{number}", bench.length, bench.answer, "many")
        next_s, count = time.perf_counter(), 0  # what it took to send them all is nobody's wait
        while self.engine.has_work:
            now = time.perf_counter()
            if now >= next_s and any(name.startswith("many") for name in self.engine._active):
                self.due[f"few-{count}"] = next_s
                self._add(f"few-{count}", bench.short, 1, "few")
                next_s, count = next_s + bench.interval, count + 1
                bench.progress.detail(
                    f"{sum(name.startswith('many') for name in self.engine._active)} long prompts left"
                )
                continue
            self._step()
        found.seconds = time.perf_counter() - began
        return found

    def _add(self, name: str, tokens: int, answer: int, tenant: str) -> None:
        prompt = [self.random.randrange(10, self.vocabulary) for _ in range(tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        self.engine.add(Request(name, prompt, params, cache_salt=tenant, arrival_s=time.monotonic(), tenant=tenant))
        self.found.tokens += tokens

    def _step(self) -> None:
        before = self.engine.stats().tokens.prefilled
        began = time.perf_counter()
        deltas = self.engine.step()
        now = time.perf_counter()
        if self.engine.stats().tokens.prefilled - before >= FULL * self.bench.budget:
            self.found.full.append(now - began)
        self.found.ttfts += [now - self.due.pop(each.request_id) for each in deltas if each.request_id in self.due]
