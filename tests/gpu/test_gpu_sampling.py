"""Tokens chosen on the GPU: those of the host's sampler, from the same logits, whatever rows ride along."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine.sampler import SampleInput, sample
from tests.support.sampler_rows import random_logits, row_input

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GREEDY = SamplingParams(temperature=0.0)


def drawn(number: int) -> SamplingParams:
    """Any temperature and filters."""
    pick = random.Random(number).choice
    return SamplingParams(
        temperature=pick([0.0, 0.3, 1.0, 1.0, 1.7, 50.0]),
        top_k=pick([0, 0, 1, 20, 50, 1000, 10**6]),
        top_p=pick([1.0, 1.0, 0.999, 0.9, 0.3]),
        min_p=pick([0.0, 0.0, 1e-4, 0.05]),
        logprobs=pick([None, None, 0, 5]),
    )


@pytest.mark.parametrize("width", [1000, 4097, 32_000, 128_256, 262_144])
@pytest.mark.parametrize("scale", [0.02, 1.0, 4.0])
def test_a_thousand_rows(width: int, scale: float) -> None:
    """And with equals, as bf16 makes many; few are left to the host."""
    from headrace.engine.device_sampler import DeviceSampler

    rows, device = 67, DeviceSampler()
    logits = random_logits(width, rows, width, scale)
    logits[::3] = logits[::3].bfloat16().float()
    inputs: list[SampleInput | None] = [row_input(drawn(width + row), seed=row) for row in range(rows)]
    ours, truth = device.sample(logits.cuda(), range(rows), inputs), sample(logits, inputs)
    assert [one.token for one in ours] == [one.token for one in truth]
    for one, other in zip(ours, truth, strict=True):
        reported, expected = one.logprobs or {}, other.logprobs or {}
        assert [(token, entry.rank) for token, entry in reported.items()] == [
            (token, entry.rank) for token, entry in expected.items()
        ]
        assert all(abs(entry.logprob - expected[token].logprob) < 1e-11 for token, entry in reported.items())
    assert device.copied <= 2


def test_a_row_alone_and_in_a_graph_has_the_same_bits() -> None:
    from headrace.kernels.triton.sampling import Chooser, Needs

    rows, width, needs = 64, 32_000, Needs(reports=True, leaders=20, draws=True, top_k=True, top_p=True)
    logits = random_logits(1, rows, width).cuda()
    together, alone = (Chooser(count, width, logits.device) for count in (rows, 1))
    together.asked.copy_(torch.tensor([[row, -1, -1, 1.0, 1000, 0.9, 0.01, 21, 0] for row in range(rows)]))
    together.counters[:, 0] = torch.arange(rows)
    together.choose(logits, rows, needs)
    found, leaders = together.found.clone(), together.leaders.clone()
    for row in range(0, rows, 9):
        alone.asked.copy_(together.asked[row : row + 1])
        alone.counters.copy_(together.counters[row : row + 1])
        alone.choose(logits, 1, needs)
        assert torch.equal(alone.found[0], found[row]) and torch.equal(alone.leaders[0], leaders[row])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        together.choose(logits, rows, needs)
    together.found.zero_()
    graph.replay()
    assert torch.equal(together.found, found)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    yield LLM("tiny", dtype="bfloat16", kv_cache_tokens=40_000, attention_backend="triton")


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(seed=5, n=3),
        SamplingParams(seed=5, top_k=50, top_p=0.9, logprobs=5),
        SamplingParams(seed=5, repetition_penalty=1.2, logit_bias={7: 2.0}),
        SamplingParams(seed=5, min_tokens=8, logprobs=0),
    ],
    ids=str,
)
def test_the_engine_answers_as_with_the_hosts_sampler(
    params: SamplingParams, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which replays graphs once it has chosen twice; plain greedy tokens come with the step's own graph."""
    prompts, device = ["The river", "A long time ago", "Water"], llm.engine._device_sampler
    ours = llm.generate(prompts, params)
    assert device is not None
    if params is not GREEDY:
        assert device._replays is not None and device._replays.replayed > 0
    monkeypatch.setattr(llm.engine, "_device_sampler", None)
    theirs = llm.generate(prompts, params)
    assert [[one.token_ids for one in each.outputs] for each in ours] == [
        [one.token_ids for one in each.outputs] for each in theirs
    ]
