"""Models with recurrent layers on a GPU: near transformers, and every schedule the same bits; their kernels alone at
the sizes of Qwen3-Next, Kimi Linear, Granite 4 H, Nemotron-H and LFM2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.config import RecurrentSpec
from tests.support.drafting import answered, drafts_from
from tests.support.hybrid_checkpoints import build_model, make_checkpoint
from tests.support.kind_sizes import VOCAB
from tests.support.offloading import flush, forced, watched
from tests.support.traces import Trace, run, same
from tools.gpu.bits import eager_steps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SHORT, LONG = (SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (12, 70))
KIND = "3_5_ends_recurrent"
OTHERS = ("granite", "nemotron", "lfm2", "kimi")
LAYERS = [
    RecurrentSpec(1, 16, 32, 128, 128, 4),
    RecurrentSpec(1, 1, 2, 40, 24, 3),
    RecurrentSpec(1, 32, 32, 128, 128, 4, "kda"),
    RecurrentSpec(1, 3, 3, 40, 24, 3, "kda"),
    RecurrentSpec(1, 1, 48, 128, 64, 4, "mamba2"),
    RecurrentSpec(1, 8, 128, 128, 64, 4, "mamba2"),
    RecurrentSpec(1, 3, 6, 20, 24, 3, "mamba2"),
    RecurrentSpec.short_convolutions(1, 2048, 3),
    RecurrentSpec.short_convolutions(1, 120, 4),
]


def words(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompts() -> list[list[int]]:
    """Some share 130 or 192 tokens, two are alike."""
    base = words(200, 0)
    return [words(3, 1), words(64, 2), base, base, base[:130] + words(40, 3), base[:192] + words(9, 4)]


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"dtype": "bfloat16", "kv_cache_tokens": 8192, "recurrent_states": 24, "max_sequences": 8, **settings}
    return LLM(str(folder), attention_backend="triton", **given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(KIND, tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return engine(folder)


@pytest.fixture(scope="module")
def truth(llm: LLM) -> list[Trace]:
    """Launched, each alone on an empty cache."""
    traces = []
    with eager_steps(llm.engine.loaded.executor):
        for prompt in prompts():
            llm.engine.cache.tree.clear()
            traces += run(llm, [prompt], SHORT)
    return traces


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", LAYERS, ids=str)
def test_recurrent_layers(spec: RecurrentSpec, dtype: torch.dtype) -> None:
    from headrace.kernels.triton import recurrent_check

    recurrent_check.check(spec, dtype, torch.device("cuda"))


@pytest.mark.parametrize("kind", [KIND, "next_experts", *OTHERS, "granite_experts", "nemotron_experts", "lfm2_experts"])
def test_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    model = engine(make_checkpoint(kind, tmp_path), dtype="float32", max_sequences=1)
    with torch.no_grad():
        theirs = build_model(kind)(torch.tensor([words(200, 5)])).logits[0]
    assert (model.logits(words(200, 5)) - theirs).abs().max() <= 1e-4


def test_replayed_batched_and_cached_recurrent_layers(llm: LLM, truth: list[Trace]) -> None:
    llm.engine.cache.tree.clear()
    same(run(llm, prompts(), SHORT), truth)
    same(run(llm, prompts(), SHORT), truth)
    stats = llm.engine.stats()
    assert stats.tokens.cached > 192 and stats.graphs.replayed > 0


@pytest.mark.parametrize("kind", OTHERS)
def test_other_recurrent_layers(kind: str, tmp_path: Path) -> None:
    """Launched each alone; replayed together, from an empty cache and from a full one; in slices."""
    made = engine(make_checkpoint(kind, tmp_path))
    with eager_steps(made.engine.loaded.executor):
        alone = []
        for prompt in prompts():
            made.engine.cache.tree.clear()
            alone += run(made, [prompt], SHORT)
    made.engine.cache.tree.clear()
    for _ in range(2):
        same(run(made, prompts(), SHORT), alone)
    assert made.engine.stats().graphs.replayed > 0
    same(run(engine(tmp_path, max_batch_tokens=64), prompts(), SHORT), alone)


@pytest.mark.parametrize("budget", [64, 96])
def test_recurrent_layers_in_slices(budget: int, folder: Path, truth: list[Trace]) -> None:
    same(run(engine(folder, max_batch_tokens=budget), prompts(), SHORT), truth)


def test_recurrent_layers_a_step_ahead(llm: LLM) -> None:
    """Answers of uneven lengths, some of which stop while a step with them is under way."""
    stops, found = list(range(0, VOCAB, 31)), []
    params = [
        SamplingParams(temperature=0.9, seed=number, max_tokens=70 + number, stop_token_ids=stops)
        for number in range(len(prompts()))
    ]
    before, engine = llm.engine.overlap.on, llm.engine
    for on in (True, False, True):
        engine.overlap.on, ahead = on, engine.stats().graphs.ahead
        engine.cache.tree.clear()
        found.append([each.outputs[0] for each in llm.generate(prompts(), params)])
        assert (engine.stats().graphs.ahead - ahead > 10) == on
        engine.scheduler.check()
    engine.overlap.on = before
    assert found[0] == found[1] == found[2]


def test_preempted_recurrent_layers(folder: Path, llm: LLM) -> None:
    small = engine(folder, kv_cache_tokens=640, recurrent_states=8)
    same(run(small, prompts(), LONG), run(llm, prompts(), LONG))
    assert small.engine.stats().scheduler.preemptions > 0


def test_drafted_recurrent_layers(folder: Path, truth: list[Trace]) -> None:
    drafting = engine(folder, speculative="ngram", num_speculative_tokens=3)
    drafts_from(drafting, [answered(prompt, trace) for prompt, trace in zip(prompts(), truth, strict=True)])
    same(run(drafting, prompts(), SHORT), truth)
    assert drafting.engine.stats().speculation.accepted > 0


def test_restored_recurrent_layers(folder: Path, truth: list[Trace]) -> None:
    stored = engine(folder, kv_offloading_size=0.1)
    assert stored.engine.offload is not None
    stored.engine.offload.choose = forced(0.0, 0.0)
    for _ in range(2):
        same(watched(stored, prompts()[2:3], SHORT), truth[2:3])
        flush(stored)
    assert stored.engine.stats().restore.loaded_tokens > 0
    stored.close()
