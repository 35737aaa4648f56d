"""A draft model beside several ranks, of which the first has all of it, and beside streamed KV: answers are those of
one rank that drafts nothing."""

from __future__ import annotations

import re
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


STREAMS: list[dict[str, Any]] = [
    {"offload_schedule": "row", "kv_offloading_size": 0.05},
    {"offload_schedule": "column", "kv_offloading_size": 0.05, "weight_offload": True},
    {"offload_schedule": "row", "kv_offloading_size": 0.05, "context_parallel_size": 2, "tensor_parallel_size": 2},
]


@pytest.mark.parametrize("settings", STREAMS, ids=["row", "column", "ranks"])
def test_beside_streamed_keys_and_values(settings: dict[str, Any], truth: list[Trace]) -> None:
    """Those of the draft model stay in memory."""
    given = {"max_model_len": 1024, "threads": 1, "kv_cache_tokens": None, **settings}
    with engine(speculative="tiny", **given) as made:
        free_model(made)
        same(run(made, prompts_of(made), LONG), truth)
        stats = made.engine.stats()
        assert stats.speculation.accepted == stats.speculation.drafted > 100 and stats.stream


@pytest.mark.parametrize(
    "settings", [{"offload_schedule": "row", "kv_offloading_size": 0.05}, {"tensor_parallel_size": 2}]
)
def test_it_is_timed_where_steps_wait_for_links(settings: dict[str, Any]) -> None:
    given = {"max_model_len": 1024, "threads": 1, "kv_cache_tokens": None, **settings}
    with engine(speculative="tiny", **given) as made:
        cost: Any = made.engine.speculator.cost  # type: ignore[union-attr]
        assert 0 < cost.token.of(0) < cost.passes.of(1)
    one = engine(speculative="tiny")
    assert one.engine.speculator.cost.token.of(0) is None  # type: ignore[union-attr]


@pytest.mark.parametrize("place", [{"kv_offloading_size": 4}, {"kv_offload_path": "kv", "kv_offload_disk_size": 4}])
@pytest.mark.parametrize("ranks", [{}, {"context_parallel_size": 2, "tensor_parallel_size": 2}])
def test_memory_beside_streamed_keys_and_values(ranks: dict[str, int], place: dict[str, Any], tmp_path: Path) -> None:
    """It holds what the draft model has of all tokens that may lie outside; else the setting that asks is named."""
    place = place | ({"kv_offload_path": str(tmp_path)} if "kv_offload_path" in place else {})
    given: dict[str, Any] = dict(model="tiny", offload_schedule="row", max_sequences=100_000, **place, **ranks)
    config, model = EngineConfig(**given, speculative="tiny"), read_config(model_folder("tiny"))
    taken, plain = (Footprint.of(each, model, free=1 << 40) for each in (config, EngineConfig(**given)))
    per_token = plain.per_token()
    outside = 4 * 2**30 // per_token * taken.draft.kv_bytes_per_token * config.ranks.context  # type: ignore[union-attr]
    stored = 0 if "kv_offload_path" in place else 4 * 2**30 * config.ranks.count
    replace(taken, free=taken.weights + stored + outside + 4096).check()
    asks = "kv_offloading_size" if stored else "kv_offload_disk_size"
    told = rf"{asks} 4 GiB is too much: .* of the draft model: at most ([\d.]+) GiB fit"
    with pytest.raises(ValueError, match=told) as refused:
        replace(taken, free=taken.weights + (stored + outside) // 2).check()
    found = re.search(told, str(refused.value))
    assert found is not None and 1.9 <= float(found[1]) <= 2.0


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"tensor_parallel_size": 2}, "several ranks"),
        ({"offload_schedule": "row", "kv_offloading_size": 0.1}, "streamed KV"),
    ],
)
def test_not_where_gpus_have_no_memory_for_it(settings: dict[str, Any], what: str) -> None:
    config = EngineConfig(model="tiny", attention_backend="triton", speculative="tiny", **settings)
    with pytest.raises(ValueError, match=f"speculative tiny: on GPUs {what} leave a draft model no memory yet; use"):
        check_fit(config, read_config(model_folder("tiny")))
