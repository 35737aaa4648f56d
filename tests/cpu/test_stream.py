"""KV outside the fast memory: logits equal, to the bit, those of an engine that has it at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.kernels import cpu
from headrace.models.decoder import load_decoder
from headrace.offload.copy_streams import open_copy_streams
from headrace.offload.streaming.store import FileMemory
from headrace.offload.weights.streamed import StreamedLayers
from tests.support.checkpoints import EVERY_STREAMED, FolderOf
from tests.support.traces import Trace, prompts_of, run, same, words

pytestmark = pytest.mark.usefixtures("one_thread")

BRIEF = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
FORMS: dict[str, dict[str, Any]] = {
    "row": {"offload_schedule": "row"},
    "row, X in memory": {"offload_schedule": "row", "offload_x_resident": True},
    "row, weights outside": {"offload_schedule": "row", "weight_offload": True},
    "column": {"offload_schedule": "column", "offload_batches": 3},
    "column, weights outside": {"offload_schedule": "column", "weight_offload": True, "offload_batches": 3},
    "column of one": {"offload_schedule": "column", "weight_offload": True, "offload_batches": 1},
}


def streamed(model: str | Path = "tiny", share: float | None = None, pieces: int | None = None, **settings: Any) -> LLM:
    """An engine that streams. share: which part of the whole chunks is projected. pieces: chunks in staging."""
    given = {"dtype": "bfloat16", "kv_offloading_size": 0.5, "kv_offload_activations": "on", **settings}
    llm = LLM(model, **given)
    streamer = llm.engine.loaded.executor.streamer  # type: ignore[attr-defined]
    streamer.options.share = share
    if pieces is not None:
        streamer.transfers.staging.capacity = pieces
    return llm


def totals(llm: LLM) -> Any:
    return llm.engine.loaded.executor.streamer.transfers.totals  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", dtype="bfloat16", kv_cache_tokens=40_000)


@pytest.fixture(scope="module")
def truth(llm: LLM) -> list[Trace]:
    """All prompts together on an engine without streaming: see tests.support.traces.alone."""
    return run(llm, prompts_of(llm), BRIEF)


@pytest.mark.parametrize(("form", "share"), [
    *((form, share) for form in FORMS for share in (0.4, None)),
    *((form, share) for form in ("row", "column, weights outside") for share in (0.0, 1.0)),
])  # fmt: skip
def test_streamed_is_the_same_as_resident(form: str, share: float | None, llm: LLM, truth: list[Trace]) -> None:
    other = streamed(share=share, **FORMS[form])
    prompts = prompts_of(llm)
    same(run(other, prompts, BRIEF), truth)
    same(run(other, prompts[-4:], BRIEF), truth[-4:])  # on cached prefixes
    assert totals(other).loaded or share == 1.0
    assert bool(totals(other).projected) == bool(share) or share is None
    other.close()


@pytest.mark.parametrize("pieces", [1, pytest.param(2, marks=pytest.mark.matrix), 5])
@pytest.mark.parametrize("form", ["row", "column, weights outside"])
def test_small_staging_gives_the_same(form: str, pieces: int, llm: LLM, truth: list[Trace]) -> None:
    """Chunks of an operation pass in several pieces; attention is merged from piece to piece."""
    other = streamed(share=0.5, pieces=pieces, **FORMS[form])
    same(run(other, prompts_of(llm), BRIEF), truth)
    other.close()


@pytest.mark.parametrize("form", ["row, weights outside", "column, weights outside"])
def test_coarse_order_of_weights_gives_the_same(form: str, llm: LLM, truth: list[Trace]) -> None:
    """One transfer for each slice of a layer; changed in mid-request, as the benchmark does."""
    other = streamed(share=0.5, **FORMS[form])
    options = other.engine.loaded.executor.streamer.options  # type: ignore[attr-defined]
    for fine in (False, True, False):
        options.fine = fine
        same(run(other, prompts_of(llm)[-4:], BRIEF), truth[-4:])
    other.close()


@pytest.mark.parametrize("budget", [64, 200])
@pytest.mark.parametrize("form", ["row", "column, weights outside"])
def test_prefill_in_chunks_is_the_same(form: str, budget: int, llm: LLM, truth: list[Trace]) -> None:
    other = streamed(share=0.5, max_batch_tokens=budget, **FORMS[form])
    same(run(other, prompts_of(llm), BRIEF), truth)
    other.close()


LONG = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def long_truth(llm: LLM) -> list[Trace]:
    return run(llm, prompts_of(llm), LONG)


@pytest.mark.parametrize(("form", "size"), [("row, X in memory", 0.0015), ("column, weights outside", 0.003)])
def test_preempted_in_mid_request_is_the_same(form: str, size: float, llm: LLM, long_truth: list[Trace]) -> None:
    """size: GiB of a store that holds some 1,000 tokens."""
    other = streamed(share=0.5, kv_offloading_size=size, max_batch_tokens=200, **FORMS[form])
    same(run(other, prompts_of(llm), LONG), long_truth)
    stats = other.engine.stats()
    assert stats.scheduler.preemptions > 0 and stats.kv.evictions > 0
    other.close()


@pytest.mark.parametrize("kind", EVERY_STREAMED)
def test_every_family(kind: str, folder_of: FolderOf) -> None:
    """Projected K and V have the family's bias, norm and rotation; windows and ALiBi stream like all else."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_batch_tokens": 96}
    resident = LLM(folder_of(kind), kv_cache_tokens=8192, **settings)
    prompts = [words(resident, n, seed=n) for n in (3, 90, 200)] + [words(resident, 200, seed=200)[:150]]
    params = replace(BRIEF, max_tokens=4)
    expected = run(resident, prompts, params)
    for form, share in (("row", 0.6), ("column, weights outside", 1.0)):
        other = streamed(folder_of(kind), share=share, pieces=3, **FORMS[form], **settings)
        same(run(other, prompts, params), expected)
        assert totals(other).projected > 0
        other.close()


