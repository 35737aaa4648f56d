"""A draft model on a fake device: the bits are those without drafts, and its passes are replayed, each of which looks
up what the one before has chosen on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")

from headrace import LLM, SamplingParams
from headrace.bench.shapes import write_checkpoint
from headrace.engine import gpu_memory
from headrace.engine.graphs import CudaGraphs
from headrace.engine.programs import StepRows
from headrace.engine.runner import Runner
from headrace.engine.sequence import SequenceState, Slice
from headrace.kernels.triton import graph_step
from headrace.models.config import read_config
from headrace.models.sizes import weight_bytes
from headrace.stats import GraphStats
from headrace.types import Request
from tests.support.drafting import answered, free_model
from tests.support.fake_device import FakeDevice, fake_device
from tests.support.small_gpu_engines import SHAPE, tokens
from tests.support.traces import Trace, run

OTHER = replace(SHAPE, hidden=16, layers=2, heads=1, kv_heads=1, head_dim=32)
"""A draft model with other heads and more layers."""
SEVEN = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(SHAPE, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(OTHER, tmp_path_factory.mktemp("draft"))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    monkeypatch.setattr(Runner, "record", lambda self: None)  # each recording takes a step's time here
    monkeypatch.setattr(graph_step, "PROGRAMS", 1)
    monkeypatch.setattr(graph_step, "MERGES", 1)
    with fake_device(monkeypatch) as device:
        yield device


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"kv_cache_tokens": 1024, "max_sequences": 4, "num_speculative_tokens": 4, **settings}
    llm = LLM(str(folder), attention_backend="triton", dtype="float32", **given)
    runner = llm.engine.loaded.executor
    assert isinstance(runner, Runner)
    runner.mixed = runner.eager
    if llm.engine.loaded.draft is not None:
        free_model(llm)
    return llm


def passes(llm: LLM) -> GraphStats:
    """Of the draft model."""
    draft = llm.engine.loaded.draft
    assert draft is not None and isinstance(draft.runner.decoding, CudaGraphs)
    return draft.runner.decoding.stats


def as_prefilled(llm: LLM, prompt: list[int], trace: Trace) -> None:
    """Rows of an answer are those of one launched step over prompt and answer."""
    truth = llm.logits(answered(prompt, trace)[:-1])
    for position, row in trace.items():
        assert torch.equal(truth[position], row), position


def test_a_model_that_drafts_for_itself_is_always_right(folder: Path, fake: FakeDevice) -> None:
    """The third step drafts four tokens, the second of which begins a chunk, and verifies them. Two of the passes are
    recorded as they are needed; the last one is given to the device while the one before it is under way."""
    llm, prompt = engine(folder, speculative=str(folder), max_sequences=1), tokens(61, 5)
    as_prefilled(llm, prompt, run(llm, [prompt], SEVEN)[0])
    told, stats = llm.engine.stats(), passes(llm)
    assert told.speculation.accepted == told.speculation.drafted == 4
    assert (told.graphs.replayed, stats.replayed, stats.ahead, stats.eager) == (2, 4, 1, 0)


def test_a_pass_of_several_rows_is_launched(
    folder: Path, other: Path, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the graph of decoding, beside one of a single row: the first pass of a draft has the tokens that it lacks."""
    llm, given = engine(folder, speculative=str(other)), list[StepRows]()
    core = llm.engine
    assert core.loaded.draft is not None
    runner, parts = core.loaded.draft.runner, list[Slice]()
    for count, drafted in ((5, 2), (3, 0)):
        own = SequenceState(Request("a", tokens(count, 1), SEVEN), 0, count)
        own.table, own.draft = core.cache.open(own.tokens), [1] * drafted
        assert core.cache.extend(own.table, count + drafted, drafted=drafted)
        parts.append(Slice(own, count - 1, 1 + drafted))
    monkeypatch.setattr(runner.decoding, "launch", given.append)
    assert runner.launch(parts) is None and [(step.wanted, step.planned.first.rows) for step in given] == [(None, 4)]


@pytest.mark.matrix
def test_drafts_of_a_model_with_other_heads(folder: Path, other: Path, fake: FakeDevice) -> None:
    """Of two sequences, hardly ever right: what the draft model has of wrong tokens is computed again."""
    llm, prompts = engine(folder, speculative=str(other)), [tokens(62, 5), tokens(2, 6)]
    for prompt, trace in zip(prompts, run(llm, prompts, replace(SEVEN, max_tokens=5)), strict=True):
        as_prefilled(llm, prompt, trace)
    spoken = llm.engine.stats().speculation
    assert spoken.accepted < spoken.drafted and passes(llm).replayed and not passes(llm).eager


def test_the_draft_model_has_memory_of_the_gpu(folder: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 bytes a token and 512 of the draft model, beside the weights of both: 1,000 tokens, of which whole chunks."""
    monkeypatch.setattr(Runner, "record", lambda self: None)
    weights = sum(weight_bytes(read_config(each), "float32") for each in (folder, other))
    with fake_device(monkeypatch, memory=weights + 1000 * 640):
        with pytest.raises(ValueError, match=r"1,024 needs .* beside the weights: at most 960 tokens fit"):
            engine(folder, speculative=str(other))
        assert engine(folder, speculative=str(other), kv_cache_tokens=960).engine.cache.pool.total == 15
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(gpu_memory, "bytes_for_cache", lambda *given: asked.append(given[2:]) or 1000 * 640)
    with fake_device(monkeypatch):
        llm = engine(folder, speculative=str(other), kv_cache_tokens=None, max_batch_tokens=64)
    rows_of_four_drafts = 4 * (1 + 4)
    assert llm.capacity.kv_cache_tokens == 960 and asked == [(64, rows_of_four_drafts, 2)]
