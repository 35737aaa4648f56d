"""A whole engine on a fake device (tests.support.fake_device): steps of decoding replayed from graphs that outlive
plans. Those with prompts in them are launched here; test_graph_buckets replays them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")

from headrace import LLM, SamplingParams
from headrace.bench.shapes import write_checkpoint
from headrace.engine import gpu_memory
from headrace.engine.gpu_memory import bytes_for_cache
from headrace.engine.graphs import CudaGraphs, Key
from headrace.engine.runner import Runner
from headrace.host import GIB
from headrace.kernels.backend import recorded
from headrace.models.config import read_config
from headrace.models.sizes import weight_bytes
from headrace.offload.restore import timing
from tests.support.drafting import answered, drafts_from
from tests.support.fake_device import FakeDevice, fake_device
from tests.support.offloading import MIXES, answer, flush, forced, watched
from tests.support.small_gpu_engines import SHAPE, launched, tokens
from tests.support.traces import run, same

FOUR = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
THREE = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(SHAPE, tmp_path_factory.mktemp("model"))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    # Recordings are made when they are needed: each takes a step's time here.
    monkeypatch.setattr(Runner, "record", lambda self: None)
    # Nor is it measured how fast an interpreter restores.
    monkeypatch.setattr(timing, "call_seconds", lambda work, most_s=0.05: 1e-3)
    with fake_device(monkeypatch) as device:
        yield device


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"kv_cache_tokens": 1024, "max_sequences": 4, **settings}
    llm = LLM(str(folder), attention_backend="triton", dtype="float32", **given)
    runner = llm.engine.loaded.executor
    assert isinstance(runner, Runner)
    runner.mixed = runner.eager
    graphs_of(llm).otherwise = graphs_of(llm)._launched
    return llm


def graphs_of(llm: LLM) -> CudaGraphs:
    runner = llm.engine.loaded.executor
    assert isinstance(runner, Runner) and isinstance(runner.decoding, CudaGraphs)
    return runner.decoding


def test_replayed_is_the_same_as_eager(folder: Path, fake: FakeDevice) -> None:
    """Three sequences, two of them behind a shared chunk; the third enters a new chunk. Three steps, one that is
    planned anew, one that follows, one that goes on from it, are replayed from one recording of four rows."""
    llm = engine(folder)
    shared = tokens(64, 1)
    prompts = [shared + tokens(1, 2), shared + tokens(2, 3), tokens(62, 4)]
    truth = launched(llm, prompts, FOUR)
    same(run(llm, prompts, FOUR), truth)
    graphs = graphs_of(llm)
    assert (graphs.stats.replayed, graphs.stats.eager, graphs.stats.recorded) == (3, 0, 1)
    assert [each.replays for each in fake.graphs] == [3]
    assert llm.engine.stats().graphs.replayed == 3


def test_kept_activations_are_part_of_a_recording(folder: Path, fake: FakeDevice) -> None:
    """Three sequences where there are graphs of four rows; one of them enters a new chunk. X is what launched steps
    keep, and the padding writes none."""
    llm = engine(folder, kv_offloading_size=0.01, kv_offload_activations="on")
    prompts = [tokens(63, 1), tokens(2, 2), tokens(1, 3)]
    graphs = graphs_of(llm)
    runner = llm.engine.loaded.executor
    assert isinstance(runner, Runner) and graphs.storage.x is not None
    runner.decoding = runner.eager
    truth = watched(llm, prompts, THREE)
    kept = graphs.storage.x[0].clone()
    flush(llm)
    runner.decoding = graphs
    graphs.storage.x[0].zero_()
    same(watched(llm, prompts, THREE), truth)
    assert graphs.stats.replayed == 2 and not graphs.stats.eager
    for mine, theirs in zip(_rows_of(graphs.storage.x[0]), _rows_of(kept), strict=True):
        assert torch.equal(mine, theirs)
    llm.close()


def _rows_of(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows of X that were written, in an order of their own, since chunks may have other slots; how often each is."""
    rows = x.view(-1, x.shape[-1])
    return rows[rows.any(dim=1)].unique(dim=0, return_counts=True)


