"""Every family through the whole engine: the answers of transformers, and the same bits under every schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from headrace import LLM, SamplingParams
from tests.support.checkpoints import EVERY_KIND, EVERY_KIND_SLOWLY, KINDS, NEAR, FolderOf, TheirsOf, seeds_for_rounding
from tests.support.drafting import answered, drafts_from, free_model
from tests.support.greedy_answers import greedy_behind
from tests.support.kind_sizes import VOCAB
from tests.support.traces import run, same

LENGTHS = (300, 64, 1, 129, 37)
BY_REFERENCE = ("llama_gqa", "mistral_window", "falcon_rw", "gemma2", "glm_dsa", "minimax_m3", "llama4")
SCHEDULED = [
    *(pytest.param(kind, "cpu", marks=[pytest.mark.matrix] * (kind in NEAR)) for kind in KINDS),
    *((kind, "reference") for kind in BY_REFERENCE),
]


def prompt(length: int, seed: int = 0) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=g).tolist()


def engine(folder: Path, dtype: str, **settings: Any) -> LLM:
    return LLM(str(folder), dtype=dtype, **{"kv_cache_tokens": 8192, **settings})


def logits_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


@pytest.mark.parametrize("kind", EVERY_KIND_SLOWLY)
def test_fp32_agrees_with_transformers(kind: str, folder_of: FolderOf, theirs_of: TheirsOf) -> None:
    """Logits at every position of 300 tokens, and 64 greedy tokens for a batch of uneven prompts."""
    llm = engine(folder_of(kind), "float32", max_batch_tokens=200)
    difference = (llm.logits(prompt(300)) - logits_of(theirs_of(kind), prompt(300))).abs().max()
    assert difference < 1e-4, difference
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    for tokens, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == greedy_behind(theirs_of(kind), tokens, output.token_ids)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_bf16_is_as_near_to_the_truth_as_transformers(kind: str, folder_of: FolderOf, theirs_of: TheirsOf) -> None:
    prompts = [prompt(300, seed) for seed in seeds_for_rounding(kind)]
    exact, rounded, llm = theirs_of(kind), theirs_of(kind, torch.bfloat16), engine(folder_of(kind), "bfloat16")
    truth = torch.cat([logits_of(exact, tokens) for tokens in prompts])
    theirs = torch.cat([logits_of(rounded, tokens) for tokens in prompts]) - truth
    ours = torch.cat([llm.logits(tokens) for tokens in prompts]) - truth
    assert ours.norm() <= 1.5 * theirs.norm(), f"ours {ours.norm():.4g}, theirs {theirs.norm():.4g}"
    assert ours.abs().amax(-1).mean() <= 1.5 * theirs.abs().amax(-1).mean()


@pytest.mark.parametrize(("kind", "backend"), SCHEDULED)
def test_every_schedule_gives_the_same_bits(kind: str, backend: str, folder_of: FolderOf) -> None:
    """bf16: alone, in a batch, cached, in prefill chunks, unshared, speculated."""
    prompts = [prompt(200), prompt(200)[:150] + prompt(60, seed=1), prompt(64, seed=2), prompt(5, seed=3)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def fresh(**settings: Any) -> LLM:
        return engine(folder_of(kind), "bfloat16", attention_backend=backend, **settings)

    private = fresh(enable_prefix_caching=False)
    truth = [run(private, [one], params)[0] for one in prompts]
    llm = fresh()
    same(run(llm, prompts, params), truth)
    same(run(llm, prompts, params), truth)
    assert llm.engine.stats().tokens.cached > 0
    same(run(fresh(max_batch_tokens=96), prompts, params), truth)
    drafting = fresh(speculative="ngram")
    drafts_from(drafting, [answered(one, trace) for one, trace in zip(prompts, truth, strict=True)])
    same(run(drafting, prompts, params), truth)
    assert drafting.engine.stats().speculation.accepted > 0


@pytest.mark.parametrize("kind", ["gemma2", "falcon_rw"])
def test_a_draft_model_of_the_family(kind: str, folder_of: FolderOf) -> None:
    """bf16: windows and caps, ALiBi. A model that drafts for itself is always right."""
    prompts = [prompt(200), prompt(200)[:150] + prompt(60, seed=1), prompt(5, seed=3)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    truth = run(engine(folder_of(kind), "bfloat16"), prompts, params)
    drafting = engine(folder_of(kind), "bfloat16", speculative=str(folder_of(kind)))
    free_model(drafting)
    same(run(drafting, prompts, params), truth)
    stats = drafting.engine.stats().speculation
    assert stats.accepted == stats.drafted > 20
