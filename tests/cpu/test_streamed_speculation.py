"""Speculation where KV is streamed: drafted slices pass through staging as slices of prompts do, with the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from headrace import LLM
from headrace.engine.sequence import Slice
from tests.support.drafting import answered, drafts_from
from tests.support.streamed_ranks import close, streamed_ranks
from tests.support.traces import GREEDY, Trace, engine, prompts_of, run, same

pytestmark = pytest.mark.cpu
LONG = replace(GREEDY, max_tokens=70)
ROW = {"offload_schedule": "row", "kv_offloading_size": 0.1}
COLUMN = {**ROW, "offload_schedule": "column"}
X = {"kv_offload_activations": "on"}
CASES: dict[str, dict[str, Any]] = {
    "row": ROW,
    "column": COLUMN,
    "row-x": {**ROW, **X},
    "column-x-resident": {**COLUMN, **X, "offload_x_resident": True},
    "weights": {**COLUMN, "weight_offload": True},
    "pieces": {**ROW, "offload_staging_mb": 1},
    "int8-private": {**ROW, "kv_cache_dtype": "int8", "enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def given() -> list[list[int]]:
    prompts = prompts_of(engine())
    return [prompts[number] for number in (2, 5, 6, 8, 10, 11, 13)]


Truth = tuple[list[Trace], list[list[int]]]


def truth_of(given: list[list[int]], **settings: Any) -> Truth:
    traces = run(engine(**settings), given, LONG)
    return traces, [answered(prompt, trace) for prompt, trace in zip(given, traces, strict=True)]


@pytest.fixture(scope="module")
def truth(given: list[list[int]]) -> Truth:
    return truth_of(given)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_without(case: str, given: list[list[int]], truth: Truth) -> None:
    """Together, then alone from what lies outside, then behind the answer: rejected rows are nowhere in it."""
    settings = CASES[case]
    traces, known = truth_of(given, kv_cache_dtype="int8") if "int8" in case else truth
    llm = LLM("tiny", dtype="bfloat16", speculative="ngram", **settings)
    streamer = llm.engine.loaded.executor.streamer  # type: ignore[attr-defined]
    if "x" in case:
        streamer.options.share = 0.5
    drafts_from(llm, known)
    same(run(llm, given, LONG), traces)
    same(run(llm, given[3:4], LONG), traces[3:4])
    further = known[3][:-1]
    (behind,) = run(llm, [further], GREEDY)
    assert int(behind[len(further) - 1].argmax()) == known[3][-1]
    stats = llm.engine.stats()
    assert 40 < stats.speculation.accepted < stats.speculation.drafted
    assert (stats.tokens.cached > 0) == ("private" not in case)
    assert (streamer.transfers.totals.projected > 0) == ("x" in case)
    assert (streamer.transfers.staging.capacity < 40) == (case == "pieces")
    llm.close()


RANKED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "context": (2, 1, ROW),
    "context-weights": (2, 1, {**COLUMN, "weight_offload": True}),
    "context-x": (2, 1, {**ROW, **X}),
    "tensor": (1, 2, COLUMN),
    "both": (2, 2, {**ROW, "weight_offload": True}),
}


@pytest.mark.parametrize("case", RANKED)
@pytest.mark.usefixtures("one_thread")
def test_on_several_ranks(case: str, given: list[list[int]], truth: Truth) -> None:
    """Drafted slices that each have one rank are one group, for which chunks and weights are brought once."""
    context, tensor, settings = RANKED[case]
    llm = streamed_ranks(context, tensor, max_model_len=1024, speculative="ngram", **settings)
    driver: Any = llm.engine.loaded.executor
    groups, made = driver._groups, []

    def watched(slices: Sequence[Slice]) -> Any:
        found = groups(slices)
        if all(part.drafted for part in slices):
            made.append([(group.strategy, len(group.parts)) for group in found[0]])
        return found

    driver._groups = watched
    drafts_from(llm, truth[1])
    same(run(llm, given, LONG), truth[0])
    same(run(llm, given[3:4], LONG), truth[0][3:4])
    assert llm.engine.stats().speculation.accepted > 40
    assert any(parts > 1 for each in made for _, parts in each) and all(len(each) <= 2 for each in made)
    close(llm)
