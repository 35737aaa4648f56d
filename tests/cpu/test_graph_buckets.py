"""A whole engine on a fake device: steps with prompts in them, replayed from recordings of more rows than they have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")

from headrace import LLM, SamplingParams
from headrace.bench.shapes import write_checkpoint
from headrace.device import Graph, GraphPool
from headrace.engine import graph_buckets
from headrace.engine.graph_buckets import PromptGraphs, buckets
from headrace.engine.graphs import Key, Recorded, Recordings
from headrace.engine.runner import Runner
from headrace.offload.restore import timing
from tests.support.drafting import answered, drafts_from
from tests.support.fake_device import FakeDevice, FakeGraph
from tests.support.small_gpu_engines import SHAPE, launched, recorded_when_needed, small_buckets, tokens
from tests.support.traces import run, same

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
TWO = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(SHAPE, tmp_path_factory.mktemp("model"))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    small_buckets(monkeypatch)
    with recorded_when_needed(monkeypatch) as device:
        yield device


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"kv_cache_tokens": 1024, "max_sequences": 2, "max_batch_tokens": 8, **settings}
    return LLM(str(folder), attention_backend="triton", dtype="float32", **given)


def graphs_of(llm: LLM) -> PromptGraphs:
    runner = llm.engine.loaded.executor
    assert isinstance(runner, Runner) and isinstance(runner.mixed, PromptGraphs)
    return runner.mixed


def test_replayed_is_the_same_as_launched(folder: Path, fake: FakeDevice) -> None:
    """A prompt of two slices, of the first of which nothing is drawn, the second beside another prompt: recordings of
    five and four rows. What nobody has written is no number, and stays it."""
    llm = engine(folder, max_batch_tokens=5)
    prompts = [tokens(6, 1), tokens(3, 2)]
    truth = launched(llm, prompts, TWO)
    graphs = graphs_of(llm)
    pools = [x for pool in graphs.storage.pools for x in pool.tensors]
    for x in pools:
        x.fill_(float("nan"))
    same(run(llm, prompts, TWO), truth)
    stats = llm.engine.stats().graphs
    assert (stats.prompts, stats.eager, stats.replayed) == (2, 0, 3)
    assert {key.rows for key in graphs._recorded} == {4, 5}
    written = [x.isfinite().movedim(2, 1 if x.shape[2] == 16 else 2) for x in pools]
    assert [int(x.sum()) for x in written] == [(6 + 3 + 2) * 16] * len(pools)


def test_a_step_takes_the_next_larger_bucket(folder: Path, fake: FakeDevice) -> None:
    """The same prompt from recordings of two rows and of four: the same logits."""
    llm = engine(folder, max_batch_tokens=4)
    graphs, found = graphs_of(llm), []
    for sizes in ([2, 4], [4]):
        graphs.sizes = sizes
        llm.engine.cache.tree.clear()
        found.append(run(llm, [tokens(2, 3)], ONE))
    same(*found)
    assert sorted(graphs._recorded) == [Key(2, 1, 2), Key(4, 1, 2)]


@pytest.mark.matrix
def test_another_engine_of_the_process_may_compute_at_any_moment(
    folder: Path, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when two are called from two threads: the other's steps are replayed between a step and what is read of it."""
    prompts = [tokens(6, 1), tokens(3, 2)]
    truth = run(engine(folder, max_batch_tokens=5), prompts, TWO)
    theirs, replay = list(fake.graphs), FakeGraph.replay

    def disturbed(mine: FakeGraph) -> None:
        replay(mine)
        for other in theirs:
            replay(other)

    monkeypatch.setattr(FakeGraph, "replay", disturbed)
    same(run(engine(folder, max_batch_tokens=5), prompts, TWO), truth)
    assert len(fake.graphs) > len(theirs) > 1


def test_long_drafts_are_verified_by_replayed_steps(folder: Path, fake: FakeDevice) -> None:
    """Runs of four rows, which are long here: steps of decoding have no room for their tasks, those of prompts do."""
    llm, params = engine(folder, speculative="ngram", num_speculative_tokens=3), replace(ONE, max_tokens=6)
    truth = launched(llm, [tokens(3, 5)], params)
    drafts_from(llm, [answered(tokens(3, 5), truth[0])])
    same(run(llm, [tokens(3, 5)], params), truth)
    stats = llm.engine.stats().graphs
    assert llm.engine.stats().speculation.accepted and stats.prompts > 1 and not stats.eager


@pytest.mark.matrix
def test_prompts_cut_anywhere(tmp_path: Path, fake: FakeDevice) -> None:
    """Steps of five rows, in which sequences decode beside slices: as whole prompts, each alone. Two layers, in the
    first of which all rows are wanted."""
    folder, prompts = write_checkpoint(replace(SHAPE, layers=2), tmp_path), [tokens(9, 4), tokens(13, 5), tokens(2, 7)]
    whole = engine(folder, max_batch_tokens=16)
    truth = [launched(whole, [prompt], TWO)[0] for prompt in prompts]
    llm = engine(folder, max_batch_tokens=5, max_sequences=3)
    same(run(llm, prompts, TWO), truth)
    assert llm.engine.stats().graphs.prompts > 2 and not llm.engine.stats().graphs.eager


