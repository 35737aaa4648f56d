"""Rows that prompts copy instead of computing them: the same bits, whatever a chunk holds."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.engine.runner import Runner
from headrace.types import CHUNK
from tests.support.adapters import write_adapter
from tests.support.checkpoints import FolderOf, TheirsOf
from tests.support.hybrid_checkpoints import make_checkpoint as make_hybrid
from tests.support.kind_sizes import VOCAB
from tests.support.offloading import MIXES, answer, flush, forced, look_at_once, offloading
from tests.support.thread_group import ranks_as_threads
from tests.support.traces import Trace, random_tokens, run, same

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

BRIEF = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
TEXT = random_tokens(VOCAB, 2 * CHUNK + 40, seed=1)
QUESTIONS = [TEXT + random_tokens(VOCAB, 20 + i, seed=2 + i) for i in range(3)]
PROMPTS = [*QUESTIONS, TEXT, TEXT[: CHUNK + 50], TEXT[: 2 * CHUNK], [*TEXT[:100], *QUESTIONS[0]]]
"""Of those behind the first: 40 rows of the third chunk; of itself; 49 and 63 of the second; 36 of the second."""


def engine(folder: str | Path, **settings: Any) -> LLM:
    return LLM(folder, **{"kv_cache_tokens": 64 * CHUNK, **settings})


def truth(folder: str | Path, **settings: Any) -> list[Trace]:
    """Each prompt alone, with nothing shared."""
    with engine(folder, enable_prefix_caching=False, **settings) as llm:
        return [run(llm, [prompt], BRIEF)[0] for prompt in PROMPTS]


def copied(llm: LLM) -> int:
    return llm.engine.stats().kv.copied_tokens


@pytest.mark.parametrize(("dtype", "kv"), [("bfloat16", "auto"), ("bfloat16", "int8"), ("float32", "auto")])
@pytest.mark.parametrize(
    "kind", ["llama_gqa", "llama_dynamic", "gemma3", "gemma4_small", "gpt_oss", "deepseek_v3", "opt"]
)
def test_bits_are_those_of_computed_rows(kind: str, dtype: str, kv: str, folder_of: FolderOf) -> None:
    """One after the other, and all at once. (Rotation that depends on the length shares little.)"""
    settings: dict[str, Any] = {"kv_cache_dtype": kv, "dtype": dtype}
    expected = truth(folder_of(kind), **settings)
    with engine(folder_of(kind), **settings) as llm:
        same([run(llm, [prompt], BRIEF)[0] for prompt in PROMPTS], expected)
        assert copied(llm) == (50 if kind == "llama_dynamic" else 2 * 40 + 39 + 49 + 63 + 36)
        same(run(llm, PROMPTS, BRIEF), expected)
        llm.engine.cache.tree.clear()
        same(run(llm, PROMPTS, BRIEF), expected)


def waves(seed: int) -> list[tuple[list[list[int]], list[SamplingParams]]]:
    """Prompts that come together, six at most: beginnings of two texts, most of them with an end of their own."""
    rng, texts, found = random.Random(seed), [random_tokens(VOCAB, 300, seed=each) for each in (1, 2)], []
    for _ in range(12):
        prompts, params = [], []
        for _ in range(rng.randrange(1, 7)):
            own = random_tokens(VOCAB, rng.randrange(1, 90), seed=rng.randrange(1000)) if rng.random() < 0.7 else []
            prompts.append(rng.choice(texts)[: rng.randrange(1, 300)] + own)
            n, temperature = rng.choice([1, 1, 1, 3]), rng.choice([0.0, 1.0])
            own_params = dict(max_tokens=rng.randrange(1, 20), n=n, temperature=temperature, seed=rng.randrange(9))
            params.append(SamplingParams(**own_params, logprobs=1, ignore_eos=True))  # type: ignore[arg-type]
        found.append((prompts, params))
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_cache_tokens": 16 * CHUNK, "max_batch_tokens": 150},
        {"scheduling_policy": "fcfs", "speculative": "ngram"},
    ],
    ids=["roomy", "tight", "speculating"],
)
def test_many_that_begin_alike_answer_as_with_nothing_shared(settings: dict[str, Any], folder_of: FolderOf) -> None:
    asked, answers = waves(seed=len(settings)), []
    length = {"max_model_len": 8 * CHUNK}
    for more in ({"enable_prefix_caching": False}, settings):
        with engine(folder_of("llama_gqa"), **length, **more) as llm:
            outputs = [output for prompts, params in asked for output in llm.generate(prompts, params)]
            answers.append([(each.token_ids, each.logprobs) for output in outputs for each in output.outputs])
            llm.engine.scheduler.check()
            assert copied(llm) > 500 or more is not settings
    assert answers[0] == answers[1]


def test_several_answers_are_those_of_each_alone(folder_of: FolderOf) -> None:
    """Drawn with seeds; the prompt is computed once, in two steps, and its first token drawn by each answer."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, n=5, ignore_eos=True)
    with engine(folder_of("llama"), enable_prefix_caching=False) as llm:
        [expected] = llm.generate([TEXT], params)
    with engine(folder_of("llama")) as llm:
        [output] = llm.generate([TEXT], params)
        assert [each.token_ids for each in output.outputs] == [each.token_ids for each in expected.outputs]
        assert copied(llm) == 4 * 39 and llm.engine.stats().tokens.prefilled == len(TEXT) + 4


