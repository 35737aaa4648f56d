"""Engines that offload, with a solver that always takes the same shares, and answers watched until all is stored."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headrace import LLM, SamplingParams
from headrace.engine.stored_prefixes import Choose
from headrace.offload.restore.run_costs import StoredRun
from headrace.offload.restore.solver import Split
from tests.support.traces import Trace, run

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MIXES = {"load": (0.0, 0.0), "project": (0.0, 1.0), "recompute": (1.0, 0.0), "all three": (0.35, 0.35)}
"""Shares of a run that are recomputed from tokens, and projected."""


def forced(tokens: float, x: float) -> Choose:
    """A solver that always takes these shares of a run, each at least one chunk if it is not zero."""

    def choose(run: StoredRun, costs: object, most: int) -> Split:
        recomputed = min(run.chunks, max(round(tokens * run.chunks), int(tokens > 0)))
        projected = min(run.chunks - recomputed, max(round(x * run.chunks), int(x > 0)))
        if False in run.has_x[recomputed:]:
            projected = min(projected, run.has_x.index(False, recomputed) - recomputed)
        assert run.x_bytes is not None or not projected, "no activations are stored"
        return Split(recomputed, projected, run.chunks - recomputed - projected, 0.0, "forced")

    return choose


def projecting(run: StoredRun, costs: object, most: int) -> Split:
    """Projects the first stretch of chunks that have activations; recomputes what comes before, loads the rest."""
    has = list(run.has_x or [run.x_bytes is not None] * run.chunks)
    first = has.index(True) if True in has else 0
    count = [*has, False].index(False, first) - first
    return Split(first, count, run.chunks - first - count, 0.0, "forced")


def engine(model: str | Path, **settings: Any) -> LLM:
    return LLM(str(model), **{"dtype": "bfloat16", "kv_cache_tokens": 8192, "max_batch_tokens": 256, **settings})


def offloading(model: str | Path, mix: str = "load", **settings: Any) -> LLM:
    llm = engine(model, **{"kv_offloading_size": 0.05, "kv_offload_activations": "on", **settings})
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(*MIXES[mix])
    return llm


def stored(llm: LLM) -> None:
    """Returns when all is stored. The thread that stores yields to all others: on a busy machine no number of seconds
    is enough, and of one that hangs pytest's own limit tells."""
    offload = llm.engine.offload
    assert offload is not None
    while not (offload.writeback.wait(1) and offload.tiers.flush(1)):
        pass


def look_at_once(llm: LLM) -> None:
    """Has each lookup end before the step goes on: sequences that wait for a slow tier do not crowd the pool."""
    source: Any = llm.engine.offload.source  # type: ignore[union-attr]
    look = source.look

    def looked(*asked: Any) -> Any:
        lookup = look(*asked)
        while not lookup.done:
            lookup.wait_briefly(1)
        return lookup

    source.look = looked


def flush(llm: LLM) -> None:
    """Everything stored, and nothing left in the pool."""
    stored(llm)
    llm.engine.cache.tree.clear()
    llm.engine.cache.check()


def prompts_of(llm: LLM, seed: int = 0) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(10, llm.capacity.vocab_size, (460,), generator=g).tolist()
    return [tokens[:400], tokens[:300] + tokens[310:350], tokens[5:135]]


def answer(llm: LLM, prompts: list[list[int]], params: SamplingParams = PARAMS) -> list[Trace]:
    """One after the other, each written back before the next begins."""
    traces = []
    for prompt in prompts:
        traces += watched(llm, [prompt], params)
    return traces


def watched(
    llm: LLM,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams] = PARAMS,
    adapters: str | list[str] = "",
) -> list[Trace]:
    """traces.run, which wants no chunk held at its end."""
    traces: list[Trace] = []
    closed: Callable[[], None] = llm.engine.scheduler.check

    def check() -> None:
        while llm.engine.offload is not None and llm.engine.offload.pending:
            llm.engine.offload.settle()
            time.sleep(0.001)
        closed()

    llm.engine.scheduler.check = check  # type: ignore[method-assign]
    try:
        traces = run(llm, prompts, params, adapters)
    finally:
        llm.engine.scheduler.check = closed  # type: ignore[method-assign]
    return traces


def counters(llm: LLM) -> Any:
    assert llm.engine.offload is not None
    return llm.engine.offload.counters
