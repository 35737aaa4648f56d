"""Replayed steps on a GPU: the bits of eager ones, whatever graph they take. `make gpu-check` runs these."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.device import Cuda
from headrace.engine.graph_buckets import PromptGraphs, buckets
from headrace.engine.graphs import CudaGraphs
from headrace.engine.runner import Runner
from headrace.types import Request
from tests.support.drafting import answered, drafts_from
from tests.support.traces import alone, prompts_of, run, same, words
from tools.gpu.bits import eager_steps

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
    together, apart = run(llm, prompts), alone(llm)
    stats = llm.engine.stats().graphs
    assert stats.replayed > 100
    llm.engine.cache.tree.clear()
    with eager_steps(runner):
        eager = run(llm, prompts)
    same(together, eager)
    same(apart, eager)


def test_two_engines_of_one_process_answer_at_once() -> None:
    """Each from a thread of its own: tokens drawn on the device, steps ahead, prompts beside sequences that decode."""
    first, second = engine(max_sequences=16), engine(max_sequences=16, max_batch_tokens=64)
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=40, ignore_eos=True)

    def answers(llm: LLM) -> list[list[int]]:
        llm.engine.cache.tree.clear()
        return [each.token_ids for each in llm.generate(prompts_of(llm), params)]

    truth = [answers(llm) for llm in (first, second)]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            assert list(threads.map(answers, (first, second))) == truth


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


def test_steps_ahead_of_prompts_and_arrivals_give_the_same_tokens() -> None:
    """Prompts that come one after another and are read by slices of 64 beside those that decode, greedy, drawn, and
    with log probabilities; whether replays pay or not. Then no step is launched that is not replayed."""
    llm = engine(max_sequences=16, max_batch_tokens=64)
    core, prompts, graphs = llm.engine, prompts_of(llm), runner_of(llm).mixed
    assert isinstance(graphs, PromptGraphs)
    graphs.sizes = buckets(64)
    kinds = (dict(temperature=0.0), dict(temperature=0.9), dict(temperature=0.0, logprobs=2))
    found = []
    for on in (False, True, True):
        core.overlap.on, before = on, replace(graphs.stats)
        core.cache.tree.clear()
        deltas: list[tuple[str, list[int], object]] = []
        for number, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=12, seed=number, ignore_eos=True, **kinds[number % 3])
            core.add(Request(str(number), prompt, params))
            for _ in range(2):
                deltas += [(each.request_id, each.token_ids, each.logprobs) for each in core.step()]
        while core.has_work:
            deltas += [(each.request_id, each.token_ids, each.logprobs) for each in core.step()]
            core.overlap.check()
        found.append(sorted(deltas, key=lambda each: int(each[0])))
        after = graphs.stats
        assert after.eager == before.eager and after.prompts - before.prompts > 12
        assert (after.ahead - before.ahead > (after.replayed - before.replayed) // 2) == on
        assert not core.cache.used
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("rows", [64, 200, 512])
def test_prompts_are_replayed_to_the_bits_of_launched_ones(rows: int) -> None:
    """Steps of so many rows, prompts by slices beside sequences that decode, whether replays pay or not: from the next
    larger bucket, and all from the largest."""
    llm = engine(max_sequences=16, max_batch_tokens=rows)
    prompts, runner = prompts_of(llm), runner_of(llm)
    graphs = runner.mixed
    assert isinstance(graphs, PromptGraphs)
    with eager_steps(runner):
        truth = run(llm, prompts)
    for sizes in (buckets(rows), [rows]):
        graphs.sizes, before = sizes, graphs.stats.prompts
        llm.engine.cache.tree.clear()
        same(run(llm, prompts), truth)
        assert graphs.stats.prompts > before and not graphs.stats.eager


def test_a_whole_prompt_is_replayed() -> None:
    """Of many rows, by cuBLAS within a graph, after another that is replayed from the same recording."""
    llm = engine(max_sequences=2, max_batch_tokens=2048)
    prompts, runner = [words(llm, count, seed=count) for count in (1900, 1600)], runner_of(llm)
    graphs = runner.mixed
    assert isinstance(graphs, PromptGraphs)
    graphs.sizes = [2048]
    ours = [run(llm, [prompt])[0] for prompt in prompts]
    assert graphs.stats.prompts == 2
    llm.engine.cache.tree.clear()
    with eager_steps(runner):
        same(ours, [run(llm, [prompt])[0] for prompt in prompts])


def test_padding_writes_nothing() -> None:
    """What nobody has written is no number, and stays it."""
    llm = engine(max_sequences=2, max_batch_tokens=256, kv_cache_tokens=1024)
    graphs = runner_of(llm).mixed
    assert isinstance(graphs, PromptGraphs)
    graphs.sizes, pools = [256], [x for pool in graphs.storage.pools for x in pool.tensors]
    with eager_steps(runner_of(llm)):
        truth = run(llm, [words(llm, 70, seed=1)])
    llm.engine.cache.tree.clear()
    for x in pools:
        x.fill_(float("nan"))
    same(run(llm, [words(llm, 70, seed=1)]), truth)
    tokens = 70 + 24 - 1
    assert [int(x.isfinite().sum()) for x in pools] == [tokens * x.numel() // 1024 for x in pools]


def test_the_pool_leaves_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the largest step, beside all that was recorded. Of 8 GiB: other tests run beside this one."""
    free, before = Cuda.free_memory, torch.cuda.memory_reserved()
    monkeypatch.setattr(Cuda, "free_memory", lambda self: min(free(self), (8 << 30) + before))
    llm = engine(kv_cache_tokens=None, max_sequences=4)
    assert llm.config.scheduler.max_batch_tokens == 8192
    run(llm, prompts_of(llm)[:4])
    assert 1 << 30 < torch.cuda.memory_reserved() - before < 8 << 30


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