def test_stored_chunks_are_brought_back_whole(folder_of: FolderOf, tmp_path: Path) -> None:
    """A tail is not stored. What is behind restored chunks may be copied."""
    settings: dict[str, Any] = {"kv_offloading_size": 0.01, "kv_offload_path": str(tmp_path)}
    expected = truth(folder_of("llama"))
    with engine(folder_of("llama"), **settings) as llm:
        answer(llm, PROMPTS[:1], BRIEF)
    with engine(folder_of("llama"), **settings) as llm:
        assert llm.engine.offload is not None
        llm.engine.offload.choose = forced(*MIXES["load"])
        look_at_once(llm)
        same([answer(llm, [prompt], BRIEF)[0] for prompt in PROMPTS], expected)
        stats = llm.engine.stats()
        assert stats.restore.loaded_tokens == 2 * CHUNK and copied(llm) == 2 * 40 + 39 + 49 + 63 + 36


@pytest.mark.parametrize("write", ["ended", "idle"])
def test_a_tail_is_not_stored(write: str, folder_of: FolderOf) -> None:
    """Neither as its answer ends, nor while nothing is computed, nor as it is evicted."""
    written = []
    for length in (CHUNK, CHUNK + 20):
        settings: dict[str, Any] = {"kv_offloading_size": 0.02, "kv_offload_write": write, "kv_cache_tokens": 3 * CHUNK}
        with engine(folder_of("llama"), **settings) as llm:
            answer(llm, [TEXT[:length]], BRIEF)
            assert llm.engine.offload is not None
            tails = [node for node in llm.engine.cache.tree.nodes.values() if not node.whole]
            assert len(tails) == (length > CHUNK)
            answer(llm, [random_tokens(VOCAB, 2 * CHUNK + 1, seed=7)], BRIEF)
            assert not any(llm.engine.cache.tree.find(tail.digest or b"") for tail in tails), "it is evicted"
            while llm.engine.settle():
                time.sleep(0.001)
            written.append(llm.engine.offload.tiers.stats()["host"].writes)
    assert written[0] == written[1] > 0


def test_activations_are_copied_too(folder_of: FolderOf) -> None:
    """A chunk that goes on from copied rows comes back by way of its activations."""
    params = replace(BRIEF, max_tokens=20)
    with offloading(folder_of("llama"), "project") as llm:
        answer(llm, PROMPTS[:1], BRIEF)
        [output] = llm.generate(PROMPTS[1:2], params)
        assert copied(llm) == 40
        longer = [[*PROMPTS[1], *output.token_ids[:10]]]
        flush(llm)
        found = answer(llm, longer, BRIEF)
        assert llm.engine.stats().restore.projected_tokens == 3 * CHUNK
    with engine(folder_of("llama"), dtype="bfloat16", enable_prefix_caching=False) as llm:
        same(found, run(llm, longer, BRIEF))


def test_another_adapter_has_other_rows(folder_of: FolderOf, theirs_of: TheirsOf, tmp_path: Path) -> None:
    write_adapter(tmp_path / "one", theirs_of("llama"), seed=1)
    with engine(folder_of("llama"), lora_modules=f"one={tmp_path / 'one'}") as llm:
        for name, found in (("", 0), ("one", 0), ("one", len(TEXT) - 1), ("", len(TEXT) - 1)):
            [output] = llm.generate([TEXT], BRIEF, adapter=name)
            assert output.metrics.cached_tokens == found


@pytest.mark.parametrize(
    "settings",
    [
        {"context_parallel_size": 2},
        {"tensor_parallel_size": 2, "kv_offloading_size": 0.02},
        {"kv_offloading_size": 0.02, "offload_schedule": "row"},
    ],
    ids=["ranks", "tensor-ranks-with-tiers", "streamed"],
)
def test_elsewhere_every_row_is_computed(settings: dict[str, Any], folder_of: FolderOf) -> None:
    with ranks_as_threads(), LLM(folder_of("llama"), **settings) as llm:
        for found in (0, 2 * CHUNK):
            [output] = llm.generate([TEXT], BRIEF)
            assert output.metrics.cached_tokens == found and copied(llm) == 0
        assert all(node.whole for node in llm.engine.cache.tree.nodes.values())


def test_tensor_ranks_copy_their_parts(folder_of: FolderOf) -> None:
    expected = truth(folder_of("llama_gqa"))
    with ranks_as_threads(), engine(folder_of("llama_gqa"), tensor_parallel_size=2) as llm:
        same([run(llm, [prompt], BRIEF)[0] for prompt in PROMPTS], expected)
        assert copied(llm) == 2 * 40 + 39 + 49 + 63 + 36
        llm.engine.cache.tree.clear()
        same(run(llm, PROMPTS, BRIEF), expected)


def test_models_with_recurrent_layers_go_on_from_their_states(tmp_path: Path) -> None:
    folder = make_hybrid("3_5", tmp_path)
    with engine(folder) as llm:
        assert isinstance(llm.engine.loaded.executor, Runner) and llm.engine.scheduler.rows is None
