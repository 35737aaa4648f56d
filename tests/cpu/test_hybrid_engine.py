"""Hybrid models through the engine: every schedule, the same bits, with recurrent states in the tree of prefixes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace import LLM, SamplingParams
from headrace.kernels import cpu
from headrace.kv.milestones import INTERVAL
from headrace.types import CHUNK, Request
from tests.support.greedy_answers import greedy_behind
from tests.support.hybrid_checkpoints import make_checkpoint
from tests.support.kind_sizes import VOCAB
from tests.support.traces import Trace, run, same

pytestmark = pytest.mark.cpu
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=140, ignore_eos=True)


@pytest.fixture(
    scope="module",
    params=[
        "3_5_ends_recurrent",
        "lfm2",
        "granite_uneven",
        "kimi",
        "falcon_h1",
        pytest.param("lfm3", marks=pytest.mark.matrix),
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("hybrid"))


def words(count: int, seed: int = 0) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=g).tolist()


def prompts() -> list[list[int]]:
    """Uneven ones; some are alike, some share 130 or 200 tokens, one is a prefix of another."""
    base = words(330)
    mixed = [words(1, 1), words(64, 2), words(65, 3), words(200, 4), base, base, base[:256], base + words(70, 5)]
    return mixed + [base[:130] + words(40 + i, 6 + i) for i in range(3)] + [base[:200] + words(90, 9)]


def engine(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "bfloat16", "kv_cache_tokens": 8192, "recurrent_states": 48, **settings})


@pytest.fixture(scope="module")
def truth(folder: Path) -> list[Trace]:
    """Alone, with nothing shared."""
    private = engine(folder, enable_prefix_caching=False)
    return [run(private, [prompt], SHORT)[0] for prompt in prompts()]


def test_the_answers_are_those_of_transformers(folder: Path) -> None:
    llm, model = engine(folder, dtype="float32", max_batch_tokens=200), AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        difference = llm.logits(words(300)) - model(torch.tensor([words(300)])).logits[0]
    assert difference.abs().max() < 1e-4
    given = [words(n, n) for n in (300, 64, 37)]
    for prompt, output in zip(given, llm.generate(given, replace(SHORT, max_tokens=64)), strict=True):
        assert output.token_ids == greedy_behind(model, prompt, output.token_ids)


@pytest.mark.parametrize("settings", [{}, {"max_batch_tokens": 96}, {"max_batch_tokens": 64, "recurrent_states": 3}])
def test_batched_cut_and_cached_are_the_same_as_alone(
    settings: dict[str, Any], folder: Path, truth: list[Trace]
) -> None:
    llm = engine(folder, **settings)
    same(run(llm, prompts(), SHORT), truth)
    same(run(llm, prompts(), SHORT), truth)
    before = llm.engine.stats().tokens.cached
    for prompt, trace in zip(prompts(), truth, strict=True):
        same(run(llm, [prompt], SHORT), [trace])
        same(run(llm, [prompt], SHORT), [trace])
    assert llm.engine.stats().tokens.cached >= before + sum((len(prompt) - 1) // 64 * 64 for prompt in prompts())


@pytest.mark.parametrize("sharing", [True, False])
def test_preempted_is_the_same_as_undisturbed(sharing: bool, folder: Path) -> None:
    small = engine(folder, kv_cache_tokens=768, max_batch_tokens=200, recurrent_states=5, enable_prefix_caching=sharing)
    same(run(small, prompts(), LONG), run(engine(folder), prompts(), LONG))
    stats = small.engine.stats()
    assert stats.scheduler.preemptions > 0 and (stats.kv.evictions > 0 or not sharing)


@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "int8", "kv_cache_prefault": True}, {"quantization": "int8"}])
def test_rounded_numbers_are_the_same_in_every_schedule(settings: dict[str, Any], folder: Path) -> None:
    private, llm = engine(folder, enable_prefix_caching=False, **settings), engine(folder, **settings)
    given = [prompts()[4], prompts()[8], prompts()[11]]
    alone = [run(private, [prompt], SHORT)[0] for prompt in given]
    same(run(llm, given, SHORT), alone)
    same(run(llm, given, SHORT), alone)


def test_threads_change_nothing(folder: Path, truth: list[Trace], threads_kept: None) -> None:
    same(run(engine(folder, threads=1), prompts(), SHORT), truth)
    same(run(engine(folder, threads=2), prompts(), SHORT), truth)


def test_one_state_is_enough(folder: Path, truth: list[Trace]) -> None:
    same(run(engine(folder, recurrent_states=1), prompts(), SHORT), truth)


@pytest.mark.skipif(not cpu.available(), reason="there are no kernels")
def test_on_every_instruction_set(isa: str, folder: Path) -> None:
    private, llm = engine(folder, enable_prefix_caching=False), engine(folder, max_batch_tokens=96)
    given = [prompts()[4], prompts()[8]]
    alone = [run(private, [prompt], SHORT)[0] for prompt in given]
    same(run(llm, given, SHORT), alone)
    same(run(llm, given, SHORT), alone)


def cached(llm: LLM, prompt: list[int], answer: int = 1) -> int:
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    (output,) = llm.generate([prompt], params)
    llm.engine.scheduler.check()
    return output.metrics.cached_tokens


def test_a_prefix_is_reused_from_its_last_state(folder: Path) -> None:
    """A state stands where a prompt ends, then where the second one has parted, and where an answer has come to."""
    llm, base = engine(folder), words(330)
    assert llm.engine.cache.states is not None
    llm.engine.cache.states.milestones.interval = INTERVAL  # where states are small they stand behind every chunk
    assert cached(llm, base) == 0
    assert cached(llm, base) == 320
    assert cached(llm, [*base, *words(100, 1)]) == 320
    assert cached(llm, base[:200] + words(50, 2)) == 0  # keys and values of 192 tokens are there, but no state
    assert cached(llm, base[:200] + words(50, 3)) == 192
    assert cached(llm, base[:210]) == 192
    (output,) = llm.generate([base], LONG)
    assert cached(llm, [*base, *output.token_ids[:-1], *words(9, 4)]) == 448  # of 330 + 139 that are known


def test_small_states_stand_behind_every_chunk(tmp_path: Path) -> None:
    """As many as there are chunks; so a prompt takes from another one all chunks that both begin with, at once."""
    folder, base, counts = make_checkpoint("lfm2", tmp_path), words(330), (192, 320, 64, 0)
    llm, private = engine(folder, recurrent_states=None), engine(folder, enable_prefix_caching=False)
    states = llm.engine.cache.states
    assert states is not None
    assert states.total == 8192 // CHUNK + llm.engine.loaded.config.scheduler.max_sequences
    assert cached(llm, base) == 0 and states.kept == 5
    for number, shared in enumerate(counts):
        other = base[: shared + 9] + words(50, 2 + number)
        same(run(llm, [other], SHORT), run(private, [other], SHORT))
        assert llm.engine.stats().tokens.cached == sum(counts[: number + 1])
    for seed in range(100):  # a pool that is full: states leave with their chunks
        assert cached(llm, words(330, 99 + seed)) == 0
    assert cached(llm, words(330, 198)) == 320 and states.evictions == 0


def test_the_first_part_of_a_document_is_reused_from_a_milestone(folder: Path) -> None:
    llm, private, base = engine(folder, max_batch_tokens=200), engine(folder, enable_prefix_caching=False), words(700)
    states = llm.engine.cache.states
    assert states is not None
    states.milestones.interval = 128
    assert cached(llm, base) == 0 and states.kept == 5  # behind 128 to 512 tokens, and at the end
    other = base[:450] + words(50, 2)
    same(run(llm, [other], SHORT), run(private, [other], SHORT))
    assert llm.engine.stats().tokens.cached == 384


def test_forks_compute_a_prompt_once(folder: Path) -> None:
    llm = engine(folder)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True, n=4)
    (output,) = llm.generate([words(330)], params)
    assert llm.engine.stats().tokens.prefilled == 330 + 3 * 10
    for index in range(4):
        assert output.outputs[index].token_ids != output.outputs[index - 1].token_ids


@pytest.mark.parametrize("budget", [2048, 200])
def test_requests_of_one_step_compute_their_common_prefix_once(budget: int, folder: Path, truth: list[Trace]) -> None:
    """They part where no prompt ends: the state there is asked for while it is computed."""
    base, llm = words(330), engine(folder, max_batch_tokens=budget)
    given = [base[:130] + words(200 + i, i) for i in range(4)]
    llm.generate(given, SHORT)
    assert llm.engine.stats().tokens.prefilled <= sum(map(len, given)) - 3 * 128 + 128


def test_a_request_that_is_aborted_leaves_no_state_held(folder: Path) -> None:
    llm = engine(folder, max_batch_tokens=64, recurrent_states=4)
    states = llm.engine.cache.states
    assert states is not None
    for steps in range(6):
        for seed in (steps, steps, 99):
            llm.engine.add(Request(f"{steps}-{seed}-{llm.engine._order}", words(200, seed), SHORT))
        for _ in range(steps):
            llm.engine.step()
        for request_id in list(llm.engine._active):
            llm.engine.abort(request_id)
            llm.engine.scheduler.check()
        assert not states._refs
    assert states.kept == llm.engine.stats().kv.states_kept > 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"context_parallel_size": 2, "prefill_strategy": "ring-kv"}, "prefill_strategy ring-kv: .* use auto, single"),
        ({"context_parallel_size": 2, "prefill_strategy": "gather"}, "prefill_strategy gather: .* use auto, single"),
        (
            {"kv_offloading_size": 0.1, "kv_offload_activations": "on"},
            "kv_offload_activations: .* has recurrent layers",
        ),
        ({"kv_offloading_size": 0.1, "offload_schedule": "row"}, "offload_schedule: .* has recurrent layers"),
    ],
)
def test_what_is_not_built_is_refused(settings: dict[str, Any], told: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=told):
        engine(folder, **settings)


def test_other_models_have_no_states() -> None:
    with pytest.raises(ValueError, match="recurrent_states: LlamaForCausalLM has no recurrent layers; leave it out"):
        LLM("tiny", recurrent_states=4)


@pytest.mark.parametrize("quantization", ["none", "w8a8"])
def test_experts(quantization: str, tmp_path: Path) -> None:
    """Qwen3-Next's, and the one beside them: in a batch, cut and from a state the bits of each prompt alone."""
    folder, given = make_checkpoint("next_experts", tmp_path / "m"), prompts()[3:8]
    alone = engine(folder, enable_prefix_caching=False, quantization=quantization)
    want = [run(alone, [prompt], SHORT)[0] for prompt in given]
    llm = engine(folder, max_batch_tokens=96, quantization=quantization)
    same(run(llm, given, SHORT), want)
    same(run(llm, given, SHORT), want)
    assert llm.engine.stats().tokens.cached > 300, "nothing was cached"
