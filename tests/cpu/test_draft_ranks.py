"""A draft model beside several ranks: rank 0 has all of it, and answers are those of one rank that drafts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from headrace.config import EngineConfig
from headrace.engine.draft_facts import DraftFacts
from headrace.engine.folders import model_folder
from headrace.engine.footprint import Footprint
from headrace.engine.preflight import check_fit
from headrace.models.config import read_config
from headrace.parallel.threads import RankThreads
from tests.support.draft_checkpoints import noisy, random_draft
from tests.support.drafting import draft_model_says, free_model
from tests.support.hybrid_checkpoints import make_checkpoint as make_hybrid
from tests.support.hybrid_prompts import words
from tests.support.kind_sizes import VOCAB
from tests.support.thread_group import ranks_as_threads
from tests.support.traces import GREEDY, Trace, engine, prompts_of, run, same

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = replace(GREEDY, max_tokens=40)
SIZES = [(1, 2), (2, 1), (2, 2)]
"""(context, tensor) ranks."""


@pytest.fixture(autouse=True)
def threads_for_ranks() -> Iterator[None]:
    with ranks_as_threads():
        yield


@pytest.fixture(scope="module")
def truth() -> list[Trace]:
    llm = engine()
    return run(llm, prompts_of(llm), LONG)


def drafting(draft: str | Path, context: int, tensor: int, **settings: Any) -> LLM:
    ranks = {"context_parallel_size": context, "tensor_parallel_size": tensor, "threads": 1}
    made = engine(speculative=str(draft), **ranks, **settings)
    free_model(made)
    return made


@pytest.mark.parametrize(("context", "tensor"), SIZES)
@pytest.mark.parametrize("settings", [{}, {"kv_cache_tokens": 1280, "max_batch_tokens": 320}], ids=["roomy", "tight"])
def test_a_model_that_drafts_for_itself_is_always_right(
    settings: dict[str, Any], context: int, tensor: int, truth: list[Trace]
) -> None:
    """Whichever rank has a chunk, the draft model has its own keys and values of it on rank 0."""
    with drafting("tiny", context, tensor, **settings) as made:
        given = prompts_of(made)
        same(run(made, given, LONG), truth)
        same(run(made, given[2:], LONG), truth[2:])
        stats = made.engine.stats()
        assert stats.speculation.accepted == stats.speculation.drafted > 100
        assert bool(settings) == (stats.kv.evictions > 0)


def test_drafts_that_are_wrong_at_times(truth: list[Trace], tmp_path: Path) -> None:
    with drafting(noisy(tmp_path), 2, 2) as made:
        same(run(made, prompts_of(made), LONG), truth)
        stats = made.engine.stats().speculation
        assert 0 < stats.accepted < stats.drafted


def test_a_draft_model_without_recurrent_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with some: their states go back before a wrong draft, on every rank."""
    folder, given = make_hybrid("3_5", tmp_path / "model"), [words(90, seed) for seed in range(3)]
    draft = random_draft("llama", tmp_path / "draft", vocab_size=VOCAB)
    plain = {"model": str(folder), "dtype": "bfloat16", "kv_cache_tokens": 2048}
    truth = run(LLM(**plain), given, LONG)
    answers = LLM(**plain).generate(given, LONG)
    draft_model_says(monkeypatch, [[*prompt, *told.token_ids] for prompt, told in zip(given, answers, strict=True)])
    ranks = {"context_parallel_size": 2, "tensor_parallel_size": 2, "recurrent_states": 16, "threads": 1}
    with LLM(**plain, **ranks, speculative=str(draft)) as made:
        free_model(made)
        same(run(made, given, LONG), truth)
        assert 20 < made.engine.stats().speculation.accepted < made.engine.stats().speculation.drafted


def test_it_runs_on_all_cores_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the other ranks wait for their step."""
    used: list[bool] = []
    monkeypatch.setattr(RankThreads, "use", lambda self, whole: used.append(whole))
    with drafting("tiny", 2, 1) as made:
        model: Any = made.engine.speculator.model  # type: ignore[union-attr]
        assert model.threads is made.engine.loaded.ranks.rank.threads is not None  # type: ignore[union-attr]
        del used[:]
        model._run([])
    assert used[0] is True


@pytest.mark.parametrize(("context", "tensor", "copies"), [(1, 1, 1), (2, 1, 2), (1, 2, 1), (2, 2, 2)])
def test_memory_of_one_draft_model(context: int, tensor: int, copies: int) -> None:
    """One rank has its weights, and its keys and values of the tokens of all context ranks."""
    settings = dict(model="tiny", kv_cache_tokens=2048, context_parallel_size=context, tensor_parallel_size=tensor)
    with_draft, without = EngineConfig(**settings, speculative="tiny"), EngineConfig(**settings)
    facts, model = DraftFacts.of(with_draft), read_config(model_folder("tiny"))
    assert facts is not None
    check_fit(with_draft, model)
    both = [Footprint.of(config, model, free=1 << 33) for config in (with_draft, without)]
    assert both[0].weights - both[1].weights == facts.weight_bytes
    assert both[0].kv_bytes() - both[1].kv_bytes() == facts.kv_bytes_per_token * 2048 * copies


def test_not_on_several_gpus() -> None:
    config = EngineConfig(model="tiny", tensor_parallel_size=2, attention_backend="triton", speculative="tiny")
    with pytest.raises(ValueError, match="speculative tiny: several ranks on GPUs leave a draft model no memory yet"):
        check_fit(config, read_config(model_folder("tiny")))
