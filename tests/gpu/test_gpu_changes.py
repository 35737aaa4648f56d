"""Penalties, biases, forbidden tokens and listed log probabilities on the GPU, of steps that are launched ahead: the
numbers and the tokens of the host's sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine.sampler import _adjusted, sample
from headrace.types import Request
from tests.support.sampler_rows import output_of, random_logits, row_input

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

KINDS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3, "frequency_penalty": 0.37, "presence_penalty": -0.71},
    {"repetition_penalty": 0.7, "logit_bias": {i: (i % 7 - 3) / 3 for i in range(5, 900, 3)}},
    {"logit_bias": {7: 3.5}, "min_tokens": 9, "logprob_token_ids": (7, 8, 900)},
    {"frequency_penalty": 1.1, "min_tokens": 4, "logprobs": 4},
    {},
    {"logprob_token_ids": tuple(range(0, 1000, 3))},
)


@pytest.mark.parametrize("width", [1000, 32_000, 128_256])
def test_rows_are_changed_to_the_bit(width: int) -> None:
    """By a kernel that the host's roundings are asked of, then behind a token that the device has counted itself."""
    from headrace.device import current
    from headrace.engine.kept_changes import KeptChanges
    from headrace.kernels.step_copies import Uploads
    from headrace.kernels.triton import changing

    device, eos, prompt = current(), (2, 70), [3, 999, 3, 64]
    outputs = [output_of(SamplingParams(**kind), prompt, index) for index, kind in enumerate(KINDS[:4])]
    kept = [KeptChanges(each.sequence, each.history, width, eos, device.place) for each in outputs]
    logits, uploads = random_logits(width, len(outputs), width), Uploads(8 * width, device)
    there = logits.cuda()
    for output in outputs:
        output.sequence.tokens += [5, 5, 64, 5]
    for turn in range(3):
        rows = [each.prepare(row, 4 + turn, uploads) for row, each in enumerate(kept)]
        request = torch.tensor(rows, dtype=torch.int64).cuda()
        changing.change(there, request)
        for row, (output, each) in enumerate(zip(outputs, kept, strict=True)):
            item = output.sample_input(eos)
            assert item is not None
            wanted = torch.from_numpy(_adjusted(logits[row].double().numpy(), item))
            assert torch.equal(each.memory.into.cpu(), wanted)
        changing.count(request, torch.full((len(outputs),), 5 + turn, dtype=torch.int32).cuda())
        for output in outputs:
            output.sequence.tokens.append(5 + turn)


def test_listed_log_probabilities() -> None:
    """Beside rows that report others, or whose logits are changed."""
    from headrace.engine.device_sampler import DeviceSampler

    logits, device = random_logits(1, 24, 32_000), DeviceSampler()
    params = [SamplingParams(temperature=(row % 2) * 0.8, **KINDS[row % 6]) for row in range(24)]
    inputs = [row_input(each, [5, 5, 64], [3, 999], seed=row) for row, each in enumerate(params)]
    ours, truth = device.sample(logits.cuda(), range(24), inputs), sample(logits, inputs)
    for one, other in zip(ours, truth, strict=True):
        reported, expected = one.logprobs or {}, other.logprobs or {}
        assert one.token == other.token
        assert [(i, each.rank) for i, each in reported.items()] == [(i, each.rank) for i, each in expected.items()]
        assert all(abs(each.logprob - expected[i].logprob) < 1e-11 for i, each in reported.items())
    assert device.copied <= 1


@pytest.fixture(scope="module", params=[True, False], ids=["ahead", "waited"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    settings = {"kv_cache_tokens": 40_000, "attention_backend": "triton", "async_scheduling": request.param}
    yield LLM("tiny", dtype="bfloat16", **settings)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_engine_answers_as_with_the_hosts_sampler(
    temperature: float, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kinds of requests in one batch, forks among them; whichever is waited for."""
    found: dict[str, list[dict[tuple[str, int], list[int]]]] = {}
    for chooser in ("device", "host"):
        if chooser == "host":
            monkeypatch.setattr(llm.engine, "_device_sampler", None)
            monkeypatch.setattr(llm.engine.overlap, "on", False)
        found[chooser] = [answers(llm, temperature) for _ in range(2)]
    assert found["device"][0] == found["device"][1] == found["host"][0] == found["host"][1]


def answers(llm: LLM, temperature: float) -> dict[tuple[str, int], list[int]]:
    """The tokens of one request of each kind."""
    engine, found = llm.engine, dict[tuple[str, int], list[int]]()
    ahead = engine.stats().graphs.ahead
    for number, kind in enumerate(KINDS):
        params = SamplingParams(temperature=temperature, seed=number, n=1 + number % 2, max_tokens=24, **kind)
        tokens = list(range(20 + number, 40 + 7 * number))
        engine.add(Request(str(number), tokens, engine.loaded.capacity.check(tokens, params)))
    while engine.has_work:
        for delta in engine.step():
            found.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    assert (engine.stats().graphs.ahead - ahead > 10) == engine.overlap.on
    return found
