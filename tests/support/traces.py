"""Answers of the shipped model with the logits behind them, by which two engines are compared to the bit."""

from __future__ import annotations

from typing import Any

import torch

from headrace import LLM, SamplingParams
from headrace.engine.sequence import SequenceState

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
"""As many as lead some of prompts_of into another chunk."""
Trace = dict[int, torch.Tensor]
"""Position -> logits [V] after the token at that position."""


def engine(**settings: Any) -> LLM:
    return LLM("tiny", dtype="bfloat16", **{"kv_cache_tokens": 40_000, **settings})


def words(llm: LLM, count: int, seed: int) -> list[int]:
    return random_tokens(llm.capacity.vocab_size, count, seed)


def random_tokens(vocabulary: int, count: int, seed: int) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(10, vocabulary, (count,), generator=g).tolist()


def prompts_of(llm: LLM) -> list[list[int]]:
    """Sixteen prompts of uneven lengths; some share 130 tokens, some 700, one is a prefix of another."""
    base = words(llm, 700, seed=0)
    lengths = [1, 5, 63, 64, 65, 128, 200, 333, 500, 700]
    mixed = [words(llm, n, seed=n) for n in lengths[:6]] + [base[:n] for n in (64, 128, 200, 700)]
    return (
        mixed
        + [base[:130] + words(llm, 40 + i, seed=i) for i in range(3)]
        + [base + words(llm, i, i) for i in (1, 64, 90)]
    )


def run(
    llm: LLM,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams] = GREEDY,
    adapters: str | list[str] = "",
) -> list[Trace]:
    """Answers the prompts together; the logits from which each token of each answer was chosen."""
    traces: list[Trace] = [{} for _ in prompts]
    first = llm._count + 1

    def keep(sequence: SequenceState, position: int, logits: torch.Tensor) -> None:
        trace = traces[int(sequence.request.request_id.rsplit("-", 1)[1]) - first]
        end = position + len(logits) - 1
        if end in trace:
            assert torch.equal(trace[end], logits[-1]), "computed again after preemption, with other bits"
        trace[end] = logits[-1].clone()

    with llm._observed(keep):
        outputs = llm.generate(prompts, params, adapter=adapters)
    for prompt, trace, output in zip(prompts, traces, outputs, strict=True):
        assert sorted(trace) == list(range(len(prompt) - 1, len(prompt) - 1 + len(output.token_ids)))
    llm.engine.scheduler.check()
    assert llm.engine.cache.used == 0, "a finished request left chunks held"
    return traces


def same(left: list[Trace], right: list[Trace]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for position in one:
            assert torch.equal(one[position], other[position]), f"bits differ after position {position}"


def alone(llm: LLM) -> list[Trace]:
    """Each prompt alone, on an empty cache."""
    traces = []
    for prompt in prompts_of(llm):
        llm.engine.cache.tree.clear()
        traces += run(llm, [prompt])
    return traces