def test_experts_are_read_where_they_lie(folder_of: FolderOf, tmp_path: Path) -> None:
    """Of a file: dense layers and routers are loaded layer by layer, experts never, and answers are the same."""
    folder = folder_of("qwen3_moe_mixed")
    streams = open_copy_streams()
    layers = StreamedLayers(load_decoder(folder, "bfloat16"), streams.into, FileMemory(str(tmp_path), 1 << 24))
    names = {name for buffer in layers.buffers for name in buffer.room}
    assert names == {f"{name}.weight" for name in ("qkv", "out", "up", "down", "router")}
    layer, name = layers.layer(0).run.layers[0], "experts.3.down.weight"
    assert layer.matrices[name] is layers.outside[0].matrices[name]
    streams.close()
    resident, form = LLM(folder, kv_cache_tokens=4096, dtype="bfloat16"), FORMS["row, weights outside"]
    other = streamed(folder, share=0.5, kv_offload_path=str(tmp_path), **form)
    prompts = [words(resident, n, seed=n) for n in (90, 130)]
    same(run(other, prompts, BRIEF), run(resident, prompts, BRIEF))
    other.close()


@pytest.fixture(scope="module")
def truth_of() -> Callable[..., list[Trace]]:
    """truth_of(**settings): some of the prompts on an engine without streaming."""

    @lru_cache(None)
    def truth(**settings: Any) -> list[Trace]:
        resident = LLM("tiny", **{"dtype": "bfloat16", "kv_cache_tokens": 8192, **settings})
        return run(resident, prompts_of(resident)[4:10], BRIEF)

    return truth


