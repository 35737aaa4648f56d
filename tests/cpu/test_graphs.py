"""A whole engine on a fake device (tests.support.fake_device): steps replayed from graphs that outlive plans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")

from headrace import LLM, SamplingParams
from headrace.bench.shapes import CheckpointShape, write_checkpoint
from headrace.engine.graphs import CudaGraphs, Key
from headrace.engine.runner import Runner
from headrace.kernels.backend import recorded
from tests.support.fake_device import FakeDevice, fake_device
from tests.support.traces import Trace, run, same

SHAPE = CheckpointShape(hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, mlp=64, vocab=96, context=1024)
FOUR = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(SHAPE, tmp_path_factory.mktemp("model"))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    # Recordings are made when they are needed: each takes a step's time here.
    monkeypatch.setattr(Runner, "record", lambda self: None)
    with fake_device(monkeypatch) as device:
        yield device


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"kv_cache_tokens": 1024, "max_sequences": 4, **settings}
    return LLM(str(folder), attention_backend="triton", dtype="float32", **given)


def graphs_of(llm: LLM) -> CudaGraphs:
    runner = llm.engine.loaded.executor
    assert isinstance(runner, Runner) and isinstance(runner.decoding, CudaGraphs)
    return runner.decoding


def eagerly(llm: LLM, prompts: list[list[int]], params: SamplingParams = FOUR) -> list[Trace]:
    """Without graphs, on an empty cache."""
    runner = llm.engine.loaded.executor
    assert isinstance(runner, Runner)
    graphs, runner.decoding = runner.decoding, runner.eager
    llm.engine.cache.tree.clear()
    try:
        return run(llm, prompts, params)
    finally:
        runner.decoding = graphs
        llm.engine.cache.tree.clear()


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(SHAPE.vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_replayed_is_the_same_as_eager(folder: Path, fake: FakeDevice) -> None:
    """Three sequences, two of them behind a shared chunk; two enter new chunks, at different steps: every plan but one
    is another, and all of them are replayed from one recording of four rows."""
    llm = engine(folder)
    shared = tokens(64, 1)
    prompts = [shared + tokens(62, 2), shared + tokens(3, 3), tokens(61, 4)]
    truth = eagerly(llm, prompts)
    same(run(llm, prompts, FOUR), truth)
    graphs = graphs_of(llm)
    assert (graphs.stats.replayed, graphs.stats.eager, graphs.stats.recorded) == (3, 0, 1)
    assert [each.replays for each in fake.graphs] == [3]
    assert llm.engine.stats().graphs.replayed == 3


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


def test_what_does_not_fit_is_computed_eagerly(folder: Path, fake: FakeDevice) -> None:
    """Three rows where two are expected; then again two, replayed."""
    llm = engine(folder, max_sequences=2)
    runner, graphs = llm.engine.loaded.executor, graphs_of(llm)
    assert isinstance(runner, Runner)
    small = CudaGraphs(graphs.decoder, graphs.storage, recorded(runner.backend), runner.eager, 1)
    runner.decoding = small
    prompts = [tokens(70, seed) for seed in range(2)]
    truth = eagerly(llm, prompts)
    same(run(llm, prompts, FOUR), truth)
    assert (small.stats.replayed, small.stats.eager) == (0, 3)


def test_usual_steps_are_recorded_before_the_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_device(monkeypatch) as fake:
        llm = engine(folder, max_sequences=1)
        assert sorted(graphs_of(llm)._recorded) == [Key(1, 1), Key(1, 2)]
        assert all(not tensor.any() for pool in graphs_of(llm).storage.pools for tensor in pool.tensors)
        assert [each.replays for each in fake.graphs] == [0, 0]


def test_hidden_states_and_prompts_are_not_replayed(folder: Path, fake: FakeDevice) -> None:
    """All rows are wanted, but something besides logits is, too."""
    llm = engine(folder)
    llm.generate([tokens(3, 1)], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert graphs_of(llm).stats.replayed == 0
