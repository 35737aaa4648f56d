"""Speculation of models with recurrent layers: the bits of no speculation, from states that no wrong draft has seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine.sequence import Slice
from headrace.types import CHUNK
from tests.support.draft_checkpoints import random_draft
from tests.support.drafting import abort_one_by_one, answered, draft_model_says, drafts_from, free_model
from tests.support.hybrid_checkpoints import KINDS, make_checkpoint
from tests.support.kind_sizes import VOCAB
from tests.support.offloading import counters, forced, watched
from tests.support.ranked_offloading import close, over_ranks
from tests.support.traces import Trace, run, same

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]
LONG = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
SEEDED = replace(LONG, temperature=0.9, seed=7, logprobs=2)


def words(count: int, seed: int = 0) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=g).tolist()


def prompts() -> list[list[int]]:
    """Sixteen uneven ones, some alike; answers pass the ends of chunks at different tokens."""
    base = words(200)
    mixed = [words(1, 1), words(64, 2), words(65, 3), base, base, base[:128], base + words(70, 5)]
    return mixed + [base[:130] + words(10 + 7 * i, 6 + i) for i in range(9)]


def engine(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "bfloat16", "kv_cache_tokens": 8192, "recurrent_states": 48, **settings})


def drafting(folder: Path, known: list[list[int]], **settings: Any) -> LLM:
    llm = engine(folder, speculative="ngram", **settings)
    drafts_from(llm, known)
    return llm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("3_5_ends_recurrent", tmp_path_factory.mktemp("hybrid"))


Truth = tuple[list[Trace], list[list[int]]]


def truth_of(folder: Path, given: list[list[int]], **settings: Any) -> Truth:
    """The answers without speculation, and the sequences whole."""
    traces = run(engine(folder, **settings), given, LONG)
    return traces, [answered(prompt, trace) for prompt, trace in zip(given, traces, strict=True)]


@pytest.fixture(scope="module")
def truth(folder: Path) -> Truth:
    return truth_of(folder, prompts())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_speculative_tokens": 3, "max_batch_tokens": 96},
        {"kv_cache_tokens": 1280, "recurrent_states": 18},
        {"enable_prefix_caching": False, "recurrent_states": 17},
    ],
    ids=["roomy", "cut", "preempted", "one-draft-at-a-time"],
)
def test_logits_are_those_without(settings: dict[str, Any], folder: Path, truth: Truth) -> None:
    """Sixteen together, then one alone, which goes on from what the others have left."""
    traces, known = truth
    llm = drafting(folder, known, **settings)
    same(run(llm, prompts(), LONG), traces)
    same(run(llm, prompts()[3:4], LONG), traces[3:4])
    stats = llm.engine.stats()
    assert 40 < stats.speculation.accepted < stats.speculation.drafted
    assert (stats.scheduler.preemptions > 0) == ("kv_cache_tokens" in settings)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "3_5_ends_recurrent"])
def test_families(kind: str, tmp_path: Path) -> None:
    folder, given = make_checkpoint(kind, tmp_path), prompts()[2:5]
    traces, known = truth_of(folder, given)
    llm = drafting(folder, known)
    same(run(llm, given, LONG), traces)
    assert llm.engine.stats().speculation.accepted > 40


@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "int8"}, {"quantization": "int8"}, {"dtype": "float32"}])
def test_other_types(settings: dict[str, Any], folder: Path) -> None:
    given = prompts()[2:5]
    traces, known = truth_of(folder, given, **settings)
    same(run(drafting(folder, known, **settings), given, LONG), traces)


def test_drawn_tokens_and_their_log_probabilities(folder: Path) -> None:
    params, given = replace(SEEDED, n=2), prompts()[2:6]
    told = [[(one.token_ids, one.logprobs) for one in each.outputs] for each in engine(folder).generate(given, params)]
    known = [prompt + ids for prompt, each in zip(given, told, strict=True) for ids, _ in each]
    llm = drafting(folder, known)
    drawn = llm.generate(given, params)
    assert [[(one.token_ids, one.logprobs) for one in each.outputs] for each in drawn] == told
    assert llm.engine.stats().speculation.accepted > 40


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_draft("llama", tmp_path_factory.mktemp("draft"), vocab_size=VOCAB)


def draft_chunks(llm: LLM) -> dict[Any, list[torch.Tensor]]:
    """What a draft model, or a model itself, has of chunks of the tree: their digest -> K and V of all layers."""
    loaded: Any = llm.engine.loaded
    storage = loaded.executor.storage if loaded.draft is None else loaded.draft.runner.storage
    nodes = [node for node in llm.engine.cache.tree.nodes.values() if node.drafted or loaded.draft is None]
    return {node.digest: [each[node.slot] for pool in storage.pools for each in pool.tensors] for node in nodes}


def drafts_behind_repeated_rows(llm: LLM) -> list[Slice]:
    """Grows by the slices with a draft that compute again what stood before a wrong one."""
    speculator: Any = llm.engine.speculator
    found: list[Slice] = []
    complete = speculator.complete

    def watched(slices: list[Slice]) -> None:
        found.extend(part for part in slices if part.sequence.draft and part.length - part.drafted > 1)
        complete(slices)

    speculator.complete = watched
    return found


@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_cache_tokens": 1280, "recurrent_states": 18}, {"num_speculative_tokens": 3, "max_batch_tokens": 96}],
    ids=["roomy", "preempted", "cut"],
)
def test_a_draft_model_without_recurrent_layers(
    settings: dict[str, Any], folder: Path, draft: Path, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drafts behind tokens that the model computes again, and has the keys and values that it would have alone."""
    traces, known = truth
    draft_model_says(monkeypatch, known)
    llm = engine(folder, speculative=str(draft), **settings)
    free_model(llm)
    repeats = drafts_behind_repeated_rows(llm)
    same(run(llm, prompts(), LONG), traces)
    assert len(repeats) > 20
    stats, alone = llm.engine.stats(), LLM(str(draft), dtype="bfloat16", kv_cache_tokens=8192)
    alone.engine.cache.identity = llm.engine.cache.identity  # so that chunks of the same tokens have the same names
    assert 40 < stats.speculation.accepted < stats.speculation.drafted
    assert (stats.scheduler.preemptions > 0) == ("recurrent_states" in settings)
    alone.generate(known, replace(LONG, max_tokens=1))
    own, drafted = draft_chunks(alone), draft_chunks(llm)
    assert len(own.keys() & drafted.keys()) == len(drafted) > 5
    for digest, tensors in drafted.items():
        assert all(torch.equal(one, two) for one, two in zip(tensors, own[digest], strict=True))


