"""Log probabilities that the sampler reports, against the log softmax of the raw logits."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.engine.sampler import sample, target_logprobs
from headrace.types import Logprob, SamplingParams
from tests.support.sampler_rows import random_logits, row_input


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_logprobs_are_the_log_softmax_of_the_raw_logits(top: int) -> None:
    logits = random_logits(8, 6, 50)
    reference = logits.double().log_softmax(-1)
    params = SamplingParams(temperature=3.0, logprobs=top, repetition_penalty=2.0, logit_bias={1: 5.0})
    inputs = [row_input(params, prompt=[0, 1, 2], seed=i) for i in range(6)]
    outside = 0
    for row, result in enumerate(sample(logits, inputs)):
        assert result.logprobs is not None
        best = reference[row].topk(top).indices.tolist()
        outside += result.token not in best
        assert list(result.logprobs) == best + [result.token] * (result.token not in best)
        for token, entry in result.logprobs.items():
            assert entry.logprob == pytest.approx(float(reference[row, token]), abs=1e-12)
            assert entry.rank == 1 + int((reference[row] > reference[row, token]).sum())
    assert outside or top == 20


def test_equal_logits_share_a_rank_and_the_lower_id_comes_first() -> None:
    (entry,) = target_logprobs(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]), [4], 2)
    assert [(token, value.rank) for token, value in entry.items()] == [(1, 1), (2, 1), (4, 5)]


def test_impossible_alternatives_are_not_reported() -> None:
    (entry,) = target_logprobs(torch.tensor([[1.0, -math.inf, -math.inf]]), [0], 3)
    assert entry == {0: Logprob(0.0, 1, "")}


def test_logprobs_of_targets() -> None:
    logits = random_logits(5, 5, 30)
    reference = logits.double().log_softmax(-1)
    targets = [3, 29, 0, 7, 7]
    result = target_logprobs(logits, targets, 2)
    assert len(result) == 5
    for row, (entry, target) in enumerate(zip(result, targets, strict=True)):
        assert set(entry) == {target, *reference[row].topk(2).indices.tolist()}
        assert entry[target].logprob == pytest.approx(float(reference[row, target]), abs=1e-12)


def test_asked_for_nothing_reports_nothing() -> None:
    logits = random_logits(5, 1, 30)
    assert sample(logits, [row_input(SamplingParams())])[0].logprobs is None
    (result,) = sample(logits, [row_input(SamplingParams(logprobs=0))])
    assert result.logprobs is not None and list(result.logprobs) == [result.token]
