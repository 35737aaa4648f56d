"""The promise (docs/architecture.md): every schedule, the same bits. Logits of all generated positions, torch.equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine.sequence import SequenceState
from headrace.kernels import cpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
Trace = dict[int, torch.Tensor]
"""Position -> logits [V] after the token at that position."""


def engine(**settings: Any) -> LLM:
    return LLM("tiny", dtype="bfloat16", **{"kv_cache_tokens": 40_000, **settings})


@pytest.fixture(scope="module")
def llm() -> LLM:
    return engine()


def words(llm: LLM, count: int, seed: int) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(10, llm.capacity.vocab_size, (count,), generator=g).tolist()


def prompts_of(llm: LLM) -> list[list[int]]:
    """Sixteen prompts of uneven lengths; some share 130 tokens, some 700, one is a prefix of another."""
    base = words(llm, 700, seed=0)
    lengths = [1, 5, 63, 64, 65, 128, 200, 333, 500, 700]
    mixed = [words(llm, n, seed=n) for n in lengths[:6]] + [base[:n] for n in (64, 128, 200, 700)]
    return (
        mixed
        + [base[:130] + words(llm, 40 + i, seed=i) for i in range(3)]
        + [base + words(llm, i, i) for i in (1, 64, 90)]
    )


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[Trace]:
    """Answers the prompts together; the logits from which each token of each answer was chosen."""
    traces: list[Trace] = [{} for _ in prompts]
    first = llm._count + 1

    def keep(sequence: SequenceState, position: int, logits: torch.Tensor) -> None:
        trace = traces[int(sequence.request.request_id.rsplit("-", 1)[1]) - first]
        end = position + len(logits) - 1
        if end in trace:
            assert torch.equal(trace[end], logits[-1]), "computed again after preemption, with other bits"
        trace[end] = logits[-1].clone()

    with llm._observed(keep):
        outputs = llm.generate(prompts, params)
    for prompt, trace, output in zip(prompts, traces, outputs, strict=True):
        assert sorted(trace) == list(range(len(prompt) - 1, len(prompt) - 1 + len(output.token_ids)))
    llm.engine.scheduler.check()
    assert llm.engine.cache.used == 0, "a finished request left chunks held"
    return traces


def same(left: list[Trace], right: list[Trace]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for position in one:
            assert torch.equal(one[position], other[position]), f"bits differ after position {position}"


def alone(llm: LLM) -> list[Trace]:
    """Each prompt alone, on an empty cache."""
    traces = []
    for prompt in prompts_of(llm):
        llm.engine.cache.tree.clear()
        traces += run(llm, [prompt])
    return traces


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


@pytest.mark.parametrize("sharing", [True, False])
def test_preempted_is_the_same_as_undisturbed(sharing: bool, llm: LLM) -> None:
    """Answers outgrow a small cache: sequences are preempted, chunks evicted, and everything is computed again."""
    long = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    prompts = prompts_of(llm)
    small = engine(kv_cache_tokens=1024, max_batch_tokens=200, enable_prefix_caching=sharing)
    same(run(small, prompts, long), run(llm, prompts, long))
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
    prefix = words(llm, 2000, seed=5)
    prompts = [prefix + words(llm, 30, seed=100 + i) for i in range(16)]
    alone = [output.token_ids for prompt in prompts for output in engine().generate([prompt], GREEDY)]
    whole_chunks, own = 2000 // 64 * 64, 2000 % 64 + 30
    for budget in (8192, 300):
        cold = engine(max_batch_tokens=budget)
        outputs = cold.generate(prompts, GREEDY)
        assert cold.engine.stats().tokens.prefilled == whole_chunks + 16 * own
        assert [output.token_ids for output in outputs] == alone
        assert [output.metrics.cached_tokens for output in outputs] == [0] + [whole_chunks] * 15


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