@pytest.mark.parametrize("mix", [pytest.param("load", marks=pytest.mark.matrix), "project"])
def test_a_step_that_waits_for_restored_chunks_is_replayed(mix: str, folder: Path, fake: FakeDevice) -> None:
    """The prompt's last token alone is left to compute when its chunks are on their way."""
    llm = engine(folder, kv_offloading_size=0.01, kv_offload_activations="on")
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(*MIXES[mix])
    prompt = tokens(65, 1)
    truth, graphs = answer(llm, [prompt], THREE), graphs_of(llm)
    waited: list[tuple[int, ...]] = []
    flush(llm)
    runner = llm.engine.loaded.executor
    assert isinstance(runner, Runner)
    awaited = runner._awaited
    runner._awaited = lambda slices: waited.append(tuple(awaited(slices))) or list(waited[-1])  # type: ignore
    before = graphs.stats.replayed
    same(answer(llm, [prompt], THREE), truth)
    assert any(waited) and graphs.stats.replayed == before + 3
    llm.close()


def test_padding_leaves_the_cache_alone(folder: Path, fake: FakeDevice) -> None:
    """Of all chunks that no row of the step writes, none changes; and the padding's results are finite."""
    llm = engine(folder)
    prompts = [tokens(5, seed) for seed in range(3)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    graphs = graphs_of(llm)
    storage = graphs.storage
    before = [x.clone() for pool in storage.pools for x in pool.tensors]
    graphs._record(Key(4, 1)).graph.replay()
    after = [x for pool in storage.pools for x in pool.tensors]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert graphs._recorded[Key(4, 1)].logits.isfinite().all()
    llm.engine.cache.tree.clear()
    llm.generate(prompts, FOUR)
    slots = {x.nonzero()[:, 0].unique().numel() for x in after}
    assert slots == {3}, "some chunk holds what nobody wrote"


def test_a_step_takes_the_next_larger_graph(folder: Path, fake: FakeDevice) -> None:
    llm = engine(folder)
    graphs = graphs_of(llm)
    assert graphs.sizes == [1, 2, 4]
    for count in (1, 2, 3):
        llm.engine.cache.tree.clear()
        llm.generate([tokens(5, seed) for seed in range(count)], SamplingParams(max_tokens=2, ignore_eos=True))
    assert sorted(graphs._recorded) == [Key(1, 1), Key(2, 1), Key(4, 1)]
    assert {each.logits.data_ptr() for each in graphs._recorded.values()} == {graphs.logits.data_ptr()}


def test_what_does_not_fit_is_computed_eagerly(folder: Path, fake: FakeDevice) -> None:
    """Three rows where two are expected; then again two, replayed."""
    llm = engine(folder, max_sequences=2)
    runner, graphs = llm.engine.loaded.executor, graphs_of(llm)
    assert isinstance(runner, Runner)
    small = CudaGraphs(graphs.decoder, graphs.storage, recorded(runner.backend), runner.eager, 1)
    runner.decoding = small
    prompts = [tokens(5, seed) for seed in range(2)]
    truth = launched(llm, prompts, FOUR)
    same(run(llm, prompts, FOUR), truth)
    assert (small.stats.replayed, small.stats.eager) == (0, 3)


def test_what_cannot_be_recorded_is_launched(
    folder: Path, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried once. Steps that can be recorded are replayed."""
    llm, tried = engine(folder, max_sequences=2), Mock(side_effect=torch.OutOfMemoryError("no memory"))
    graphs, params = graphs_of(llm), SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake, "graph", tried)
        for _ in range(2):
            llm.generate([[5]], params)
    assert (tried.call_count, graphs.stats.replayed, graphs.stats.eager) == (1, 0, 4)
    assert "steps of 1 rows are launched, not recorded: no memory" in caplog.text
    llm.generate([[5], [6]], params)
    assert (graphs.stats.replayed, graphs.stats.eager) == (2, 4)


def test_usual_steps_are_recorded_before_the_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_device(monkeypatch) as fake:
        llm = engine(folder, max_sequences=1, max_batch_tokens=1)
        assert sorted(graphs_of(llm)._recorded) == [Key(1, 1)]
        assert all(not tensor.any() for pool in graphs_of(llm).storage.pools for tensor in pool.tensors)
        assert fake.graphs[-1].replays == 0


def test_hidden_states_are_not_replayed(folder: Path, fake: FakeDevice) -> None:
    """All rows are wanted, but something besides logits is, too."""
    llm = engine(folder)
    llm.generate([tokens(3, 1)], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert graphs_of(llm).stats.replayed == 0


def test_the_pool_is_what_is_left_beside_the_largest_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 GiB free, 1 GiB of them left, 2 GiB for a step, launched or replayed: 1 GiB, or what all sequences can need."""
    monkeypatch.setattr(Runner, "record", lambda self: None)
    with fake_device(monkeypatch, memory=6 * GIB, peak=2 * GIB):
        wide = {"kv_cache_tokens": None, "max_batch_tokens": 8}
        assert engine(folder, **wide).capacity.kv_cache_tokens == 4 * SHAPE.context
        llm = engine(folder, **wide)
        assert [bytes_for_cache(llm.engine.loaded.decoder, "triton", 8, 1, models) for models in (1, 2)] == [GIB, 0]
    with fake_device(monkeypatch, memory=5 * GIB, peak=2 * GIB), pytest.raises(ValueError, match="no memory"):
        engine(folder, **wide)
    with fake_device(monkeypatch) as fake, pytest.raises(ValueError, match=r"of 8 tokens.* lower max_batch_tok"):
        monkeypatch.setattr(fake, "peak_memory", Mock(side_effect=torch.OutOfMemoryError))
        engine(folder, **wide)


def test_a_pool_that_does_not_fit_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 bytes a token beside the weights: 1,000 tokens, of which whole chunks."""
    monkeypatch.setattr(Runner, "record", lambda self: None)
    weights = weight_bytes(read_config(folder), "float32")
    with fake_device(monkeypatch, memory=weights + 1000 * 128):
        with pytest.raises(ValueError, match=r"1,024 needs .* beside the weights: at most 960 tokens fit"):
            engine(folder, kv_cache_tokens=1024)
        engine(folder, kv_cache_tokens=960)


def test_a_model_that_fits_in_codes_alone_has_a_pool(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers would take all of the memory; what is left is measured once the weights are there."""
    monkeypatch.setattr(Runner, "record", lambda self: None)
    monkeypatch.setattr(gpu_memory, "bytes_for_cache", lambda *given: GIB)
    whole = weight_bytes(read_config(folder), "float32")
    with fake_device(monkeypatch, memory=whole):
        assert engine(folder, kv_cache_tokens=None, quantization="int8").capacity.kv_cache_tokens
        with pytest.raises(ValueError, match="no memory for a KV cache"):
            engine(folder, kv_cache_tokens=None)


def test_drafts_are_verified_by_replayed_steps(folder: Path, fake: FakeDevice) -> None:
    """Right and wrong ones: steps whose sequences have several rows, one of which enters a new chunk."""
    prompts = [tokens(61, 5), tokens(4, 6)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    llm = engine(folder, speculative="ngram", num_speculative_tokens=3, max_sequences=2)
    truth = launched(llm, prompts, params)
    drafts_from(llm, [answered(prompt, trace) for prompt, trace in zip(prompts, truth, strict=True)])
    same(run(llm, prompts, params), truth)
    spoken, graphs = llm.engine.stats().speculation, graphs_of(llm)
    assert 0 < spoken.accepted < spoken.drafted
    assert graphs.sizes[-1] == 8 and graphs.stats.replayed > 2 and not graphs.stats.eager