@pytest.mark.matrix
def test_every_kind_of_request(folder: Path, fake: FakeDevice) -> None:
    """Penalties, log probabilities, two answers to a prompt, and drafts."""
    llm = engine(folder, max_batch_tokens=12, max_sequences=3, speculative="ngram", num_speculative_tokens=2)
    prompts = [[*tokens(4, 8) * 4, 1, 2], tokens(7, 9), tokens(5, 10), tokens(5, 10)]
    given: dict[str, Any] = dict(max_tokens=4, ignore_eos=True)
    params = [
        SamplingParams(**given, seed=1, temperature=0.0, logprobs=2),
        SamplingParams(**given, seed=2, temperature=0.8, presence_penalty=0.5),
        SamplingParams(**given, seed=3, temperature=0.9),
        SamplingParams(**given, seed=4, temperature=0.9),
    ]
    truth = launched(llm, prompts, params)
    same(run(llm, prompts, params), truth)
    stats = llm.engine.stats().graphs
    assert stats.prompts > 2 and not stats.eager


def test_steps_that_nobody_has_waited_for_are_not_timed(
    folder: Path, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of two slices, launched and then replayed: the first replay may have waited for what was launched."""
    monkeypatch.setattr(timing, "call_seconds", lambda work, most_s=0.05: 1e-3)
    llm, timed = engine(folder, max_batch_tokens=4, kv_offloading_size=0.01), []
    assert llm.engine.offload is not None
    monkeypatch.setattr(llm.engine.offload.profile, "observe_prefill", lambda *given: timed.append(given[:2]))
    launched(llm, [tokens(6, 1)], ONE)
    assert not timed
    run(llm, [tokens(6, 1)], ONE)
    assert timed == [(4, 2)]
    llm.close()


def test_what_is_launched(folder: Path, fake: FakeDevice) -> None:
    """Hidden states; more rows than are recorded, or drawn from; a plan for which there is no room."""
    llm = engine(folder)
    graphs = graphs_of(llm)
    llm.generate([tokens(3, 1)], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert not graphs.stats.replayed and not graphs.stats.eager
    for name, value in (("sizes", []), ("drawn", []), ("_fill", lambda plan: None)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graphs, name, value)
            llm.engine.cache.tree.clear()
            llm.generate([tokens(2, 1)], ONE)
    assert (graphs.stats.replayed, graphs.stats.eager) == (0, 3)


@pytest.mark.parametrize("why", ["no memory", "other bits"])
def test_what_cannot_be_recorded(
    folder: Path, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    """So many rows are launched from then on, and fewer ones replayed."""
    llm = engine(folder, max_batch_tokens=4)
    graphs, prompts = graphs_of(llm), [tokens(3, 1)]
    truth = launched(llm, prompts, ONE)

    record = fake.graph

    def graph(run: Callable[[], tuple[torch.Tensor, torch.Tensor]], pool: GraphPool) -> tuple[Graph, object]:
        def other() -> tuple[torch.Tensor, torch.Tensor]:
            logits, chosen = run()
            return logits.add_(1), chosen

        if why == "no memory":
            raise torch.OutOfMemoryError(why)
        return record(other, pool)

    monkeypatch.setattr(fake, "graph", graph)
    same(run(llm, prompts, ONE), truth)
    assert graphs.sizes == [2] and (graphs.stats.eager, graphs.stats.replayed) == (1, 0) and not graphs._recorded
    assert [f"4 rows with prompts in them are launched{message}" in caplog.text for message in (", not", ": a")] == [
        why == "no memory", why == "other bits"
    ]  # fmt: skip


def test_a_model_that_gives_no_numbers_is_recorded_too(
    folder: Path, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request's NaN says nothing of the recording."""
    graphs = graphs_of(engine(folder, max_batch_tokens=4))
    logits = graphs.decoder.logits
    monkeypatch.setattr(graphs.decoder, "logits", lambda hidden: logits(hidden) * float("nan"))
    assert graphs._recording(Key(2, 0, 2)) is not None


def test_buckets() -> None:
    assert buckets(5) == [5] and buckets(100) == [16, 64, 100]
    sizes = buckets(8192)
    assert sizes[:6] == [16, 64, 128, 256, 384, 512] and sizes[-2:] == [6144, 8192]
    assert all(3 * (large - small) <= large * 1.5 for small, large in pairwise(sizes[3:]))


class Slow(FakeGraph):
    """Of so many rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def replay(self) -> None:
        pass


@pytest.mark.parametrize("seconds", [100.0, 0.0], ids=["time for all", "no time"])
def test_what_pays_is_recorded_before_the_first_step(
    folder: Path, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Launching takes a second, a replay one for 300 rows: buckets up to 256, found by the largest and by the largest
    that may be fast enough. They are recorded for prompts alone, then for those beside others."""
    monkeypatch.setattr(graph_buckets, "SMALL", (16, 64, 128, 256))
    monkeypatch.setattr(graph_buckets, "RECORDING_S", seconds)
    llm = engine(folder, max_batch_tokens=1024)
    graphs, tried = graphs_of(llm), []

    def capture(self: Recordings, key: Key) -> Recorded:
        tried.append(key)
        self._recorded[key] = found = Recorded(Slow(key.rows), torch.zeros(1), torch.zeros(1))
        return found

    def timed(run: Any) -> tuple[float, float]:
        return (1.0, 9.0) if isinstance(run, partial) else (0.0, run.__self__.rows / 300)

    monkeypatch.setattr(Recordings, "_capture", capture)
    monkeypatch.setattr(PromptGraphs, "_compute", lambda self, key: (torch.zeros(1), torch.zeros(1)))
    monkeypatch.setattr(fake, "timed", timed)
    graphs.record_usual()
    assert graphs.sizes == [16, 64, 128, 256]
    measured = [Key(1024, 0, 2), Key(256, 0, 2)]
    rest = [*(Key(rows, 0, 2) for rows in (128, 64, 16)), *(Key(rows, 1, 2) for rows in (256, 128, 64, 16))]
    assert tried == measured + (rest if seconds else [])
    assert set(graphs._recorded) == {*tried} - {measured[0]}
