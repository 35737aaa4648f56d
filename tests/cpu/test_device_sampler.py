"""The choice of tokens on a GPU under Triton's interpreter: the tokens of the host's sampler, from the same logits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has the same kernels, compiled", allow_module_level=True)

from headrace import LLM
from headrace.engine.device_changes import changed
from headrace.engine.device_sampler import DeviceSampler, packed
from headrace.engine.sampler import BadLogits, Sampled, SampleInput, _adjusted, sample
from headrace.kernels.triton import replays as replays_of
from headrace.kernels.triton import sampling
from headrace.kernels.triton.replays import Replays
from headrace.kernels.triton.sampling import Chooser, Needs
from headrace.types import SamplingParams, Structured
from tests.support.fake_device import FakeDevice
from tests.support.sampler_rows import random_logits, row_input

CPU = torch.device("cpu")
INF = float("inf")
WIDTH = 100
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two blocks, the second one part full, in two pieces each."""
    monkeypatch.setattr(sampling, "BLOCK", 64)
    monkeypatch.setattr(sampling, "PIECE", 32)


def both(logits: torch.Tensor, inputs: list[SampleInput | None], copied: int = 0) -> list[Sampled]:
    """The device's samples, which must be the host's; `copied` of them were left to it."""
    device = DeviceSampler()
    ours, truth = device.sample(logits, range(len(inputs)), inputs), sample(logits, inputs)
    assert [one.token for one in ours] == [one.token for one in truth]
    assert [one.logprobs and one.logprobs.keys() for one in ours] == [
        one.logprobs and one.logprobs.keys() for one in truth
    ]
    for one, other in zip(ours, truth, strict=True):
        for token, entry in (one.logprobs or {}).items():
            assert other.logprobs is not None and entry.rank == other.logprobs[token].rank
            assert entry.logprob == pytest.approx(other.logprobs[token].logprob, abs=1e-12)
    assert device.copied == copied
    return ours


# ---- draws -----------------------------------------------------------------------------------------------------------

FEW: list[tuple[int, dict[str, Any]]] = [
    (7, {}),
    (-3, {"top_k": 5, "temperature": 1.7}),
    (2**63 - 1, {"top_p": 0.8, "min_p": 0.02}),
    (2**64 - 1, {"top_k": 20, "top_p": 0.7, "min_p": 0.01, "temperature": 0.5}),
]


def test_draws_are_those_of_the_host() -> None:
    """Of several filters in one batch, a greedy row among them; equals are told apart by id."""
    logits = random_logits(1, len(FEW) + 1, WIDTH)
    logits[1::2] = logits[1::2].round()
    draws = [row_input(SamplingParams(**options), seed=seed) for seed, options in FEW]
    draws[1].index, draws[1].output = 127, [0] * 300
    both(logits, [*draws, row_input(GREEDY)])


def test_one_of_many_equals() -> None:
    """The place among them is that of the random number, in the second block as in the first."""
    logits = torch.full((2, WIDTH), -3.0)
    logits[:, 10:90] = 5.0
    found = both(logits, [row_input(SamplingParams(), seed=seed) for seed in (1, 3)])
    assert found[0].token < 64 < found[1].token


FILTERS: list[Any] = [
    ((0.01, 1.0, 50.0)[(k + p + m) % 3], (0, 1, 64, 1000)[k], (1.0, 0.999, 0.3)[p], (0.0, 1e-4, 1.0)[m], ties)
    for k, p, m, ties in product(range(4), range(3), range(3), (False, True))
]
"""All of top_k, top_p, min_p and ties; the temperatures so that each meets every two values of two others."""


@pytest.mark.matrix
@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p", "ties"), FILTERS)
def test_filters(temperature: float, top_k: int, top_p: float, min_p: float, ties: bool) -> None:
    logits = random_logits(3, 1, WIDTH)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    # So sharp a distribution leaves nothing to what top_k cuts off: the edge is too close to call.
    copied = int(temperature == 0.01 and top_k == 64)
    both(logits.round() if ties else logits, [row_input(params, seed=5)], copied=copied)


