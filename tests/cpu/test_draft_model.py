"""A draft model changes the number of steps and nothing else, and has its keys and values in the slots of the pool.

With the model itself as its draft model every draft is right: a token that is not says that the draft model has met
wrong positions, chunks or tokens.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine.footprint import Footprint
from headrace.models.plain_config import plain_config
from headrace.types import CHUNK, Structured, UnsupportedModel
from tests.support.checkpoints import FolderOf
from tests.support.draft_checkpoints import noisy, random_draft
from tests.support.drafting import abort_one_by_one, free_model
from tests.support.hybrid_checkpoints import make_checkpoint as make_hybrid
from tests.support.offloading import flush, watched
from tests.support.traces import GREEDY, engine, prompts_of, run, same, words

LONG = replace(GREEDY, max_tokens=70)
PARAMS = {
    "greedy": LONG,
    "seeded-logprobs": replace(LONG, temperature=0.9, seed=7, top_p=0.9, logprobs=3),
    "several-penalties": replace(LONG, temperature=0.8, seed=3, n=3, repetition_penalty=1.2, presence_penalty=0.1),
    "grammar": replace(
        LONG, ignore_eos=False, structured=Structured(regex=r"[a-z ]{3,9}: the end of it. [A-z ]{60,80}")
    ),
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return engine()


@pytest.fixture(scope="module")
def at_times_right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noisy(tmp_path_factory.mktemp("noisy"))


def drafting(draft: str | Path, **settings: Any) -> LLM:
    made = engine(speculative=str(draft), **settings)
    free_model(made)
    return made


def told(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    """All that clients see of the answers."""
    outputs = llm.generate(prompts, params)
    llm.engine.scheduler.check()
    assert llm.engine.cache.used == 0
    return [
        (one.token_ids, one.text, one.logprobs, one.finish_reason)
        for output in outputs
        for one in output.outputs
    ]  # fmt: skip


def all_right(llm: LLM) -> bool:
    stats = llm.engine.stats().speculation
    return stats.accepted == stats.drafted > 0


def caught_up(llm: LLM) -> list[int]:
    """Grows by the tokens that the draft model computes beforehand."""
    model: Any = llm.engine.speculator.model  # type: ignore[union-attr]
    counts: list[int] = []
    catch_up = model.catch_up
    model.catch_up = lambda *asked: counts.append(catch_up(*asked)) or counts[-1]
    return counts


@pytest.mark.parametrize("kind", PARAMS)
def test_answers_are_those_without(kind: str, llm: LLM, at_times_right: Path) -> None:
    """Sixteen greedy ones together, or a few, and one alone."""
    prompts, params = prompts_of(llm)[: 16 if kind == "greedy" else 5], PARAMS[kind]
    truth = told(llm, prompts, params)
    made = drafting(at_times_right)
    assert told(made, prompts, params) == truth
    assert told(made, prompts[3:4], params) == truth[3 * params.n : 4 * params.n]
    stats = made.engine.stats().speculation
    assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_cache_tokens": 1280, "max_batch_tokens": 96},
        {"enable_prefix_caching": False},
        {"kv_cache_dtype": "int8"},
    ],
    ids=["roomy", "tight", "private", "int8"],
)
def test_a_model_that_drafts_for_itself_is_always_right(settings: dict[str, Any], llm: LLM) -> None:
    """Greedy, sixteen together: shared prefixes, preempted sequences, budgets that cut drafts, evicted chunks."""
    prompts = prompts_of(llm)
    if "kv_cache_dtype" in settings:  # keys and values of the draft model are not rounded
        truth = run(engine(**settings), prompts, LONG)
        same(run(drafting("tiny", **settings), prompts, LONG), truth)
        return
    truth = run(llm, prompts, LONG)
    made = drafting("tiny", **settings)
    same(run(made, prompts, LONG), truth)
    same(run(made, prompts[2:], LONG), truth[2:])
    assert all_right(made)
    assert (made.engine.stats().scheduler.preemptions > 0) == (settings.get("kv_cache_tokens") == 1280)
    assert (made.engine.stats().kv.evictions > 0) == (settings.get("kv_cache_tokens") == 1280)


def test_of_the_right_drafts_come_few_steps(llm: LLM) -> None:
    made = drafting("tiny", num_speculative_tokens=6)
    made.generate(prompts_of(llm)[:1], LONG)
    assert made.engine.stats().scheduler.steps <= 2 + -(-70 // 7)


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_drafts_of_another_family(family: str, llm: LLM, tmp_path: Path) -> None:
    """Random ones, hardly ever right: of OPT one operation at a time, and no longer than its table of positions."""
    prompts = prompts_of(llm)[3:12]
    draft = random_draft(family, tmp_path, **({"max_position_embeddings": 600} if family == "opt" else {}))
    made = drafting(draft)
    same(run(made, prompts, LONG), run(llm, prompts, LONG))
    assert made.engine.stats().speculation.drafted > 300


def test_a_shared_prefix_is_computed_once_by_the_draft_model(llm: LLM) -> None:
    """Sequences that lack the same chunks do not compute them side by side, and later ones have them."""
    prompt = words(llm, 10 * CHUNK + 20, seed=5)
    made = drafting("tiny", kv_cache_tokens=4096)
    counts = caught_up(made)
    made.generate([prompt], replace(LONG, n=3))
    # The first answer's sequence gives the others the chunks of the prompt.
    assert 10 * CHUNK <= sum(counts) <= 10 * CHUNK + 3 * 40
    counts.clear()
    made.generate([prompt + words(llm, 30, seed=6)], LONG)
    assert sum(counts) < CHUNK and all_right(made)


def test_evicted_chunks_are_computed_again(llm: LLM) -> None:
    prompt, other = words(llm, 6 * CHUNK, seed=5), words(llm, 8 * CHUNK, seed=6)
    made = drafting("tiny", kv_cache_tokens=12 * CHUNK)
    counts = caught_up(made)
    for each in (prompt, other):
        made.generate([each], LONG)
    counts.clear()
    same(run(made, [prompt], LONG), run(llm, [prompt], LONG))
    assert sum(counts) >= 3 * CHUNK and all_right(made)


def test_restored_chunks_have_no_drafts_and_get_them(llm: LLM) -> None:
    prompts = prompts_of(llm)[9:13]
    truth = run(llm, prompts, LONG)
    with drafting("tiny", kv_offloading_size=0.1) as made:
        watched(made, prompts, LONG)
        flush(made)
        counts = caught_up(made)
        same(watched(made, prompts, LONG), truth)
        assert made.engine.stats().tokens.cached > 700 and all_right(made)
        assert sum(counts) >= 700 // CHUNK * CHUNK


def test_what_was_drafted_wrong_is_computed_again(llm: LLM) -> None:
    """Keys and values of wrong drafts, of sampled answers, are not taken for those of what was drawn."""
    made = drafting("tiny")
    made.generate(prompts_of(llm)[6:9], replace(LONG, temperature=1.5, seed=3))
    spoken = made.engine.stats().speculation
    assert spoken.accepted < spoken.drafted
    for number, node in enumerate(made.engine.cache.tree.nodes.values()):
        if node.drafted:  # the same model: the draft model's storage holds what the model's own does
            for own, other in zip(_storage(made).pools, _drafts(made).pools, strict=True):
                for one, two in zip(own.tensors, other.tensors, strict=True):
                    assert torch.equal(one[node.slot], two[node.slot]), f"chunk {number}"


def _storage(llm: LLM) -> Any:
    return llm.engine.loaded.executor.storage  # type: ignore[attr-defined]


def _drafts(llm: LLM) -> Any:
    assert llm.engine.loaded.draft is not None
    return llm.engine.loaded.draft.runner.storage


def test_abort_in_the_middle(llm: LLM) -> None:
    made = drafting("tiny")
    abort_one_by_one(made, prompts_of(llm), LONG, 10)
    assert all_right(made)
    assert not made.engine.speculator._tried  # type: ignore[union-attr]


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"dtype": "float32"}], ids=["int8", "fp32"])
def test_rounded_weights_and_other_types(settings: dict[str, str], llm: LLM) -> None:
    prompts = prompts_of(llm)[:3]
    made = LLM("tiny", kv_cache_tokens=4096, speculative="tiny", **settings)  # type: ignore[arg-type]
    free_model(made)
    plain = LLM("tiny", kv_cache_tokens=4096, **settings)  # type: ignore[arg-type]
    same(run(made, prompts, LONG), run(plain, prompts, LONG))
    assert all_right(made)


def test_memory_is_that_of_both_models(tmp_path: Path) -> None:
    """A pool sized by what is free holds fewer tokens, by what the draft model takes of each."""
    settings = dict(model="tiny", max_sequences=1000)
    llms = [LLM(**settings), LLM(**settings, speculative="tiny")]  # type: ignore[arg-type]
    plain, both = (llm.engine.loaded for llm in llms)
    model = plain_config(Path(both.capacity.folder))
    one, two = (Footprint.of(each.config, model, free=1 << 30) for each in (plain, both))
    assert two.per_token() == 2 * one.per_token() and two.weights > one.weights
    assert both.capacity.kv_bytes_per_token == plain.capacity.kv_bytes_per_token
    assert both.draft is not None and both.draft.runner.storage.slots == both.cache.pool.total


def changed(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def test_draft_models_that_cannot_be(tmp_path: Path, folder_of: FolderOf) -> None:
    """Each is refused before any weight is read, by the setting's name, with what to do."""
    for draft, told in {
        "nowhere": "speculative: model 'nowhere': no folder with a config.json.*ngram, suffix need no model",
        "sufix": "did you mean suffix",
        "Ngram": "write ngram",
        "": "must be one of off, ngram, suffix, or a model",
        str(folder_of("llama")): "a vocabulary of 320 tokens, the model one of 2,304; take a smaller model",
    }.items():
        with pytest.raises(ValueError, match=told):
            LLM("tiny", kv_cache_tokens=4096, speculative=draft)
    with pytest.raises(ValueError, match="has recurrent layers, whose states do not go back"):
        LLM("tiny", kv_cache_tokens=4096, speculative=str(make_hybrid("next", tmp_path / "hybrid")))
    foreign = changed(random_draft("llama", tmp_path / "foreign"), model_type="mamba", architectures=["MambaLM"])
    with pytest.raises(UnsupportedModel, match="speculative: "):
        LLM("tiny", kv_cache_tokens=4096, speculative=str(foreign))


def test_a_tokenizer_with_other_tokens_is_refused(at_times_right: Path, tmp_path: Path) -> None:
    other = noisy(tmp_path)
    path = other / "tokenizer.json"
    tokens = json.loads(path.read_text())
    vocabulary = tokens["model"]["vocab"]
    one, two = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    path.write_text(json.dumps(tokens))
    with pytest.raises(ValueError, match="its tokenizer has other tokens than the model's"):
        LLM("tiny", kv_cache_tokens=4096, speculative=str(other))
