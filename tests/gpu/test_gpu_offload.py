"""Tiers below a GPU's pool, and streamed decoding: every schedule, the bits of an engine that has all at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.bench.shapes import CheckpointShape, write_checkpoint
from headrace.device import current
from headrace.kernels.chunk_formats import gather
from headrace.offload.weights.streamed import bytes_of_buffers
from tests.support.drafting import answered, drafts_from
from tests.support.offloading import MIXES, answer, flush, forced, prompts_of, watched
from tests.support.traces import Trace, run, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
STREAMED: dict[str, dict[str, Any]] = {
    "row": {"offload_schedule": "row"},
    "row, X in GPU memory": {"offload_schedule": "row", "offload_x_resident": True},
    "column": {"offload_schedule": "column", "offload_batches": 2},
    "weights outside, column": {"offload_schedule": "column", "offload_batches": 2, "weight_offload": True},
    "weights outside, row": {"offload_schedule": "row", "weight_offload": True},
}


def engine(**settings: Any) -> LLM:
    given = {"dtype": "bfloat16", "attention_backend": "triton", "max_batch_tokens": 256, "max_model_len": 1024}
    return LLM("tiny", **{**given, **settings})


@pytest.fixture(scope="module")
def truth() -> list[Trace]:
    llm = engine(kv_cache_tokens=8192)
    return [run(llm, [prompt], PARAMS)[0] for prompt in prompts_of(llm)]


def restored(llm: LLM, truth: list[Trace]) -> None:
    """Answers before and after everything went below the pool."""
    prompts = prompts_of(llm)
    same(answer(llm, prompts, PARAMS), truth)
    flush(llm)
    same(answer(llm, prompts, PARAMS), truth)
    llm.close()


@pytest.mark.parametrize("mix", MIXES)
def test_restored_is_the_same_as_computed(mix: str, truth: list[Trace]) -> None:
    llm = engine(kv_cache_tokens=8192, kv_offloading_size=0.05, kv_offload_activations="on")
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(*MIXES[mix])
    restored(llm, truth)


def test_replayed_steps_keep_activations(truth: list[Trace]) -> None:
    """What they kept is projected again when the answer is a prompt."""
    llm = engine(kv_cache_tokens=8192, kv_offloading_size=0.05, kv_offload_activations="on")
    prompts, params = prompts_of(llm), SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    longer = engine(kv_cache_tokens=8192)
    expected = run(longer, prompts, params)
    before = llm.engine.stats().graphs
    same(answer(llm, prompts, params), expected)
    assert llm.engine.offload is not None
    assert before.replayed and not before.eager
    flush(llm)
    llm.engine.offload.choose = forced(*MIXES["project"])
    going_on = [answered(prompt, trace) for prompt, trace in zip(prompts, expected, strict=True)]
    same(answer(llm, going_on, PARAMS), [run(longer, [prompt], PARAMS)[0] for prompt in going_on])
    llm.close()


def test_from_a_disk(tmp_path: Path, truth: list[Trace]) -> None:
    restored(engine(kv_cache_tokens=8192, kv_offload_path=str(tmp_path)), truth)


def test_preempted_and_evicted(truth: list[Trace]) -> None:
    """A pool for one prompt at a time: all others are stored when they are evicted, and come back."""
    llm = engine(kv_cache_tokens=576, max_model_len=512, kv_offloading_size=0.05)
    for _ in range(2):
        same([watched(llm, [prompt], PARAMS)[0] for prompt in prompts_of(llm)], truth)
    llm.close()


@pytest.mark.parametrize("share", [None, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("form", STREAMED)
def test_streamed_is_the_same_as_resident(form: str, share: float | None, truth: list[Trace]) -> None:
    llm = engine(kv_offloading_size=0.05, kv_offload_activations="on", **STREAMED[form])
    llm.engine.loaded.executor.streamer.options.share = share  # type: ignore[attr-defined]
    prompts = prompts_of(llm)
    same(run(llm, prompts, PARAMS), truth)
    same(run(llm, prompts[::-1], PARAMS), truth[::-1])  # on cached prefixes
    llm.close()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_codes_outside_are_the_same_as_resident(quantization: str) -> None:
    resident = engine(kv_cache_tokens=8192, quantization=quantization)
    prompts = prompts_of(resident)
    expected = run(resident, prompts, PARAMS)
    resident.close()
    llm = engine(kv_offloading_size=0.05, quantization=quantization, **STREAMED["weights outside, column"])
    same(run(llm, prompts, PARAMS), expected)
    llm.close()


def test_a_gpu_holds_two_layers_of_weights_outside(tmp_path: Path) -> None:
    """Of eight, experts among them; all lie in pinned memory."""
    shape = CheckpointShape(
        hidden=256, layers=8, heads=4, kv_heads=4, head_dim=64, mlp=256, vocab=512, experts=8, chosen=2
    )
    folder, params = str(write_checkpoint(shape, tmp_path)), SamplingParams(temperature=0.0, max_tokens=4)
    settings: dict[str, Any] = {"dtype": "bfloat16", "attention_backend": "triton", "max_batch_tokens": 64}
    resident = LLM(folder, kv_cache_tokens=256, max_model_len=256, **settings)
    whole = sum(w.nbytes for w in resident.engine.loaded.decoder.matrices.values() if isinstance(w, torch.Tensor))
    expected = run(resident, [[3, 5, 7]], params)
    resident.close()
    del resident
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    llm = LLM(folder, kv_offloading_size=0.01, max_model_len=256, **STREAMED["weights outside, row"], **settings)
    layers = llm.engine.loaded.executor.streamer.transfers.layers  # type: ignore[attr-defined]
    weights = [w for layer in layers.outside for w in layer.matrices.values()]
    assert all(isinstance(w, torch.Tensor) and w.is_pinned() and not w.is_cuda for w in weights)
    assert bytes_of_buffers(layers.outside, experts=True) < whole / 3
    assert torch.cuda.memory_allocated() - before < whole / 2 + (32 << 20), "staging, embeddings and buffers"
    same(run(llm, [[3, 5, 7]], params), expected)
    llm.close()


def test_streamed_drafts(truth: list[Trace]) -> None:
    llm = engine(kv_offloading_size=0.05, speculative="ngram", **STREAMED["row"])
    prompts = prompts_of(llm)
    drafts_from(llm, [answered(prompt, trace) for prompt, trace in zip(prompts, truth, strict=True)])
    same(run(llm, prompts, PARAMS), truth)
    assert llm.engine.stats().speculation.accepted > 0
    llm.close()


def test_a_file_may_hold_what_is_streamed(tmp_path: Path, truth: list[Trace]) -> None:
    """Its memory is not pinned."""
    llm = engine(kv_offload_path=str(tmp_path), kv_offload_disk_size=0.05, **STREAMED["row"])
    same(run(llm, prompts_of(llm), PARAMS), truth)
    llm.close()


def test_staging_must_hold_a_layer() -> None:
    with pytest.raises(ValueError, match="raise offload_staging_mb to"):
        engine(kv_offloading_size=0.5, offload_staging_mb=1, **STREAMED["row"])


@pytest.mark.parametrize("size", [64, 65_536, 1 << 20, (1 << 20) + 24])
def test_pieces_of_pinned_memory(size: int) -> None:
    """Memory that the driver pinned where it lay, and small memory that torch pins."""
    pinned = current().pinned((40, size), torch.uint8)
    assert pinned.is_pinned()
    pinned.copy_(torch.randint(256, pinned.shape, dtype=torch.uint8))
    order = torch.randperm(40).tolist()
    into = torch.zeros(40, size, dtype=torch.uint8, device="cuda")
    gather(into, [pinned[place] for place in order])
    assert torch.equal(into.cpu(), pinned[order])