def test_a_row_has_the_same_bits_alone() -> None:
    logits, needs = random_logits(4, 2, WIDTH), Needs(reports=True, draws=True)
    asked = torch.tensor([[row, -1, -1, 1.0, 0, 1.0, 0.0, 1, 0] for row in range(2)])
    together, alone = Chooser(2, WIDTH, CPU), Chooser(1, WIDTH, CPU)
    together.asked.copy_(asked)
    together.choose(logits, 2, needs)
    alone.asked.copy_(asked[1:])
    alone.choose(logits, 1, needs)
    assert torch.equal(together.found[1], alone.found[0])


def test_a_draw_too_close_to_call_is_left_to_the_host() -> None:
    """top_p ends exactly between two tokens of one weight."""
    logits = torch.full((1, WIDTH), -INF)
    logits[0, 3] = logits[0, 70] = 1.0
    both(logits, [row_input(SamplingParams(top_p=0.5), seed=1)], copied=1)


# ---- the most likely token ------------------------------------------------------------------------------------------


def test_the_least_id_of_equals() -> None:
    logits = torch.zeros(3, WIDTH)
    logits[0, [70, 99]] = logits[1, [5, 6, 70]] = 2.0
    logits[2] = -0.0
    logits[2, 50] = 0.0
    found = both(logits, [None, row_input(GREEDY), None])
    assert [one.token for one in found] == [70, 5, 0]


@pytest.mark.parametrize("width", [1, 63, 64, 65, 130])
def test_any_width(width: int) -> None:
    both(random_logits(width, 2, width), [None, row_input(SamplingParams(temperature=0.0, logprobs=0))])


@pytest.mark.parametrize("poison", [float("nan"), INF, -INF])
def test_broken_logits_are_told_by_the_host(poison: float) -> None:
    logits = random_logits(1, 3, WIDTH)
    logits[1, 70 if poison != -INF else slice(None)] = poison
    with pytest.raises(BadLogits) as error:
        DeviceSampler().sample(logits, [2, 0, 1], [None, None, None])
    with pytest.raises(BadLogits) as truth:
        sample(logits[[2, 0, 1]], [None, None, None])
    assert error.value.row == 2 and str(error.value) == str(truth.value)


def test_rows_of_logits_are_chosen_by_number() -> None:
    logits = random_logits(9, 4, WIDTH)
    found = DeviceSampler().sample(logits, [3, 1], [None, None])
    assert [one.token for one in found] == logits.argmax(1)[[3, 1]].tolist()


def test_log_probabilities() -> None:
    logits = random_logits(5, 2, WIDTH)
    logits[1, ::2] = -INF
    both(logits, [row_input(SamplingParams(temperature=t, logprobs=0), seed=3) for t in (0.0, 2.0)])


@pytest.mark.parametrize("ties", [False, True])
def test_the_most_likely_alternatives(ties: bool) -> None:
    """Of rows that ask for more and for fewer; impossible ones are left out."""
    logits = random_logits(6, 4, WIDTH)
    logits = logits.round() if ties else logits
    logits[2, 3:] = -INF
    both(logits, [row_input(SamplingParams(temperature=0.0, logprobs=n)) for n in (20, 3, 5, 0)])


# ---- masks, and what the host does -----------------------------------------------------------------------------------


def mask_of(*tokens: int) -> Any:
    mask = np.zeros(WIDTH, np.bool_)
    mask[list(tokens)] = True
    return mask


def test_masks_of_greedy_rows() -> None:
    logits = random_logits(6, 3, WIDTH)
    best = int(logits[1].argmax())
    inputs = [
        row_input(GREEDY, mask=mask_of(31, 32, 64, 99)),
        row_input(GREEDY, forbidden=(best, 12345)),
        row_input(SamplingParams(temperature=0.0, logprobs=0), mask=mask_of(40, 98)),
    ]
    found = both(logits, inputs)
    assert found[0].token in (31, 32, 64, 99) and found[1].token != best


def test_a_mask_changes_a_draw_only_where_it_must() -> None:
    """The token without the mask, where it is allowed; else one by the second random number."""
    logits = random_logits(7, 2, WIDTH, scale=1.0)
    free = sample(logits, [row_input(SamplingParams(), seed=2)] * 2)[0].token
    both(
        logits,
        [
            row_input(SamplingParams(), seed=2, mask=mask_of(free, 3)),
            row_input(SamplingParams(), seed=2, mask=mask_of(3, 90)),
        ],
    )