def test_a_draft_model_of_drawn_tokens(folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params, given = replace(SEEDED, n=2), prompts()[2:6]
    told = [[(one.token_ids, one.logprobs) for one in each.outputs] for each in engine(folder).generate(given, params)]
    known = [prompt + ids for prompt, each in zip(given, told, strict=True) for ids, _ in each]
    draft_model_says(monkeypatch, known)
    llm = engine(folder, speculative=str(draft))
    free_model(llm)
    drawn = llm.generate(given, params)
    assert [[(one.token_ids, one.logprobs) for one in each.outputs] for each in drawn] == told
    assert llm.engine.stats().speculation.accepted > 40


def test_what_is_kept_of_an_answer_is_what_was_drawn(folder: Path, truth: Truth) -> None:
    """A next turn begins behind the last whole chunk of an answer, as it does without drafts, with the same bits."""
    known = truth[1]
    further = [each[:-1] for each in known[2:5]]
    want = run(engine(folder, enable_prefix_caching=False), further, LONG)
    cached = []
    for llm in (drafting(folder, known), engine(folder)):
        run(llm, prompts()[2:5], LONG)
        before = llm.engine.stats().tokens.cached
        same(run(llm, further, LONG), want)
        cached.append(llm.engine.stats().tokens.cached - before)
    assert cached[0] == cached[1] == sum((len(each) - 1) // CHUNK * CHUNK for each in further)


def test_abort_in_the_middle(folder: Path, truth: Truth) -> None:
    llm = drafting(folder, truth[1], recurrent_states=20)
    abort_one_by_one(llm, prompts(), LONG, 12)
    states = llm.engine.cache.states
    assert states is not None and not states._refs and llm.engine.stats().speculation.accepted > 0


def test_restored_prefixes(folder: Path, truth: Truth) -> None:
    """Chunks and states come back from host memory, then drafts go on from them."""
    traces, known = truth
    llm = drafting(folder, known, kv_cache_tokens=512, recurrent_states=3, kv_offloading_size=0.1)
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(0.0, 0.0)
    for _ in range(2):
        for number in (3, 6, 9):
            same(watched(llm, [prompts()[number]], LONG), [traces[number]])
    assert counters(llm).loaded_tokens > 300 and counters(llm).failures == 0
    assert llm.engine.stats().speculation.accepted > 40
    llm.close()


CROWDED = {"tokens": 384, "max_batch_tokens": 384, "recurrent_states": 9, "max_model_len": 384}


@pytest.mark.parametrize("settings", [{}, CROWDED], ids=["roomy", "preempted"])
def test_two_ranks_of_a_chain(settings: dict[str, Any], folder: Path) -> None:
    given = prompts()[2:5] + [words(100, 40 + number) for number in range(6)]
    traces, known = truth_of(folder, given)
    asked = {"tokens": 4096, "recurrent_states": 24, "max_model_len": 512, "speculative": "ngram", **settings}
    llm = over_ranks(2, ("chain", "single"), model=folder, **asked)
    drafts_from(llm, known)
    same(watched(llm, given, LONG), traces)
    assert llm.engine.stats().speculation.accepted > 40
    assert (llm.engine.stats().scheduler.preemptions > 0) == bool(settings)
    close(llm)


def test_a_second_state_is_needed(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"recurrent_states 1: .* set recurrent_states to 2 at least"):
        engine(folder, speculative="ngram", recurrent_states=1)
