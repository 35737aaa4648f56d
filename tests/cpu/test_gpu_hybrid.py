"""Models with recurrent layers on a fake GPU (tests.support.fake_device), of one gated delta net and one layer of
attention: the same bits in every schedule, replayed and launched, and near transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("triton", reason="Triton is built for Linux only")

from headrace import LLM, SamplingParams
from headrace.engine import graph_buckets
from headrace.engine.runner import Runner
from headrace.host import GIB
from headrace.kernels.triton import graph_step
from headrace.offload.restore import timing
from tests.support.drafting import answered, drafts_from
from tests.support.fake_device import FakeDevice, fake_device
from tests.support.hybrid_checkpoints import make_checkpoint
from tests.support.offloading import flush, forced, look_at_once, watched
from tests.support.small_gpu_engines import launched, tokens
from tests.support.traces import run, same

SMALL: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, linear_key_head_dim=16, linear_value_head_dim=8, linear_num_key_heads=1,
    linear_num_value_heads=1, layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
ONE, TWO, SIX = (SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (1, 2, 6))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("3_5", tmp_path_factory.mktemp("hybrid"), **SMALL)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    monkeypatch.setattr(Runner, "record", lambda self: None)
    monkeypatch.setattr(graph_buckets, "SMALL", (2, 4))
    monkeypatch.setattr(graph_step, "PROGRAMS", 1)
    monkeypatch.setattr(graph_step, "MERGES", 4)
    monkeypatch.setattr(timing, "call_seconds", lambda work, most_s=0.05: 1e-3)
    with fake_device(monkeypatch) as device:
        yield device


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"kv_cache_tokens": 1024, "max_sequences": 4, "recurrent_states": 8, **settings}
    return LLM(str(folder), attention_backend="triton", dtype="float32", **given)


@pytest.mark.parametrize("kind", ["3_5", pytest.param("next_experts", marks=pytest.mark.matrix)])
def test_logits_are_those_of_transformers(kind: str, fake: FakeDevice, tmp_path: Path) -> None:
    """Gates of attention, norms that add 1 and a part of each head rotated; experts, and the one beside them."""
    folder, given = make_checkpoint(kind, tmp_path / kind, **SMALL), tokens(9, 1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        difference = engine(folder).logits(given) - model(torch.tensor([given])).logits[0]
    assert difference.abs().max() < 1e-4


def test_replayed_and_cut_are_the_same_as_launched_alone(folder: Path, fake: FakeDevice) -> None:
    """By slices of four rows, the last of them beside another prompt. Recording changes no state."""
    prompts = [tokens(5, 1), tokens(2, 2)]
    llm = engine(folder, max_batch_tokens=4, max_sequences=2)
    truth = [launched(llm, [prompt], TWO)[0] for prompt in prompts]
    same(run(llm, prompts, TWO), truth)
    stats = llm.engine.stats().graphs
    assert stats.prompts == 2 and stats.replayed == 3 and not stats.eager


@pytest.mark.matrix
def test_drafted_is_the_same_as_launched(folder: Path, fake: FakeDevice) -> None:
    """Right and wrong drafts: of each a second state is left, in the same replayed step."""
    llm = engine(folder, speculative="ngram", num_speculative_tokens=2, max_sequences=1)
    prompt = tokens(3, 2)
    truth = launched(llm, [prompt], SIX)
    known = answered(prompt, truth[0])
    drafts_from(llm, [[*known[:5], (known[5] + 1) % 64, 5, 5]])
    same(run(llm, [prompt], SIX), truth)
    spoken, stats = llm.engine.stats().speculation, llm.engine.stats().graphs
    assert 0 < spoken.accepted < spoken.drafted and not stats.eager


@pytest.mark.matrix
def test_shared_and_restored_are_the_same_as_launched_alone(folder: Path, fake: FakeDevice) -> None:
    """Two prompts in one launched step: the second goes on from the state that the first leaves in it. Then one is
    replayed from a kept state, and from one of host memory."""
    prompt = tokens(65, 1)
    truth = launched(engine(folder), [prompt], ONE)
    llm = engine(folder, max_batch_tokens=66, max_sequences=2, kv_offloading_size=0.01)
    runner = llm.engine.loaded.executor
    assert llm.engine.offload is not None and isinstance(runner, Runner)
    llm.engine.offload.choose, runner.mixed = forced(0.0, 0.0), runner.eager
    look_at_once(llm)
    same(watched(llm, [prompt, prompt], ONE), truth * 2)
    before = llm.engine.stats().tokens.cached
    same(watched(llm, [prompt], ONE), truth)
    assert llm.engine.stats().tokens.cached == before + 64
    flush(llm)
    same(watched(llm, [prompt], ONE), truth)
    assert llm.engine.stats().restore.loaded_tokens == 64 and llm.engine.stats().graphs.replayed == 2
    llm.close()


def test_states_that_do_not_fit_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 992 bytes each: 4 * 16 * 8 of the matrix, 3 * 40 inputs."""
    monkeypatch.setattr(Runner, "record", lambda self: None)
    with fake_device(monkeypatch, memory=GIB), pytest.raises(ValueError, match=r"recurrent_states 2,000,000 need 1.8"):
        engine(folder, recurrent_states=2_000_000)


@pytest.mark.parametrize(
    "settings", [{"context_parallel_size": 2}, {"offload_schedule": "row", "kv_offloading_size": 1}]
)
def test_what_is_not_built_is_refused(settings: dict[str, Any], folder: Path, fake: FakeDevice) -> None:
    with pytest.raises(ValueError, match="has recurrent layers"):
        engine(folder, **settings)
