"""Gemma 4 on a GPU: heads of 512 by both ways of attention, and engines of layers that differ in their heads, share
keys and values, or have experts beside a dense MLP: every schedule, the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")

from headrace import LLM, SamplingParams
from headrace.kernels.triton import backend
from tests.support.attention_testbed import TREES, PoolTestbed, ends
from tests.support.checkpoints import make_checkpoint
from tests.support.kind_sizes import VOCAB
from tests.support.offloading import MIXES, answer, flush, forced
from tests.support.small_gpu_engines import force, launched
from tests.support.traces import Trace, run, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDE: dict[str, Any] = dict(head_dim=256, global_head_dim=512)
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def prompts() -> list[list[int]]:
    tokens = torch.randint(0, VOCAB, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    return [tokens[:300], tokens[:150] + tokens[300:360], tokens[200:264], tokens[5:10]]


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"dtype": "bfloat16", "kv_cache_tokens": 8192, "max_sequences": 4, **settings}
    return LLM(str(folder), attention_backend="triton", **given)


@pytest.fixture(scope="module", params=["gemma4_small", "gemma4_experts"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("wide"), **WIDE)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return engine(folder)


@pytest.fixture(scope="module")
def truth(llm: LLM) -> list[Trace]:
    """Each prompt alone on an empty cache, launched."""
    return [launched(llm, [prompt], PARAMS)[0] for prompt in prompts()]


def test_a_batch_that_is_replayed(llm: LLM, truth: list[Trace]) -> None:
    before = llm.engine.stats().graphs.replayed
    same(run(llm, prompts(), PARAMS), truth)
    assert llm.engine.stats().graphs.replayed > before


def test_cached_prompts(llm: LLM, truth: list[Trace]) -> None:
    run(llm, prompts(), PARAMS)
    same([run(llm, [prompt], PARAMS)[0] for prompt in prompts()], truth)
    assert llm.engine.stats().tokens.cached > 0


@pytest.mark.parametrize("settings", [dict(max_batch_tokens=96), dict(kv_cache_tokens=448, max_model_len=448)])
def test_slices_and_preempted_sequences(settings: dict[str, int], folder: Path, llm: LLM) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    truth = [launched(llm, [prompt], long)[0] for prompt in prompts()]
    same(run(engine(folder, **settings), prompts(), long), truth)


@pytest.mark.parametrize("mix", ["load", "project"])
def test_restored_from_the_host_tier(mix: str, folder: Path, truth: list[Trace]) -> None:
    """Chunks whose layers differ in size; and keys and values that are made of X."""
    llm = engine(folder, kv_offloading_size=0.05, kv_offload_activations="on")
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(*MIXES[mix])
    same(answer(llm, prompts(), PARAMS), truth)
    flush(llm)
    same(answer(llm, prompts(), PARAMS), truth)
    llm.close()


def test_decoded_is_the_same_as_prefilled(llm: LLM, truth: list[Trace]) -> None:
    answer = [int(truth[0][position].argmax()) for position in sorted(truth[0])]
    logits = llm.logits(prompts()[0] + answer[:-1])
    for position, row in truth[0].items():
        assert torch.equal(logits[position], row)


@pytest.mark.parametrize("tree", ["shared", "none"])
def test_both_ways_the_same_bits_with_heads_of_512(tree: str) -> None:
    """Split tasks take the values' columns in passes, flash tasks by several programs, of other tiles."""
    testbed, found = PoolTestbed(TREES[tree], (8, 1, 512), torch.bfloat16, apart=False), []
    for way in ("flash", "split"):
        with pytest.MonkeyPatch.context() as patch:
            force(way, patch)
            found += [testbed.attend(ends(testbed, count), backend, "cuda") for count in (1, 40)]
    for one, other in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
