"""Models with experts under every schedule: which experts a row meets, and its bits, are its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.kernels import cpu
from headrace.models.plain_config import plain_config
from headrace.planner.machine import ModelShape
from tests.support.checkpoints import WITH_EXPERTS, FolderOf
from tests.support.traces import run, same, words

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


def engine(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "bfloat16", "kv_cache_tokens": 8192, **settings})


def prompts_of(llm: LLM) -> list[list[int]]:
    base = words(llm, 130, seed=9)
    return [words(llm, n, seed=n) for n in (1, 65, 200)] + [base, base + words(llm, 30, seed=1)]


@pytest.mark.parametrize("kind", WITH_EXPERTS)
def test_preempted_is_the_same_as_undisturbed(kind: str, folder_of: FolderOf) -> None:
    large, small = engine(folder_of(kind)), engine(folder_of(kind), kv_cache_tokens=640, max_batch_tokens=100)
    long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    prompts = [words(large, 40 + n, seed=n) for n in range(8)]  # answers outgrow the small cache
    same(run(small, prompts, long), run(large, prompts, long))
    assert small.engine.stats().scheduler.preemptions > 0


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "w8a8"])
@pytest.mark.parametrize("kind", ["qwen3_moe_mixed", "gpt_oss"])
def test_every_instruction_set(isa: str, kind: str, quantization: str, folder_of: FolderOf) -> None:
    """Alone, and beside others in slices, cached."""
    assert cpu.isa() == isa
    settings = dict(quantization=quantization, enable_prefix_caching=False)
    private = engine(folder_of(kind), **settings)
    truth = [run(private, [prompt])[0] for prompt in prompts_of(private)]
    shared = engine(folder_of(kind), max_batch_tokens=96, quantization=quantization)
    for _ in range(2):
        same(run(shared, prompts_of(shared)), truth)


def test_the_planner_counts_the_experts_that_a_token_meets(folder_of: FolderOf) -> None:
    """Three of eight of width 64 in two layers of three, a dense MLP of 192 in the other: as wide either way."""
    config = plain_config(folder_of("qwen3_moe_mixed"))
    assert config.mlp_width == 192 and ModelShape.of(config).mlp == 192
    assert plain_config(folder_of("mixtral")).mlp_width == 2 * 128
    assert plain_config(folder_of("granite_moe_shared")).mlp_width == 3 * 64 + 128
    assert plain_config(folder_of("llama")).mlp_width == 192