def test_a_draw_without_the_forbidden() -> None:
    logits = random_logits(8, 1, WIDTH)
    both(logits, [row_input(SamplingParams(), seed=2, forbidden=(int(logits[0].argmax()),))])


CHANGES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": -0.7, "temperature": 0.0},
    {"repetition_penalty": 0.6, "logit_bias": {3: 5.0, 99: -5.0}, "temperature": 0.0},
    {"logit_bias": {4: 9.0, 70: 8.5}, "top_p": 0.9},
]


def test_penalties_and_bias() -> None:
    """To the bit as on the host, in rows by number; then the choice, beside a row without."""
    logits = random_logits(9, len(CHANGES) + 1, WIDTH)
    output = np.random.default_rng(1).integers(0, WIDTH, 60).tolist()
    inputs = [row_input(SamplingParams(**options), output, [1, 5, 99], seed=4) for options in CHANGES]
    ours = changed(logits, [3, 1, 2], inputs).numpy()
    for row, number, item in zip(ours, [3, 1, 2], inputs, strict=True):
        np.testing.assert_array_equal(row, _adjusted(logits[number].double().numpy(), item))
    both(logits, [None, *inputs])


def test_logits_that_only_fp32_takes_for_equals_are_for_the_host() -> None:
    """Two tokens whose penalised logits round to one number."""
    logits = torch.full((1, WIDTH), -50.0)
    logits[0, 5] = 3.0
    logits[0, 70] = 3.0
    params = SamplingParams(logit_bias={5: 1e-9}, seed=1)
    both(logits, [row_input(params, seed=1)], copied=1)


REPORTS: list[dict[str, Any]] = [
    {"logprob_token_ids": (98, 4, 64)},
    {"logprob_token_ids": (4, 99), "presence_penalty": 1.0},
    {"logprobs": 1, "logit_bias": {3: 9.0}},
    {"logprobs": 3, "temperature": 1.3},
]


