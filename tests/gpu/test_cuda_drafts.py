"""A draft model on a GPU: the bits are those without drafts, and its passes look up what the one before has chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM
from headrace.device import Cuda
from headrace.engine.graphs import CudaGraphs
from tests.support.draft_checkpoints import noisy, random_draft
from tests.support.drafting import free_model
from tests.support.traces import GREEDY, Trace, prompts_of, run, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SEEDED = replace(GREEDY, temperature=0.9, seed=7, top_p=0.9)


def engine(**settings: Any) -> LLM:
    given = {"dtype": "bfloat16", "kv_cache_tokens": 40_000, "max_sequences": 8, **settings}
    llm = LLM("tiny", attention_backend="triton", **given)
    if llm.engine.loaded.draft is not None:
        free_model(llm)
    return llm


@pytest.fixture(scope="module")
def plain() -> LLM:
    return engine()


@pytest.fixture(scope="module")
def truth(plain: LLM) -> list[Trace]:
    return run(plain, prompts_of(plain))


def test_a_model_that_drafts_for_itself_is_always_right(plain: LLM, truth: list[Trace]) -> None:
    """A token that is not says that a pass has looked up another, met wrong chunks, or memory of the model's graphs."""
    llm = engine(speculative="tiny", num_speculative_tokens=5)
    same(run(llm, prompts_of(plain)), truth)
    same(run(llm, prompts_of(plain)), truth)
    told, draft = llm.engine.stats(), llm.engine.loaded.draft
    assert told.speculation.accepted == told.speculation.drafted > 0
    assert draft is not None and isinstance(draft.runner.decoding, CudaGraphs)
    assert draft.runner.decoding.stats.ahead and told.graphs.replayed


@pytest.mark.parametrize("kind", ["noisy", "other"])
def test_answers_are_those_without(kind: str, plain: LLM, truth: list[Trace], tmp_path: Path) -> None:
    """Right at times, and of a model with other heads and layers hardly ever; drawn tokens as well."""
    folder = noisy(tmp_path) if kind == "noisy" else random_draft("llama", tmp_path)
    llm = engine(speculative=str(folder))
    same(run(llm, prompts_of(plain)), truth)
    ours, theirs = (each.generate(prompts_of(plain)[:6], SEEDED) for each in (llm, plain))
    assert [each.outputs[0].token_ids for each in ours] == [each.outputs[0].token_ids for each in theirs]
    spoken = llm.engine.stats().speculation
    assert spoken.accepted < spoken.drafted


def test_the_pool_leaves_room_for_both_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 GiB: other tests run beside this one."""
    free, before = Cuda.free_memory, torch.cuda.memory_reserved()
    monkeypatch.setattr(Cuda, "free_memory", lambda self: min(free(self), (8 << 30) + before))
    llm = engine(kv_cache_tokens=None, max_sequences=4, speculative="tiny")
    run(llm, prompts_of(llm)[:4])
    assert torch.cuda.memory_reserved() - before < 8 << 30
