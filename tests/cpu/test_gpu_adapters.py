"""Adapters (LoRA) on a fake GPU (tests.support.fake_device): what their kernels add, and engines whose steps have the
rows of several, launched and replayed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has such engines on it", allow_module_level=True)

from headrace import LLM, SamplingParams
from headrace import device as devices
from headrace.bench.shapes import CheckpointShape, write_checkpoint
from headrace.engine import gpu_memory, preflight
from headrace.engine.graph_buckets import PromptGraphs
from headrace.engine.graphs import CudaGraphs
from headrace.engine.runner import Runner
from headrace.kernels.adapted_rows import AdaptedRows, Pair, Pairs, placed
from headrace.kernels.triton import adapted, backend
from headrace.models.config import read_config
from headrace.models.decoder import Decoder, TokenBatch
from headrace.offload.restore import timing
from headrace.types import CHUNK
from tests.support.adapters import with_adapter, write_adapter
from tests.support.drafting import answered, drafts_from
from tests.support.fake_device import FakeDevice
from tests.support.gpu_ranks import interpreted_on
from tests.support.offloading import counters, flush, forced, look_at_once, watched
from tests.support.small_gpu_engines import SHAPE, launched, recorded_when_needed, small_buckets, tokens
from tests.support.thread_group import ranks_as_threads
from tests.support.traces import Trace, run, same

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("all", "some", "late")
INVOCATION = [60, 61]
TWO, THREE = (SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (2, 3))


def checkpoint(shape: CheckpointShape, path: Path) -> Path:
    """A model, and in it three adapters: of all modules, of some of attention's, and one that begins where it is
    invoked."""
    write_checkpoint(shape, path)
    model = AutoModelForCausalLM.from_pretrained(path)
    write_adapter(path / "all", model, seed=1, size=4.0)
    write_adapter(path / "some", model, r".*(q|v)_proj", rank=40, seed=2, size=4.0)
    write_adapter(path / "late", model, seed=3, size=4.0, alora_invocation_tokens=INVOCATION)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(SHAPE, tmp_path_factory.mktemp("model"))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    monkeypatch.setattr(timing, "call_seconds", lambda work, most_s=0.05: 1e-3)
    small_buckets(monkeypatch)
    with recorded_when_needed(monkeypatch) as device:
        yield device


def engine(folder: Path, **more: Any) -> LLM:
    given: dict[str, Any] = dict(max_sequences=4, dtype="float32", attention_backend="triton")
    given |= {} if "offload_schedule" in more else dict(kv_cache_tokens=1024)
    return LLM(str(folder), lora_modules=",".join(f"{name}={folder / name}" for name in NAMES), **given | more)


def pairs_of(outputs: int, inputs: int, has: list[bool], rank: int = 32) -> Pairs:
    g = torch.Generator().manual_seed(3)
    return [
        Pair(torch.randn(rank, inputs, generator=g), torch.randn(outputs, rank, generator=g)) if each else None
        for each in has
    ]


@settings(max_examples=12, deadline=None)
@given(
    numbers=st.lists(st.integers(-1, 2), min_size=1, max_size=40),
    has=st.lists(st.booleans(), min_size=3, max_size=3).filter(any),
    first=st.sampled_from([0, 5]),
)
def test_what_they_add_is_what_a_cpu_adds(numbers: list[int], has: list[bool], first: int) -> None:
    """Of rows in any order, to outputs that lie in a wider tensor; a row has the bits that it has alone, and one
    without an adapter is left as it is."""
    pairs = pairs_of(33, 20, has)
    x, wide = torch.randn(len(numbers), 20), torch.randn(len(numbers), 40)
    rows, before = torch.tensor(numbers), wide[:, 7 : 40 - first].clone()
    expected = AdaptedRows(rows).added(pairs, x, before.clone(), first)
    with devices.use(FakeDevice()):
        ours, there = placed(pairs), wide.clone()
        found = AdaptedRows(rows).added(ours, x, there[:, 7 : 40 - first], first)
        assert found.data_ptr() == there[:, 7:].data_ptr() and torch.equal(there[:, :7], wide[:, :7])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        unchanged = torch.tensor([number < 0 or not has[number] for number in numbers])
        assert torch.equal(found[unchanged], before[unchanged])
        last = AdaptedRows(rows).of(torch.tensor([len(numbers) - 1]))
        assert torch.equal(last.added(ours, x[-1:], before[-1:].clone(), first), found[-1:])


def test_no_rows_and_no_pairs() -> None:
    with devices.use(FakeDevice()):
        pairs = placed(pairs_of(8, 8, [True]))
        none = torch.empty(0, 8)
        assert AdaptedRows(torch.empty(0, dtype=torch.int64)).added(pairs, none, none) is none
        with pytest.raises(ValueError, match="no adapter has anything"):
            adapted.GpuPairs([None])


def test_more_rows_than_one_launch_arranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sorted: in the order that the launch finds."""
    numbers = torch.randint(-1, 3, (100,), generator=torch.Generator().manual_seed(1))
    with devices.use(FakeDevice()):
        counted = adapted.arranged(numbers, 3).by
        monkeypatch.setattr("headrace.kernels.triton.experts.COUNTED", 64)
        ordered = adapted.arranged(numbers, 3).by
    for one, other in ((counted.order, ordered.order), (counted.place, ordered.place), (counted.begin, ordered.begin)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["all", pytest.param("some", marks=pytest.mark.matrix)])
