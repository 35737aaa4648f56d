"""The engine on a GPU: parity with transformers for every family, and the promise: every schedule, the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from tests.support.checkpoints import INDEXED, KINDS, build_model, make_checkpoint
from tests.support.kind_sizes import VOCAB
from tests.support.traces import Trace, alone, prompts_of, run, same, words
from tools.gpu.bits import eager_steps
from tools.gpu.long_context import far_outputs, far_positions, far_slots
from tools.gpu.runner import LeftOut, Row

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def engine(**settings: Any) -> LLM:
    return LLM("tiny", **{"dtype": "bfloat16", "kv_cache_tokens": 40_000, "attention_backend": "triton", **settings})


@pytest.fixture(scope="module")
def llm() -> LLM:
    return engine()


@pytest.fixture(scope="module")
def truth(llm: LLM) -> list[Trace]:
    return alone(llm)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in INDEXED])
def test_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path)
    tokens = torch.randint(0, VOCAB, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    try:
        llm = LLM(str(folder), dtype="float32", kv_cache_tokens=1024, attention_backend="triton")
    except ValueError as refused:
        if "attention_backend" not in str(refused):
            raise
        pytest.skip(str(refused))
    ours = llm.logits(tokens)
    with torch.no_grad():
        theirs = build_model(kind)(torch.tensor([tokens])).logits[0]
    assert (ours - theirs).abs().max() <= 1e-4


def test_the_gpu_agrees_with_the_cpu(llm: LLM) -> None:
    tokens = words(llm, 700, seed=3)
    on_cpu = engine(attention_backend="reference", dtype="float32").logits(tokens)
    assert (engine(dtype="float32").logits(tokens) - on_cpu).abs().max() <= 1e-3


def test_alone_is_the_same_as_in_a_batch(llm: LLM, truth: list[Trace]) -> None:
    llm.engine.cache.tree.clear()
    same(run(llm, prompts_of(llm)), truth)


def test_cold_is_the_same_as_cached(llm: LLM, truth: list[Trace]) -> None:
    prompts = prompts_of(llm)
    run(llm, prompts)
    same([run(llm, [prompt])[0] for prompt in prompts], truth)


@pytest.mark.parametrize("budget", [64, 96, 1000])
def test_whole_is_the_same_as_in_chunks(budget: int, llm: LLM, truth: list[Trace]) -> None:
    same(run(engine(max_batch_tokens=budget), prompts_of(llm)), truth)


def test_shared_is_the_same_as_unshared(llm: LLM, truth: list[Trace]) -> None:
    same(run(engine(enable_prefix_caching=False), prompts_of(llm)), truth)


@pytest.mark.parametrize("sharing", [True, False])
def test_preempted_is_the_same_as_undisturbed(sharing: bool, llm: LLM) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    prompts = prompts_of(llm)
    small = engine(kv_cache_tokens=1024, max_batch_tokens=200, enable_prefix_caching=sharing)
    same(run(small, prompts, long), run(llm, prompts, long))
    assert small.engine.stats().scheduler.preemptions > 0


def test_decoded_is_the_same_as_prefilled(llm: LLM, truth: list[Trace]) -> None:
    for prompt, trace in list(zip(prompts_of(llm), truth, strict=True))[5:]:
        answer = [int(trace[position].argmax()) for position in sorted(trace)]
        logits = llm.logits(prompt + answer[:-1])
        for position, row in trace.items():
            assert torch.equal(logits[position], row)


def test_replayed_is_the_same_as_launched(llm: LLM, truth: list[Trace]) -> None:
    llm.engine.cache.tree.clear()
    with eager_steps(llm.engine.loaded.executor):
        same(run(llm, prompts_of(llm)), truth)


@pytest.mark.parametrize("beyond", [far_slots, far_outputs])
def test_more_than_two_to_the_31_elements(beyond: Callable[[], Row]) -> None:
    """Numbers of elements that no int32 holds."""
    try:
        assert beyond().figures["elements"] > 1 << 31
    except LeftOut as why:
        pytest.skip(str(why))


def test_a_row_at_a_million_tokens_has_its_bits_decoded_or_prefilled() -> None:
    try:
        assert far_positions(rows=130).figures["decode_gbps"] > 0
    except LeftOut as why:
        pytest.skip(str(why))


def test_capacity_comes_from_the_gpu() -> None:
    assert engine(kv_cache_tokens=1024).capacity.backend == "triton"  # all of the memory would be others' too
