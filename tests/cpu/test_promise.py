"""The promise (docs/architecture.md): every schedule, the same bits. Logits of all generated positions, torch.equal."""

from __future__ import annotations

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.kernels import cpu
from tests.support.traces import GREEDY, Trace, alone, engine, prompts_of, run, same, words


@pytest.fixture(scope="module")
def llm() -> LLM:
    return engine()


@pytest.fixture(scope="module")
def truth(llm: LLM) -> list[Trace]:
    return alone(llm)


def test_the_test_can_fail(llm: LLM, truth: list[Trace]) -> None:
    """Another last token gives other logits: the traces do hold what distinguishes answers."""
    prompt = prompts_of(llm)[7]
    (other,) = run(llm, [[*prompt[:-1], prompt[-1] ^ 1]])
    assert not torch.equal(other[len(prompt) - 1], truth[7][len(prompt) - 1])


def test_alone_is_the_same_as_in_a_batch(llm: LLM, truth: list[Trace]) -> None:
    llm.engine.cache.tree.clear()
    same(run(llm, prompts_of(llm)), truth)


def test_cold_is_the_same_as_cached(llm: LLM, truth: list[Trace]) -> None:
    prompts = prompts_of(llm)
    run(llm, prompts)
    before = llm.engine.stats().tokens.cached
    same([run(llm, [prompt])[0] for prompt in prompts], truth)
    assert llm.engine.stats().tokens.cached - before > 3000, "nothing was cached"


@pytest.mark.parametrize("budget", [64, 96, 1000])
def test_whole_is_the_same_as_in_chunks(budget: int, llm: LLM, truth: list[Trace]) -> None:
    chunked = engine(max_batch_tokens=budget)
    same(run(chunked, prompts_of(llm)), truth)


def test_shared_is_the_same_as_unshared(llm: LLM, truth: list[Trace]) -> None:
    private = engine(enable_prefix_caching=False)
    same(run(private, prompts_of(llm)), truth)
    assert private.engine.stats().tokens.cached == 0


LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def long_truth(llm: LLM) -> list[Trace]:
    return run(llm, prompts_of(llm), LONG)


@pytest.mark.parametrize("sharing", [True, False])
def test_preempted_is_the_same_as_undisturbed(sharing: bool, llm: LLM, long_truth: list[Trace]) -> None:
    """Answers outgrow a small cache: sequences are preempted, chunks evicted, and everything is computed again."""
    small = engine(kv_cache_tokens=1024, max_batch_tokens=200, enable_prefix_caching=sharing)
    same(run(small, prompts_of(llm), LONG), long_truth)
    stats = small.engine.stats()
    assert stats.scheduler.preemptions > 0 and (stats.kv.evictions > 0 or not sharing)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(threads: int, llm: LLM, truth: list[Trace]) -> None:
    before = torch.get_num_threads()
    try:
        same(run(engine(threads=threads), prompts_of(llm)), truth)
    finally:
        torch.set_num_threads(before)


def test_decoded_is_the_same_as_prefilled(llm: LLM, truth: list[Trace]) -> None:
    """llm.logits of prompt and answer gives, in one prefill, what decoding gave token by token."""
    for prompt, trace in list(zip(prompts_of(llm), truth, strict=True))[5:]:
        answer = [int(trace[position].argmax()) for position in sorted(trace)]
        logits = llm.logits(prompt + answer[:-1])
        for position, row in trace.items():
            assert torch.equal(logits[position], row)


def test_sampling_is_the_same_alone_and_in_a_batch(llm: LLM) -> None:
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=i, max_tokens=30, n=2) for i in range(12)]
    prompts = prompts_of(llm)[4:]
    together = llm.generate(prompts, params)
    for prompt, param, output in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate([prompt], param)
        assert [c.token_ids for c in alone.outputs] == [c.token_ids for c in output.outputs]
    assert together[0].outputs[0].token_ids != together[0].outputs[1].token_ids


def test_sixteen_requests_compute_their_common_prefix_once(llm: LLM) -> None:
    """They arrive in the same step on a cold cache (budgets of one step, and of many)."""
    prefix = words(llm, 700, seed=5)
    prompts = [prefix + words(llm, 30, seed=100 + i) for i in range(16)]
    private = engine(enable_prefix_caching=False)
    alone = [output.token_ids for prompt in prompts for output in private.generate([prompt], GREEDY)]
    for budget in (8192, 300):
        cold = engine(max_batch_tokens=budget)
        outputs = cold.generate(prompts, GREEDY)
        assert cold.engine.stats().tokens.prefilled == 700 + 16 * 30
        assert [output.token_ids for output in outputs] == alone
        assert [output.metrics.cached_tokens for output in outputs] == [0] + [700] * 15


@pytest.mark.parametrize("isa", cpu.available_isas() if cpu.available() else ())
@pytest.mark.parametrize("stored", ["auto", "int8"])
def test_the_promise_holds_on_every_instruction_set(isa: str, stored: str, llm: LLM) -> None:
    """Alone, in a batch, cached, in prefill chunks, in a small cache; weights and pools lie differently for each."""
    before = cpu.isa()
    cpu.use_isa(isa)
    try:
        prompts = prompts_of(llm)
        private = engine(enable_prefix_caching=False, kv_cache_dtype=stored)
        alone = [run(private, [prompt])[0] for prompt in prompts]
        shared = engine(max_batch_tokens=96, kv_cache_dtype=stored)
        same(run(shared, prompts), alone)
        same(run(shared, prompts), alone)
        same(run(engine(kv_cache_tokens=1024, kv_cache_dtype=stored), prompts), alone)
    finally:
        cpu.use_isa(before)
