"""What changes logits before a token is drawn: penalties, bias and forbidden tokens."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import generation

from headrace.engine.sampler import History, forbidden_tokens
from headrace.types import SamplingParams
from tests.support.sampler_rows import draw, random_logits


@pytest.mark.parametrize("shift", [0, -9])
def test_repetition_penalty_agrees_with_transformers(shift: float) -> None:
    logits = random_logits(2, 30, 12).double() + shift
    prompt, output = [1, 4, 4], [7, 1]
    processor = generation.RepetitionPenaltyLogitsProcessor(penalty=1.8)
    expected = processor(torch.tensor([prompt + output]).expand(30, -1), logits.clone()).argmax(-1).tolist()
    assert expected != logits.argmax(-1).tolist()
    params = SamplingParams(temperature=0, repetition_penalty=1.8)
    assert [draw(row, params, prompt=prompt, output=output) for row in logits] == expected


@pytest.mark.parametrize(
    ("name", "output", "expected"),
    [
        ("frequency_penalty", [0], 0),
        ("frequency_penalty", [0, 0], 2),
        ("frequency_penalty", [0, 0, 0, 2], 3),
        ("presence_penalty", [0], 0),
        ("presence_penalty", [0, 0, 0], 0),
        ("presence_penalty", [0, 2], 0),
    ],
)
def test_frequency_and_presence_count_the_output_only(name: str, output: list[int], expected: int) -> None:
    """Token 0 leads token 2 by 1.5, that is by more than one penalty and less than two; the prompt costs nothing."""
    params = SamplingParams(temperature=0, **{name: 1.0})
    assert draw(torch.tensor([3.0, 0.0, 1.5, 1.0]), params, prompt=[0, 0, 0], output=output) == expected


def test_presence_is_charged_once_per_token() -> None:
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    logits = torch.tensor([3.0, 0.0, 1.5, 1.2])
    assert [draw(logits, params, prompt=[0], output=o) for o in ([], [0], [0, 2], [2, 0, 3])] == [0, 2, 3, 0]


@given(
    st.lists(st.integers(0, 30), max_size=20),
    st.lists(st.integers(0, 30), max_size=60),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_history_kept_up_to_date_equals_counting_afresh(prompt: list[int], output: list[int], stops: list[int]) -> None:
    history = History(prompt)
    for length in [*stops, len(output)]:
        history.catch_up(output[:length])
        now = dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True))
        counts = {token: output[:length].count(token) for token in now}
        assert now == counts and len(history.ids) == len(now)
        assert set(prompt) | set(output[:length]) <= set(now)


def test_answers_to_a_long_prompt_cost_little_memory() -> None:
    """Nothing while they wait; then 16 bytes for each distinct token of the prompt."""
    prompt, number = list(range(20_000)), 16
    History(prompt).catch_up([5, 30_000])  # what NumPy keeps from its first use is not theirs
    tracemalloc.start()
    try:
        waiting = [History(prompt) for _ in range(number)]
        before, _ = tracemalloc.get_traced_memory()
        for history in waiting:
            history.catch_up([5, 30_000])
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert before < number * 1024
    assert after - before < number * 20_000 * 17


def test_a_row_with_history_draws_as_without() -> None:
    params = SamplingParams(temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.3)
    history, output, prompt = History([1, 2, 3]), [], [1, 2, 3]
    for step in range(40):
        logits = random_logits(step, 1, 25)[0]
        token = draw(logits, params, prompt=prompt, output=output, history=history)
        assert token == draw(logits, params, prompt=prompt, output=output)
        output.append(token)


def test_an_abandoned_output_leaves_no_repetition_behind() -> None:
    history = History([1])
    history.catch_up([5, 5])
    history.catch_up([6])
    assert dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True)) == {1: 0, 6: 1}


def test_order_of_changes_penalties_then_bias_then_forbidden() -> None:
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0])
    params = SamplingParams(temperature=0, repetition_penalty=2.0, logit_bias={0: 1.5, 3: 100.0})
    # 4/2 + 1.5 = 3.5 beats 3; (4 + 1.5)/2 = 2.75 would not.
    assert draw(logits, params, prompt=[0], forbidden=(3,)) == 0


def test_logit_bias_can_force_and_ban() -> None:
    logits = random_logits(4, 1, 40)[0]
    best = int(logits.argmax())
    for temperature in (0.0, 1.0):
        assert draw(logits, SamplingParams(temperature=temperature, logit_bias={9: 100.0})) == 9
    banned = SamplingParams(temperature=0, logit_bias={best: -100.0})
    assert draw(logits, banned) == int(logits.topk(2).indices[1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_keeps_the_end_away_and_then_lets_it_come(temperature: float) -> None:
    logits = torch.tensor([0.0, 50.0, 1.0, 40.0])
    params = SamplingParams(temperature=temperature, min_tokens=2, stop_token_ids=(3,))
    for length, expected in ((0, {0, 2}), (1, {0, 2}), (2, {1})):
        forbidden = forbidden_tokens(params, length, [1])
        drawn = {draw(logits, params, output=[0] * length, forbidden=forbidden, seed=i) for i in range(40)}
        assert drawn <= expected
