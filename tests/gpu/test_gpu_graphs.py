"""Replayed steps on a GPU: the bits of eager ones, whatever graph they take. `make gpu-check` runs these."""

from __future__ import annotations

import gc

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine.graphs import CudaGraphs
from headrace.engine.runner import Runner
from tests.support.drafting import answered, drafts_from
from tests.support.traces import alone, prompts_of, run, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def engine(**settings: object) -> LLM:
    return LLM("tiny", **{"dtype": "bfloat16", "kv_cache_tokens": 40_000, "attention_backend": "triton", **settings})


def runner_of(llm: LLM) -> Runner:
    runner = llm.engine.loaded.executor
    assert isinstance(runner, Runner) and isinstance(runner.decoding, CudaGraphs)
    return runner


def test_replayed_is_the_same_as_eager() -> None:
    """Sixteen sequences of uneven lengths, in graphs of sixteen rows and, alone, of one."""
    llm = engine(max_sequences=16)
    prompts, runner = prompts_of(llm), runner_of(llm)
    graphs = runner.decoding
    together, apart = run(llm, prompts), alone(llm)
    stats = llm.engine.stats().graphs
    assert stats.replayed > 100 and stats.eager == 0
    runner.decoding = runner.eager
    llm.engine.cache.tree.clear()
    eager = run(llm, prompts)
    runner.decoding = graphs
    same(together, eager)
    same(apart, eager)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_steps_ahead_give_the_same_tokens(temperature: float) -> None:
    """Uneven lengths, and stop tokens that some answers meet while a step with them is under way; then a pool that only
    some of the sequences fit."""
    llm = engine(max_sequences=16)
    prompts = prompts_of(llm)
    stops = list(range(0, 2300, 31))
    params = [
        SamplingParams(temperature=temperature, max_tokens=20 + number, seed=number, stop_token_ids=stops)
        for number in range(len(prompts))
    ]
    found = []
    for on in (True, False, True):
        llm.engine.overlap.on = on
        before = llm.engine.stats().graphs.ahead
        llm.engine.cache.tree.clear()
        found.append([each.outputs[0] for each in llm.generate(prompts, params)])
        assert (llm.engine.stats().graphs.ahead > before) == on
        llm.engine.scheduler.check()
        assert not llm.engine.cache.used
    assert found[0] == found[1] == found[2]
    small = engine(max_sequences=16, kv_cache_tokens=2048)
    assert [each.outputs[0] for each in small.generate(prompts, params)] == found[0]
    assert small.engine.stats().scheduler.preemptions and small.engine.stats().graphs.ahead


def test_the_pool_leaves_room() -> None:
    """For the largest step, beside all that was recorded."""
    llm = engine(kv_cache_tokens=None, max_sequences=4)
    assert llm.config.scheduler.max_batch_tokens == 8192
    assert torch.cuda.mem_get_info()[0] > 1 << 29
    run(llm, prompts_of(llm)[:4])


def test_an_engine_after_another() -> None:
    """The first one's graphs are gone by then, and the memory that they shared must not be."""
    for _ in range(2):
        llm = engine(max_sequences=1, kv_cache_tokens=4096)
        run(llm, prompts_of(llm)[:1])
        llm.close()
        del llm
        gc.collect()


def test_with_drafts_is_the_same_as_without() -> None:
    """Right and wrong ones, verified by replayed steps."""
    plain = engine(max_sequences=8)
    prompts = prompts_of(plain)
    truth = run(plain, prompts)
    llm = engine(max_sequences=8, speculative="ngram", num_speculative_tokens=3)
    drafts_from(llm, [answered(prompt, trace) for prompt, trace in zip(prompts, truth, strict=True)])
    same(run(llm, prompts), truth)
    spoken = llm.engine.stats().speculation
    assert 0 < spoken.accepted < spoken.drafted and llm.engine.stats().graphs.replayed > 0
