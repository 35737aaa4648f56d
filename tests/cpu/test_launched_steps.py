"""What a step launched ahead is made of on a GPU, under Triton's interpreter: tokens looked up, draws that nobody waits
for, and a whole engine of both."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has the same kernels, compiled", allow_module_level=True)

from headrace import LLM, SamplingParams
from headrace.bench.shapes import CheckpointShape, write_checkpoint
from headrace.engine import graph_buckets
from headrace.engine.device_sampler import DeviceSampler, _Ask, needs_of, requested
from headrace.engine.launched_draws import LaunchedDraws
from headrace.engine.programs import Launched
from headrace.engine.runner import Runner
from headrace.engine.sampler import SampleInput, sample
from headrace.kernels.step_copies import Reading
from headrace.kernels.triton import sampling
from headrace.kernels.triton.sampling import Chooser
from headrace.kernels.triton.token_kernels import look_up
from headrace.types import Request, TokenLogprobs
from tests.support.delayed_device import delayed_device
from tests.support.sampler_rows import output_of, random_logits

SHAPE = CheckpointShape(hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, mlp=32, vocab=64, context=1024)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "BLOCK", 64)
    monkeypatch.setattr(sampling, "PIECE", 32)


def test_tokens_that_the_host_does_not_know_are_looked_up() -> None:
    tokens, chosen = torch.tensor([5, -1, -3, 0, -2], dtype=torch.int32), torch.tensor([7, 8, 9], dtype=torch.int32)
    known = torch.full((6,), 99, dtype=torch.int32)
    look_up[2,](tokens, chosen, known, 5, BLOCK=4)
    assert known.tolist() == [5, 7, 9, 0, 8, 99]


def test_draws_are_those_of_the_host(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of the same sequences, of which one has a row that is left to the host; then one of fewer. The first
    one's log probabilities are reported."""
    params = [SamplingParams(temperature=0.9, logprobs=2), SamplingParams(temperature=0.0)]
    outputs = [output_of(each, [1] * 10, index, seed=100 + index) for index, each in enumerate(params)]
    with delayed_device(monkeypatch) as late:
        draws = LaunchedDraws(DeviceSampler(), 100, ())
        for step, rows in enumerate((2, 2, 1)):
            logits, chosen = random_logits(step, rows, 100), torch.full((rows,), -1, dtype=torch.int32)
            unsure = {1} if step == 1 else set()
            logits[list(unsure), 5] = torch.nan
            slices: list[Any] = [SimpleNamespace(end=15 + step, sequence=each.sequence) for each in outputs[:rows]]
            late.steps = 1
            launched = Launched(slices, rows, logits, chosen, Reading(logits, late.event()))
            drawn = draws.launch(launched, outputs[:rows])
            assert (chosen == -1).all(), "nothing is chosen yet"
            found = drawn.sampled()
            late.synchronize()
            assert set(found) == set(range(rows)) - unsure
            for row in found:
                item = SampleInput(params[row], (), range(5 + step), row, 100 + row)
                [wanted] = sample(logits[row : row + 1], [item])
                assert found[row].token == wanted.token and near(found[row].logprobs, wanted.logprobs)
                assert chosen[row] == found[row].token


def near(found: TokenLogprobs | None, wanted: TokenLogprobs | None) -> bool:
    """Sums have another order (docs/gpu-kernels.md)."""
    if found is None or wanted is None:
        return found is wanted
    ranks = {token: each.rank for token, each in found.items()}
    close = all(abs(each.logprob - wanted[token].logprob) < 1e-12 for token, each in found.items() if token in wanted)
    return ranks == {token: each.rank for token, each in wanted.items()} and close


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "drawn"])
def test_a_row_without_a_number_leaves_a_token_that_can_be_looked_up(small_blocks: None, temperature: float) -> None:
    """The step behind embeds whatever the device has chosen, sure of it or not."""
    chooser = Chooser(2, 100, torch.device("cpu"))
    logits = random_logits(1, 2, 100)
    logits[1] = torch.nan
    asks = [_Ask(0, SamplingParams(temperature=0.9)), _Ask(1, SamplingParams(temperature=temperature))]
    chooser.request.copy_(requested(asks, {}, 2))
    chooser.choose(logits, 2, needs_of(asks))
    assert chooser.found[:, sampling.SURE].tolist() == [1, 0]
    assert 0 <= chooser.tokens[1] < 100


@pytest.mark.matrix
def test_an_engine_ahead_gives_the_same_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt comes and is read by three slices, two of them beside a sequence that decodes. Of seven steps the first
    one and the first that decodes are waited for: they make the recordings."""
    monkeypatch.setattr(Runner, "record", lambda self: None)
    monkeypatch.setattr(graph_buckets, "SMALL", (4,))
    folder, found = write_checkpoint(SHAPE, tmp_path), {}
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    for ahead in (False, True):
        with delayed_device(monkeypatch) as late:
            llm = LLM(
                str(folder), attention_backend="triton", dtype="float32", kv_cache_tokens=1024, max_sequences=2,
                max_batch_tokens=4, async_scheduling=ahead,
            )  # fmt: skip
            core = llm.engine
            tokens: dict[str, list[int]] = {"a": [], "b": []}
            core.add(Request("a", [3, 1, 2, 5], params))
            while core.has_work:
                if len(tokens["a"]) == 2 and not core.shares.is_live("b"):
                    core.add(Request("b", [4, 5, 6, 7, 8, 9, 10], replace(params, max_tokens=2)))
                for delta in core.step():
                    tokens[delta.request_id] += delta.token_ids
            found[ahead], stats = tokens, core.stats().graphs
            assert (stats.prompts, stats.eager, late.most_ahead) == (3, 0, 1 + ahead)
            assert stats.ahead == (5 if ahead else 0)
    assert found[True] == found[False] and [len(each) for each in found[True].values()] == [5, 2]
