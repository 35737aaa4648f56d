"""`headrace bench cache`: what the tree and the plan cost, by themselves and as a share of a decode step."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.benchmark import Benchmark, Case, option
from headrace.bench.shapes import SHAPES, write_checkpoint
from headrace.bench.table import Column
from headrace.types import CHUNK

if TYPE_CHECKING:
    from headrace.kv.cache import KVCache

NODES = 100_000
PROMPT = 100_000
SEQUENCES = 256
SHARED = 2048


@dataclass
class CacheBench(Benchmark):
    """Cost of the prefix tree and of the plan of a step.

    Matching a long prompt, and book-keeping as a share of a decode step.
    """

    name = "cache"
    model: str = option(f"Shape of the decode step: {', '.join(SHAPES)} (random weights) or tiny.", "S1")

    def __post_init__(self) -> None:
        if self.model not in (*SHAPES, "tiny"):
            raise ValueError(f"model must be one of {', '.join(SHAPES)}, tiny; got {self.model!r}")

    def cases(self) -> Iterator[Case]:
        self.progress(f"match: a prompt of {PROMPT:,} tokens in a tree of {NODES:,} nodes")
        yield match_case()
        self.progress(f"bookkeeping: {SEQUENCES} sequences of {self.model}")
        yield bookkeeping_case(self.model)

    def case_count(self) -> int:
        return 2

    def columns(self) -> tuple[Column, ...]:
        return (
            Column("case", "name", width=len("bookkeeping")),
            Column("tokens", lambda case: case.get("prompt_tokens", case.get("shared_tokens")), form=","),
            Column("time", _time_ms, "ms", ",.2f", limit="limit_ms", bound="at most"),
            Column("of a step", "share", "%", ".2f", 100, limit="limit", bound="at most"),
            Column("step", "step_ms", "ms", ",.1f", optional=True),
        )


def _time_ms(case: Case) -> float | None:
    return case.get("median_ms", case.get("bookkeeping_ms"))


def match_case(repeats: int = 7) -> Case:
    """Time to match 100,000 tokens, hashing included, against a tree of 100,000 nodes that has all of them."""
    from headrace.kv.cache import KVCache

    rng = random.Random(0)
    prompt = [rng.randrange(32_000) for _ in range(PROMPT)]
    cache = KVCache(NODES + PROMPT // CHUNK + 100)
    _fill(cache, prompt)
    while len(cache.tree.nodes) < NODES:
        _fill(cache, prompt[: 10 * CHUNK] + [rng.randrange(32_000) for _ in range(PROMPT)])
    times = []
    for _ in range(repeats):
        tokens = list(prompt)
        began = time.perf_counter()
        table = cache.open(tokens)
        gained, _ = cache.reuse(table)
        times.append(time.perf_counter() - began)
        assert gained == (PROMPT - 1) // CHUNK * CHUNK, "the whole prompt is in the tree"
        cache.close(table)
    return {
        "name": "match", "tree_nodes": len(cache.tree.nodes), "prompt_tokens": PROMPT,
        "median_ms": round(1e3 * statistics.median(times), 3), "limit_ms": 20,
    }  # fmt: skip


def _fill(cache: KVCache, tokens: list[int]) -> None:
    table = cache.open(tokens)
    cache.reuse(table)
    cache.extend(table, len(tokens) - table.length)
    cache.commit()
    cache.close(table)


def bookkeeping_case(shape: str, steps: int = 40) -> Case:
    """Share of scheduling, tree, plan and commit in a decode step of 256 sequences on 2,048 shared tokens."""
    from headrace.engine.llm import LLM

    with tempfile.TemporaryDirectory() as folder:
        model = "tiny" if shape == "tiny" else str(write_checkpoint(SHAPES[shape], Path(folder) / shape))
        llm = LLM(model, dtype="bfloat16", kv_cache_tokens=SHARED + SEQUENCES * 4 * CHUNK, max_sequences=SEQUENCES)
    clock = _Clock()
    engine = llm.engine
    _start_sequences(llm, steps)
    with clock.watch(engine):
        times = []
        for _ in range(steps):
            clock.spent = 0.0
            began = time.perf_counter()
            assert len(engine.step()) == SEQUENCES, "every step decodes every sequence"
            times.append((time.perf_counter() - began, clock.spent))
    assert clock.met == {"schedule", "commit", "plan"}, "a part of the book-keeping is called otherwise by now"
    for request in list(engine._active):
        engine.abort(request)
    step, book = (statistics.median(column) for column in zip(*times, strict=True))
    share = statistics.median(b / s for s, b in times)
    return {
        "name": "bookkeeping", "model": shape, "sequences": SEQUENCES, "shared_tokens": SHARED,
        "step_ms": round(1e3 * step, 3), "bookkeeping_ms": round(1e3 * book, 3), "share": round(share, 5),
        "limit": None if shape == "tiny" else 0.02,  # whose step is too short to compare
    }  # fmt: skip


def _start_sequences(llm: Any, steps: int) -> None:
    """256 sequences whose own parts differ in length, so that chunks fill at different steps; prefilled."""
    from headrace.types import Request, SamplingParams

    rng = random.Random(1)
    shared = [rng.randrange(10, 2000) for _ in range(SHARED)]
    params = SamplingParams(temperature=0.0, max_tokens=steps + 32, ignore_eos=True)
    for index in range(SEQUENCES):
        own = [rng.randrange(10, 2000) for _ in range(1 + index % CHUNK)]
        llm.engine.add(Request(str(index), shared + own, params, arrival_s=time.monotonic()))
    while any(s.remaining > 1 for s in llm.engine.scheduler.running) or llm.engine.scheduler.waiting:
        llm.engine.step()


class _Clock:
    """Adds up the time spent in scheduling, planning and committing; `met`: which of these it has seen."""

    def __init__(self) -> None:
        self.spent = 0.0
        self.met: set[str] = set()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.met.add(name)
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent += time.perf_counter() - began

        return run

    def watch(self, engine: Any) -> Any:
        from contextlib import ExitStack
        from unittest.mock import patch

        from headrace.attention.plan import Planner

        stack = ExitStack()
        for owner, name in ((engine.scheduler, "schedule"), (engine.cache, "commit"), (Planner, "plan")):
            stack.enter_context(patch.object(owner, name, self.timed(name, getattr(owner, name))))
        return stack
