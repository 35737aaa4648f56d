"""The sampler against brute-force definitions, against transformers, and against itself: batched == alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import generation

from headrace.engine.sampler import BadLogits, _pick, sample, target_logprobs, uniform
from headrace.types import SamplingParams
from tests.support.sampler_rows import draw, random_logits, row_input

# ---- the filters and the draw, by definition -------------------------------------------------------------------------


Weighted = list[tuple[int, float]]


def kept_by_definition(logits: torch.Tensor, params: SamplingParams) -> Weighted:
    """(token, weight) of what the filters keep, by descending weight then id; each sum is rounded only once."""
    values = logits.double().numpy()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    order = order[: params.top_k] if params.top_k > 0 else order
    weights = np.exp((values[order] - values[order[0]]) / params.temperature).tolist()
    kept = list(zip(order, weights, strict=True))
    total = math.fsum(weights)
    size = next((n for n in range(1, len(kept)) if math.fsum(weights[:n]) >= params.top_p * total), len(kept))
    return [(i, w) for i, w in kept[:size] if w >= params.min_p * kept[0][1]]


def drawn_by_definition(kept: Weighted, u: float) -> int:
    weights = [w for _, w in kept]
    target = u * math.fsum(weights)
    return next(i for n, (i, _) in enumerate(kept) if math.fsum(weights[: n + 1]) > target)


@st.composite
def filters(draw: Any) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.01, 0.3, 1.0, 1.7, 50.0])),
        top_k=draw(st.sampled_from([0, -1, 1, 2, 5, 63, 64, 65, 2000, 10**6])),
        top_p=draw(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 1e-4, 0.02, 0.3, 1.0])),
    )


@settings(max_examples=300, deadline=None)
@given(filters(), st.integers(0, 10**6), st.sampled_from([1, 2, 7, 64, 65, 200]), st.booleans())
def test_draws_are_those_of_the_definition(params: SamplingParams, seed: int, size: int, ties: bool) -> None:
    logits = random_logits(seed, 1, size)[0]
    logits = logits.round() if ties else logits
    kept = kept_by_definition(logits, params)
    for position in range(4):
        expected = drawn_by_definition(kept, uniform(seed, 0, position))
        assert draw(logits, params, seed=seed, output=[0] * position) == expected


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 8.0])
@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.95}, {"min_p": 0.5}, {"min_p": 0.01, "top_p": 0.5}, {"top_k": 300}, {"top_p": 0.9999}]
)
def test_a_wide_row_sorted_in_part_draws_as_if_sorted_whole(scale: float, options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    logits = random_logits(3, 1, 3000, scale)[0]
    kept = kept_by_definition(logits, params)
    for position in range(12):
        expected = drawn_by_definition(kept, uniform(7, 0, position))
        assert draw(logits, params, seed=7, output=[0] * position) == expected


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    for top_p, kept in ((0.4, {0}), (0.51, {0, 1}), (0.74, {0, 1}), (0.8, {0, 1, 2}), (0.99, {0, 1, 2, 3})):
        params = SamplingParams(top_p=top_p)
        assert {draw(logits, params, output=[0] * i) for i in range(300)} == kept


def test_top_k_one_is_greedy_even_between_equals() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0])
    assert {draw(logits, SamplingParams(top_k=1, temperature=9.0), seed=i) for i in range(50)} == {1}


def test_tokens_of_no_probability_are_never_drawn() -> None:
    logits = torch.full((3000,), -math.inf)
    logits[[5, 2999]] = torch.tensor([0.0, -1.0])
    drawn = {draw(logits, SamplingParams(temperature=100.0), seed=i) for i in range(200)}
    assert drawn == {5, 2999}


@pytest.mark.parametrize("options", [{}, {"min_p": 0.1}])
def test_a_draw_rounded_past_the_end_takes_the_last_token_with_weight(options: dict[str, Any]) -> None:
    weights, last = np.array([1.0, 0.25, 0.0]), 1 - 2.0**-53
    assert _pick(weights, 1.25 + 1e-9, SamplingParams(**options), last, complete=True) == (1, 2)


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_filters_agree_with_transformers(name: str) -> None:
    warpers = {
        "temperature": (0.7, generation.TemperatureLogitsWarper(0.7)),
        "top_k": (9, generation.TopKLogitsWarper(9)),
        "top_p": (0.8, generation.TopPLogitsWarper(0.8)),
        "min_p": (0.1, generation.MinPLogitsWarper(0.1)),
    }
    value, warper = warpers[name]
    logits = random_logits(11, 40, 120).double()
    probabilities = warper(None, logits.clone()).softmax(-1)
    for i in range(len(logits)):
        kept = [(j, float(probabilities[i, j])) for j in logits[i].argsort(descending=True).tolist()]
        expected = drawn_by_definition(kept, uniform(i, 0, 0))
        assert draw(logits[i], SamplingParams(**{name: value}), seed=i) == expected


# ---- randomness ------------------------------------------------------------------------------------------------------


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("axis", ["seed", "index", "output"])
def test_frequencies_follow_the_softmax(axis: str) -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 0.9, -0.2, 1.1, 0.5])
    params = SamplingParams(temperature=1.3)
    places: list[Any] = [range(i) if axis == "output" else i for i in range(8_000)]
    inputs = [row_input(params, **{"seed": 5, "output": [], axis: place}) for place in places]
    counts = np.bincount([s.token for s in sample(logits.expand(len(inputs), -1), inputs)], minlength=8)
    assert chi_square(counts, (logits.double() / 1.3).softmax(-1).numpy()) < 24.3  # 7 degrees of freedom, p = 0.001


def test_uniform_numbers_are_uniform_and_pairwise_independent() -> None:
    grid = np.array([[uniform(seed, index, 3) for index in range(64)] for seed in range(64)])
    cells = np.histogram2d(grid[:, :-1].ravel(), grid[:, 1:].ravel(), bins=8, range=[[0, 1], [0, 1]])[0]
    assert chi_square(cells.ravel(), np.full(64, 1 / 64)) < 103.4  # 63 degrees of freedom, p = 0.001
    assert len(np.unique(grid)) == grid.size


def test_seed_index_and_position_each_change_the_draw() -> None:
    flat = torch.zeros(50_000)
    params = SamplingParams()
    base = {"seed": 1, "index": 0, "output": [3]}
    changed = ({"seed": 2}, {"seed": -1}, {"seed": 2**63 - 1}, {"index": 1}, {"output": [3, 3]}, {"output": []})
    drawn = [draw(flat, params, **{**base, **change}) for change in ({}, *changed)]
    assert len(set(drawn)) == len(drawn)
    assert draw(flat, params, **base) == drawn[0]


def test_draws_stay_the_same_across_versions() -> None:
    """A recorded seed gives the recorded numbers: seeds are a promise to users."""
    assert [uniform(*key) for key in ((0, 0, 0), (42, 0, 0), (42, 1, 0), (42, 0, 1), (-7, 3, 1000))] == RECORDED


RECORDED = [0.011546754286331562, 0.8201981478608876, 0.443746921343274, 0.36812845090913937, 0.9092012792550711]


# ---- batched == alone ------------------------------------------------------------------------------------------------

KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=50, logprobs=3),
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(temperature=1.5, top_p=0.9),
    SamplingParams(temperature=0, repetition_penalty=1.3),
    SamplingParams(min_p=0.05, presence_penalty=1.0, frequency_penalty=-0.5),
    SamplingParams(temperature=0, logit_bias={3: 50.0}),
    SamplingParams(temperature=0),
]


@pytest.mark.parametrize("size", [9, 1000, 40_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_in_a_batch_and_in_another_order_gives_the_same(size: int, dtype: torch.dtype) -> None:
    logits = random_logits(size, len(KINDS), size).to(dtype)
    inputs = [
        row_input(params, prompt=[1, 2, 3], output=[4, 4, i % 9], seed=i, index=i, forbidden=(i % 2,) if i > 1 else ())
        for i, params in enumerate(KINDS)
    ]
    together = sample(logits, inputs)
    assert [sample(logits[i : i + 1], inputs[i : i + 1])[0] for i in range(len(KINDS))] == together
    order = [5, 1, 8, 0, 3, 7, 2, 4, 6]
    assert sample(logits[order], [inputs[i] for i in order]) == [together[i] for i in order]


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_takes_the_lowest_id_of_equals(rows: int, dtype: torch.dtype) -> None:
    logits = torch.zeros(rows, 70_001, dtype=dtype)
    logits[:, [69_000, 40_000, 35_000]] = 2.0
    logits[rows // 2, 17] = 2.0
    expected = [17 if row == rows // 2 else 35_000 for row in range(rows)]
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=0, logprobs=0)):
        assert [s.token for s in sample(logits, [row_input(params)] * rows)] == expected


def test_logits_are_left_as_they_were() -> None:
    logits = random_logits(1, len(KINDS), 30).double()
    before = logits.clone()
    sample(logits, [row_input(params, [3, 4], [5], forbidden=(8,)) for params in KINDS])
    assert torch.equal(logits, before)


# ---- broken logits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", KINDS)
@pytest.mark.parametrize(("poison", "everywhere"), [(math.nan, False), (math.inf, False), (-math.inf, True)])
def test_broken_logits_are_an_error_that_names_the_row(params: SamplingParams, poison: float, everywhere: bool) -> None:
    logits = random_logits(6, 4, 30)
    logits[2, slice(None) if everywhere else 11] = poison
    with pytest.raises(BadLogits, match="row 2") as error:
        sample(logits, [row_input(replace(params, n=1)) for _ in range(4)])
    assert error.value.row == 2 and isinstance(error.value, FloatingPointError)


def test_the_row_is_named_by_its_place_in_a_mixed_batch() -> None:
    logits = random_logits(6, 4, 30)
    logits[3, 0] = math.nan
    with pytest.raises(BadLogits, match="row 3"):
        sample(logits, [row_input(KINDS[i % 2]) for i in (1, 0, 1, 0)])


def test_everything_forbidden_is_an_error() -> None:
    with pytest.raises(BadLogits, match="no token is left"):
        draw(torch.zeros(3), SamplingParams(temperature=0), forbidden=(0, 1, 2))


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\[2, V\]"):
        sample(torch.zeros(3, 5), [row_input(KINDS[0])] * 2)
    with pytest.raises(ValueError, match="as many rows"):
        target_logprobs(torch.zeros(3, 5), [1], 0)