def test_answers_are_those_of_the_adapter_multiplied_in(name: str, folder: Path, fake: FakeDevice) -> None:
    llm, given = engine(folder), tokens(9, 1)
    merged = with_adapter(AutoModelForCausalLM.from_pretrained(folder), folder / name)
    [ours] = llm.generate([given], THREE, adapter=name)
    theirs = merged.generate(torch.tensor([given]), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert ours.token_ids == theirs[0, len(given) :].tolist()
    [plain] = llm.generate([given], THREE)
    assert plain.token_ids != ours.token_ids


def test_replayed_together_is_the_same_as_launched_alone(folder: Path, fake: FakeDevice) -> None:
    """Rows of three adapters and of the model in one step, of a prompt beside them, and of the model's alone: graphs
    with adapters and without. One begins in the middle of its prompt."""
    llm = engine(folder, max_batch_tokens=16)
    prompts = [tokens(7, 1), tokens(5, 2), [*tokens(6, 3), *INVOCATION, 5], tokens(3, 4)]
    names = [*NAMES, ""]
    truth = [alone(llm, prompt, name) for prompt, name in zip(prompts, names, strict=True)]
    same(run(llm, prompts, THREE, names), truth)
    llm.engine.cache.tree.clear()
    same(run(llm, prompts[3:], THREE, [""]), truth[3:])
    runner = llm.engine.loaded.executor
    assert isinstance(runner, Runner) and isinstance(runner.mixed, PromptGraphs)
    assert isinstance(runner.decoding, CudaGraphs)
    for program in (runner.decoding, runner.mixed):
        assert {key.adapted for key in program._recorded} == {False, True}
    stats = llm.engine.stats().graphs
    assert stats.replayed > 3 and stats.prompts and not stats.eager


def alone(llm: LLM, prompt: list[int], name: str) -> Trace:
    """Of a prompt on an empty cache, every step launched."""
    return launched(llm, [prompt], THREE, [name])[0]


LONG = [*tokens(10, 5), *INVOCATION, *tokens(CHUNK - 10, 6)]
"""It is invoked in its first chunk."""


@pytest.mark.matrix
@pytest.mark.parametrize("way", ["restored", "streamed"])
def test_keys_are_projected_by_its_matrices(way: str, folder: Path, fake: FakeDevice) -> None:
    """From activations of a chunk inside which it begins."""
    truth = alone(engine(folder), LONG, "late")
    streamed = way == "streamed"
    more: dict[str, Any] = dict(offload_schedule="row", max_model_len=192) if streamed else {}
    llm = engine(folder, kv_offloading_size=0.01, kv_offload_activations="on", **more)
    executor: Any = llm.engine.loaded.executor
    if streamed:
        executor.streamer.options.share = 1.0
    same(watched(llm, [LONG], THREE, "late"), [truth])
    if not streamed:
        flush(llm)
        assert llm.engine.offload is not None
        llm.engine.offload.choose = forced(0.0, 1.0)
        look_at_once(llm)
        same(watched(llm, [LONG], THREE, "late"), [truth])
    done = executor.streamer.transfers.totals.projected if streamed else counters(llm).projected_tokens / CHUNK
    assert done >= 1
    llm.close()


@pytest.mark.matrix
@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
def test_rounded_weights(quantization: str, folder: Path, fake: FakeDevice) -> None:
    """What adapters add is not rounded with them."""
    llm, prompts, names = engine(folder, quantization=quantization), [tokens(7, 1), tokens(5, 2)], ["all", ""]
    truth = [alone(llm, prompt, name) for prompt, name in zip(prompts, names, strict=True)]
    same(run(llm, prompts, THREE, names), truth)


@pytest.mark.matrix
def test_drafted_tokens(folder: Path, fake: FakeDevice) -> None:
    """Several rows of a sequence that decodes have its adapter."""
    llm, prompt = engine(folder), tokens(7, 1)
    truth = alone(llm, prompt, "all")
    drafting = engine(folder, speculative="ngram", num_speculative_tokens=2)
    drafts_from(drafting, [answered(prompt, truth)])
    same(run(drafting, [prompt], THREE, "all"), [truth])


@pytest.mark.parametrize("kind", ["tensor", pytest.param("context", marks=pytest.mark.matrix)])
def test_ranks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its share of an adapter, or all of it."""
    monkeypatch.setattr(preflight, "GPU_DEVICES", ("null",))
    monkeypatch.setattr(backend, "verify", lambda *given: None)
    monkeypatch.setattr(Runner, "record", lambda self: None)
    folder = checkpoint(replace(SHAPE, hidden=64, kv_heads=2, mlp=64), tmp_path)
    prompts, names = [tokens(7, 1), tokens(5, 2)], ["all", ""]
    with interpreted_on(FakeDevice(), monkeypatch), ranks_as_threads():
        truth = [alone(engine(folder), prompt, name) for prompt, name in zip(prompts, names, strict=True)]
        llm = engine(folder, **{f"{kind}_parallel_size": 2})
        same(run(llm, prompts, THREE, names), truth)
        llm.close()


def test_the_pool_is_sized_beside_them(folder: Path, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose rows have adapters is the largest; a pool that is asked for lies beside the adapters' files."""
    steps: list[Tensor | None] = []
    forward = Decoder.forward

    def noted(self: Decoder, batch: TokenBatch, *given: Any, **more: Any) -> Tensor:
        steps.append(batch.adapters)
        return forward(self, batch, *given, **more)

    monkeypatch.setattr(Decoder, "forward", noted)
    llm = engine(folder, kv_cache_tokens=None, max_batch_tokens=16, max_model_len=64)
    assert steps and steps[0] is not None and len(steps[0]) == 16 and not steps[0].any()
    config = llm.engine.loaded.config
    without = config.replace(lora_modules=None)
    sizes = sum((folder / name / "adapter_model.safetensors").stat().st_size for name in NAMES)
    beside = [gpu_memory.beside_weights(each, read_config(folder)) for each in (config, without)]
    assert beside[1] - beside[0] >= sizes