@pytest.mark.parametrize("ties", [False, True])
def test_listed_log_probabilities_and_those_of_changed_rows(ties: bool) -> None:
    """They are those of the logits as they were, in the host's order; of listed tokens those without a chance, too."""
    logits = random_logits(9, len(REPORTS) + 1, WIDTH)
    logits = logits.round() if ties else logits
    logits[0, 64] = -INF
    params = [SamplingParams(**({"temperature": 0.0} | options)) for options in REPORTS]
    inputs = [row_input(each, output=[1, 2, 2], seed=7) for each in params]
    found = both(logits, [*inputs, None])
    truth = sample(logits, [*inputs, None])
    assert [list(one.logprobs or {}) for one in found] == [list(one.logprobs or {}) for one in truth]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_p": 0.6}, lambda p: int((p.cumsum(0) < 0.6).sum()) + 1),
        pytest.param({"top_k": 3}, lambda p: 3, marks=pytest.mark.matrix),
        pytest.param({"min_p": 0.2}, lambda p: int((p >= 0.2 * p[0]).sum()), marks=pytest.mark.matrix),
    ],
    ids=["top_p", "top_k", "min_p"],
)
def test_a_mask_together_with_filters(
    options: dict[str, Any], kept: Callable[[torch.Tensor], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draw without the mask counts if the filters keep no forbidden token: the last one kept is, or the next."""
    monkeypatch.setattr(sampling, "BLOCK", 128)
    logits = random_logits(9, 1, WIDTH)
    order = logits[0].argsort(descending=True)
    last = kept(logits[0, order].double().softmax(0)) - 1
    masks = [mask_of(*(token for token in range(WIDTH) if token != order[place])) for place in (last, last + 1)]
    both(logits.repeat(2, 1), [row_input(SamplingParams(**options), seed=3, mask=mask) for mask in masks])


def test_the_impossible_among_the_top_k_are_for_the_host() -> None:
    logits = torch.full((1, WIDTH), -INF)
    logits[0, :3] = torch.tensor([1.0, 2.0, 3.0])
    both(logits, [row_input(SamplingParams(top_k=5), seed=3, mask=mask_of(0, 1, 2))], copied=1)


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(BadLogits, match="no token is left"):
        DeviceSampler().sample(random_logits(1, 1, 2), [0], [row_input(GREEDY, forbidden=(0, 1))])


# ---- graphs ----------------------------------------------------------------------------------------------------------


def test_choices_from_the_same_place_are_replayed() -> None:
    """Recorded at the second choice; rows up to the next power of two are launched, whatever was asked before."""
    fake = FakeDevice()
    device, logits = DeviceSampler(), random_logits(1, 5, WIDTH)
    device._replays = replays = Replays(Chooser(8, WIDTH, CPU), fake.graph)
    device.sample(logits, range(5), [None] * 5)
    few = logits[:3].clone()
    for turn in range(4):
        few[:] = random_logits(turn, 3, WIDTH)
        assert [one.token for one in device.sample(few, [2, 0, 1], [None] * 3)] == few.argmax(1)[[2, 0, 1]].tolist()
    assert (len(fake.graphs), replays.replayed) == (1, 3)
    device.sample(few, [0], [row_input(SamplingParams(temperature=0.0, logprobs=3))])
    assert (len(fake.graphs), replays.replayed) == (1, 3)


def test_few_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays_of, "MOST", 1)
    replays = Replays(Chooser(2, WIDTH, CPU), FakeDevice().graph)
    logits = random_logits(1, 4, WIDTH)
    for first in (0, 1, 0, 0):
        replays.choose(logits[first:], 1, Needs())
    assert replays.replayed == 1


def test_a_choice_that_cannot_be_recorded_is_launched(caplog: pytest.LogCaptureFixture) -> None:
    """It is tried once; all choices are right, and of as many rows as are asked for from then on."""
    tried = Mock(side_effect=torch.OutOfMemoryError("no memory"))
    device, logits = DeviceSampler(), random_logits(1, 3, WIDTH)
    device._replays = replays = Replays(Chooser(4, WIDTH, CPU), tried)
    for turn in range(4):
        logits[:] = random_logits(turn, 3, WIDTH)
        assert [one.token for one in device.sample(logits, range(3), [None] * 3)] == logits.argmax(1).tolist()
    assert (tried.call_count, replays.replayed, replays.room(3)) == (1, 0, 3)
    assert "choices of tokens are launched, not recorded: no memory" in caplog.text


# ---- the chooser -----------------------------------------------------------------------------------------------------


def test_packed_masks() -> None:
    (words,) = packed([mask_of(0, 31, 32, 99)], 4).tolist()
    assert [word & 0xFFFFFFFF for word in words] == [1 | 1 << 31, 1, 0, 1 << 3]


def test_what_is_refused() -> None:
    for rows, width in ((0, 5), (1, 0), (1, 2**19 + 1)):
        with pytest.raises(ValueError, match=f"got {rows} rows of {width}"):
            Chooser(rows, width, CPU)
    chooser = Chooser(2, 5, CPU)
    for logits in (torch.zeros(2, 4), torch.zeros(2, 5).bfloat16(), torch.zeros(2, 5).double(), torch.zeros(5, 2).T):
        with pytest.raises(ValueError, match="needs fp32 logits"):
            chooser.choose(logits, 1, Needs())
    with pytest.raises(ValueError, match="1 to 2 rows"):
        chooser.choose(torch.zeros(3, 5), 3, Needs())


# ---- the engine ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", kv_cache_tokens=4096, speculative="ngram") as llm:
        yield llm


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2),
        SamplingParams(seed=5, n=2, max_tokens=2, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, max_tokens=4, structured=Structured(regex="[ab]+")),
    ],
    ids=["greedy", "drawn", "structured"],
)
def test_an_engine_answers_as_with_the_hosts_sampler(
    params: SamplingParams, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts, whose rows are chosen from in turn."""
    monkeypatch.setattr(sampling, "BLOCK", 4096)
    monkeypatch.setattr(sampling, "PIECE", 4096)
    prompts = ["one two one two one two one", "The river"]
    theirs = llm.generate(prompts, params)
    device = DeviceSampler()
    monkeypatch.setattr(llm.engine, "_device_sampler", device)
    ours = llm.generate(prompts, params)
    assert device.copied == 0
    for one, other in zip(ours, theirs, strict=True):
        assert [each.token_ids for each in one.outputs] == [each.token_ids for each in other.outputs]
        assert [list(entry) for entry in one.logprobs or []] == [list(entry) for entry in other.logprobs or []]