@pytest.mark.parametrize("settings", [
    {"kv_cache_dtype": "int8"}, {"quantization": "int8"}, {"quantization": "int4"}, {"attention_backend": "reference"},
    {"dtype": "float32"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("form", ["row", "column, weights outside"])
def test_every_type(form: str, settings: dict[str, Any], truth_of: Callable[..., list[Trace]], llm: LLM) -> None:
    other = streamed(share=0.5, pieces=4, **{**FORMS[form], **settings})
    same(run(other, prompts_of(llm)[4:10], BRIEF), truth_of(**settings))
    assert totals(other).projected > 0
    other.close()


@pytest.mark.parametrize("isa", cpu.available_isas() if cpu.available() else ())
def test_every_instruction_set(isa: str) -> None:
    before = cpu.isa()
    cpu.use_isa(isa)
    try:
        resident = LLM("tiny", dtype="bfloat16", kv_cache_tokens=8192)
        prompts = prompts_of(resident)[4:10]
        other = streamed(share=0.5, pieces=4, **FORMS["column, weights outside"])
        same(run(other, prompts, BRIEF), run(resident, prompts, BRIEF))
        other.close()
    finally:
        cpu.use_isa(before)


def test_a_file_may_be_the_store(tmp_path: Path, llm: LLM, truth: list[Trace]) -> None:
    other = streamed(share=0.5, kv_offload_path=str(tmp_path / "kv"), **FORMS["column, weights outside"])
    same(run(other, prompts_of(llm), BRIEF), truth)
    assert list((tmp_path / "kv").iterdir()) == [], "the file has a name"
    other.close()


def test_kv_cache_tokens_bounds_what_is_in_fast_memory(llm: LLM, truth: list[Trace]) -> None:
    """The store holds what its own size allows. 128 tokens are six chunks of one of three layers."""
    other = streamed(share=0.0, kv_cache_tokens=128, kv_offload_activations="off", **FORMS["row"])
    transfers = other.engine.loaded.executor.streamer.transfers  # type: ignore[attr-defined]
    pools = [tensor for pool in transfers.staging.kv for tensor in pool.tensors]
    assert sum(tensor.nbytes for tensor in pools) <= 128 * other.capacity.kv_bytes_per_token
    assert other.capacity.kv_cache_tokens > 40_000
    same(run(other, prompts_of(llm), BRIEF), truth)
    other.close()


def test_a_shared_chunk_crosses_the_link_once(llm: LLM) -> None:
    """Sixteen sequences on one prefix of 20 chunks: each decode step loads it once a layer, and each own chunk."""
    prefix = words(llm, 20 * 64, seed=3)
    prompts = [prefix + words(llm, 10, seed=i) for i in range(16)]
    other = streamed(share=0.0, **FORMS["row"])
    run(other, prompts, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    before = totals(other).loaded
    run(other, prompts, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    layers = other.engine.loaded.decoder.config.layers
    # A step for the own parts of the prompts on the cached prefix, whose last layer needs all; then one decode step.
    assert totals(other).loaded - before == layers * (20 + 20 + 16)
    other.close()


@pytest.mark.parametrize("form", ["row", "column, weights outside"])
def test_a_slow_link_changes_nothing(form: str, llm: LLM, truth: list[Trace]) -> None:
    """All that arrives late is waited for, and what leaves late has arrived when it is read again."""
    slow = streamed(share=0.5, kv_link_gbps=0.2, kv_link_latency_ms=0.3, **FORMS[form])
    same(run(slow, prompts_of(llm)[-4:], BRIEF), truth[-4:])
    slow.close()


@pytest.mark.parametrize("form", ["row", "column, weights outside"])
def test_a_failing_link_ends_the_step(form: str, llm: LLM) -> None:
    """With its error; and nothing is answered from a store that may lack what that step was to write."""
    other = streamed(share=0.5, **FORMS[form])
    streamer = other.engine.loaded.executor.streamer  # type: ignore[attr-defined]
    prompt = words(llm, 200, seed=1)
    expected = run(llm, [prompt], BRIEF)
    same(run(other, [prompt], BRIEF), expected)
    whole = streamer.transfers.staging.load_kv

    def broken(*_: Any) -> None:
        raise OSError("the disk is gone")

    streamer.transfers.staging.load_kv = broken  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the disk is gone"):
        other.generate([[*prompt, 7]], BRIEF)
    streamer.transfers.staging.load_kv = whole  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"an earlier step failed \(the disk is gone\); load the model again"):
        other.generate([prompt], BRIEF)
    other.close()


def test_auto_is_row_with_weights_at_hand_and_column_without() -> None:
    for offload, schedule in ((False, "row"), (True, "column")):
        other = streamed(offload_schedule="auto", weight_offload=offload)
        assert other.engine.loaded.executor.streamer.options.schedule == schedule  # type: ignore[attr-defined]
        other.close()


def test_x_is_kept_where_it_is_smaller_or_at_hand(folder_of: FolderOf) -> None:
    """By default: with as many KV heads as heads it is half of K and V; with half as many it is as large, and is not
    kept unless it stays in memory."""

    def width(kind: str, **settings: Any) -> int:
        with streamed(folder_of(kind), kv_offload_activations="auto", offload_schedule="row", **settings) as other:
            return int(other.engine.loaded.executor.streamer.transfers.store.hidden)  # type: ignore[attr-defined]

    assert width("llama") == 128 and width("llama_gqa") == 0
    assert width("llama_gqa", offload_x_resident=True) == 128


@pytest.mark.parametrize(("settings", "named"), [
    ({"offload_schedule": "off", "weight_offload": True}, "offload_schedule"),
    ({"kv_offloading_size": 0.0}, "kv_offloading_size"),
    ({"kv_offloading_size": 1e-6}, "kv_offloading_size"),
    ({"kv_offloading_size": 0.001, "max_model_len": 2000}, "kv_offloading_size"),
    ({"kv_host_format": "int8"}, "kv_host_format"),
    ({"kv_remote_url": "redis://127.0.0.1:6379/0"}, "kv_remote_url"),
    ({"offload_x_resident": True, "kv_offload_activations": "off"}, "kv_offload_activations"),
    ({"kv_offload_path": "/dev/null/nowhere"}, "kv_offload_path"),
    ({"offload_batches": 0}, "offload_batches"),
    ({"offload_staging_mb": 0}, "offload_staging_mb"),
])  # fmt: skip
def test_refuses_what_cannot_work(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LLM("tiny", **{"offload_schedule": "row", "kv_offloading_size": 0.1, **settings})


def test_weights_outside_leave_no_second_copy(tmp_path: Path) -> None:
    """With a file for them, the decoder's own matrices are those in the file."""
    other = streamed(kv_offload_path=str(tmp_path), **FORMS["column, weights outside"])
    loaded = other.engine.loaded
    streamed_layers = loaded.executor.streamer.transfers.layers  # type: ignore[attr-defined]
    assert all(layer.matrices[name] is loaded.decoder.matrices[f"layers.{layer.index}.{name}"]
               for layer in streamed_layers.outside for name in layer.matrices)  # fmt: skip
    other.close()
