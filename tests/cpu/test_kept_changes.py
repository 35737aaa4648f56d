"""Penalties, biases, forbidden tokens and listed log probabilities of steps that are launched ahead, under Triton's
interpreter: the numbers of the host's sampler, to the bit."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has the same kernels, compiled", allow_module_level=True)

from headrace import LLM, SamplingParams
from headrace.device import current
from headrace.engine import launched_draws
from headrace.engine.device_sampler import DeviceSampler
from headrace.engine.kept_changes import KeptChanges
from headrace.engine.launched_draws import LaunchedDraws
from headrace.engine.output import Output
from headrace.engine.programs import Launched
from headrace.engine.sampler import Sampled, _adjusted, sample
from headrace.engine.sequence import Slice
from headrace.kernels.step_copies import Reading, Uploads
from headrace.kernels.triton import changing, sampling
from tests.support.delayed_device import DelayedDevice, delayed_device
from tests.support.fake_device import fake_device
from tests.support.overlap_client import GREEDY, Client, compare, prompt
from tests.support.sampler_rows import output_of, random_logits
from tests.support.token_machine import machine_engine

WIDTH, EOS = 100, (1, 65)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two blocks, the second one part full."""
    for module in (sampling, changing):
        monkeypatch.setattr(module, "BLOCK", 64)
    monkeypatch.setattr(sampling, "PIECE", 32)


tokens = st.integers(0, WIDTH - 1)
options = st.fixed_dictionaries(
    {"temperature": st.just(0.0)},
    optional={
        "repetition_penalty": st.floats(0.1, 3), "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2), "min_tokens": st.integers(1, 6),
        "logit_bias": st.dictionaries(tokens, st.floats(-100, 100), max_size=40),
        "logprob_token_ids": st.lists(tokens, min_size=1, max_size=9, unique=True).map(tuple),
    },
)  # fmt: skip


def kept_of(output: Output) -> KeptChanges:
    return KeptChanges(output.sequence, output.history, WIDTH, EOS, torch.device("cpu"))


def truth_of(output: Output, logits: torch.Tensor) -> Sampled:
    item = output.sample_input(EOS)
    if item is not None:
        item.history = None  # counts afresh
    return sample(logits[None], [item])[0]


@given(chosen=st.lists(options, min_size=1, max_size=2), answers=st.lists(tokens, max_size=9), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_a_row_is_changed_to_the_bit(chosen: list[dict[str, Any]], answers: list[int], seed: int) -> None:
    """Rows in any order, of an answer so far; then behind a token that the device has counted by itself."""
    outputs = [output_of(SamplingParams(**each), [3, 99, 3, 64], index) for index, each in enumerate(chosen)]
    rows = random.Random(seed).sample(range(len(outputs)), len(outputs))
    logits = random_logits(seed, len(outputs), WIDTH).round(decimals=1)
    with pytest.MonkeyPatch.context() as patch, fake_device(patch):
        uploads = Uploads(8 * WIDTH, current())
        kept = [kept_of(output) for output in outputs]
        for output in outputs:
            output.sequence.tokens += answers
        for turn in range(2):
            position = len(answers) + turn
            request = [each.prepare(row, position, uploads) for each, row in zip(kept, rows, strict=True)]
            there = torch.tensor(request, dtype=torch.int64)
            changing.change(logits, there)
            for output, each, row in zip(outputs, kept, rows, strict=True):
                item = output.sample_input(EOS)
                raw = logits[row].double().numpy()
                np.testing.assert_array_equal(each.memory.into, raw if item is None else _adjusted(raw, item))
            last = torch.tensor([(seed + row) % WIDTH for row in range(len(outputs))], dtype=torch.int32)
            changing.count(there, last)
            for output, row in zip(outputs, rows, strict=True):
                output.sequence.tokens.append(int(last[row]))


def test_presence_is_of_the_answer() -> None:
    """Repetition is of the prompt, too."""
    output = output_of(SamplingParams(presence_penalty=1.0, repetition_penalty=2.0), [3, 70])
    with pytest.MonkeyPatch.context() as patch, fake_device(patch):
        kept = kept_of(output)
        output.sequence.tokens += [70, 9]
        request = kept.prepare(0, 2, Uploads(8 * WIDTH, current()))
        changing.change(torch.ones(1, WIDTH), torch.tensor([request]))
    assert kept.memory.into[[3, 70, 9, 10]].tolist() == [0.5, -0.5, -0.5, 1.0]


class Steps:
    """Sequences whose tokens are chosen a step ahead of the host, in rows that change from step to step."""

    def __init__(self, late: DelayedDevice) -> None:
        self.late, self.draws = late, LaunchedDraws(DeviceSampler(), WIDTH, EOS)
        self.under_way: list[tuple[list[Output | None], Any, torch.Tensor]] = []

    def launch(self, outputs: list[Output], logits: torch.Tensor) -> None:
        """A step of these, each of which may be in the one under way."""
        seen = [output for step in self.under_way for output in step[0]]
        assert all(map(self.draws.takes, outputs))
        slices = [Slice(one.sequence, len(one.sequence.tokens) + seen.count(one) - 1, 1) for one in outputs]
        chosen = torch.full((len(outputs),), -1, dtype=torch.int32)
        self.late.steps = 1
        launched = Launched(slices, len(outputs), logits, chosen, Reading(logits, self.late.event()))
        self.under_way.append((list(outputs), self.draws.launch(launched, outputs), logits))

    def land(self) -> None:
        """The oldest step: what the device is not sure of the host chooses, and what is under way of it is void."""
        outputs, drawn, logits = self.under_way.pop(0)
        found = drawn.sampled()
        for row, output in enumerate(outputs):
            if output is None:
                continue
            if row in found:
                wanted = truth_of(output, logits[row])
                assert found[row].token == wanted.token and near(found[row], wanted)
                output.sequence.tokens.append(wanted.token)
                continue
            output.sequence.tokens.append(17)
            for other, _, _ in self.under_way:
                other[:] = [None if each is output else each for each in other]


def near(found: Sampled, wanted: Sampled) -> bool:
    """Sums have another order (docs/gpu-steps.md)."""
    one, other = found.logprobs, wanted.logprobs
    if one is None or other is None:
        return one is other
    same = [(token, each.rank) for token, each in one.items()] == [(token, each.rank) for token, each in other.items()]
    return same and all(
        each.logprob == other[token].logprob or abs(each.logprob - other[token].logprob) < 1e-12
        for token, each in one.items()
    )


@dataclass(frozen=True)
class Plan:
    """Of a step. order: of the sequences; left_out: how many of them sit it out; broken: the row without a number, if
    there is one of that number; waits: whether the host waits for all steps first; ends: whether a sequence ends then,
    and another begins."""

    order: int
    left_out: int
    broken: int
    waits: bool
    ends: bool


FREQUENT: list[dict[str, Any]] = [{"temperature": 0.0, "frequency_penalty": -2.0}] * 2
"""The most frequent token is drawn again."""
ENDING: list[dict[str, Any]] = [
    {"temperature": 0.0, "logit_bias": {1: 50.0}, "min_tokens": 2}, {"temperature": 0.0, "min_tokens": 3},
]  # fmt: skip
"""The first one draws a token as soon as it is no longer forbidden."""

plans = st.builds(
    Plan, st.integers(0, 99), st.sampled_from([0, 0, 0, 1]), st.integers(0, 9), st.sampled_from([False, False, True]),
    st.sampled_from([False, False, False, True]),
)  # fmt: skip


def play(chosen: list[dict[str, Any]], planned: list[Plan]) -> None:
    """Steps of sequences with these parameters: their tokens are those of the host's sampler."""
    with pytest.MonkeyPatch.context() as patch, delayed_device(patch) as late:
        steps = Steps(late)
        outputs = [output_of(SamplingParams(**each), [3, 99, 3], index) for index, each in enumerate(chosen)]
        for number, plan in enumerate(planned):
            while steps.under_way and (plan.waits or len(steps.under_way) > 1):
                steps.land()
            if plan.ends and plan.waits:
                outputs[0] = output_of(SamplingParams(**chosen[-1]), [5, 5, number])
            picked = random.Random(plan.order).sample(outputs, len(outputs) - plan.left_out)
            logits = random_logits(number, len(picked), WIDTH, scale=0.5)
            if plan.broken < len(picked):
                logits[plan.broken, 70] = torch.nan
            steps.launch(picked, logits)
        while steps.under_way:
            steps.land()


@given(
    chosen=st.lists(options, min_size=2, max_size=4), planned=st.lists(plans, min_size=3, max_size=6),
    drawn=st.sampled_from([False, False, False, True]),
)  # fmt: skip
@settings(max_examples=4, deadline=None)
def test_tokens_of_steps_ahead_are_the_hosts(chosen: list[dict[str, Any]], planned: list[Plan], drawn: bool) -> None:
    """Sequences in any rows, some of which sit steps out, end, begin, or have rows that the device is not sure of."""
    play([{**chosen[0], "temperature": 0.8}, *chosen[1:]] if drawn else chosen, planned)


def test_each_step_counts_its_tokens() -> None:
    """But for those that it is not sure of: the host has chosen others."""
    play(FREQUENT, [Plan(0, 0, row, number < 4, False) for number, row in enumerate((0, 0, 9, 9, 0, 9, 9))])


def test_what_is_forbidden_no_longer_is_drawn() -> None:
    play(ENDING, [Plan(1, 0, 9, False, False)] * 5)


def test_memory_that_grew_is_told_all_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of others, which was waited for, has needed more rows; the next one is of the same sequences as before."""
    output, change, seen = output_of(SamplingParams(**FREQUENT[0]), [3, 99]), changing.change, list[list[int]]()

    def checked(logits: torch.Tensor, request: torch.Tensor) -> None:
        assert output.kept is not None
        params = output.sequence.request.params
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        assert request.tolist() == [output.kept.memory.request(0, *penalties)]
        seen.append(request[0].tolist())
        change(logits, request)

    monkeypatch.setattr(changing, "change", checked)
    with delayed_device(monkeypatch) as late:
        steps = Steps(late)
        for turn in range(3):
            logits = random_logits(turn, 1, WIDTH, scale=0.5)
            steps.launch([output], logits)
            steps.land()
            steps.draws.sampler.prepared(20 << turn, logits)
    assert len(seen) == 3


@pytest.mark.matrix
@pytest.mark.parametrize("unsure", [False, True], ids=["sure", "unsure"])
def test_an_engine_ahead_gives_the_same_answers(unsure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of forks, beside plain requests, over preemption and an abort; steps are ahead all the same. unsure: the device
    has some rows chosen by the host."""
    for module in (sampling, changing):
        monkeypatch.setattr(module, "BLOCK", 4096)
    llm, found = LLM("tiny", kv_cache_tokens=1024), {}
    settled = launched_draws.Drawn.sampled

    def some(self: launched_draws.Drawn) -> dict[int, Sampled]:
        rows = settled(self)
        gone = [row for row, one in rows.items() if one.token % 5 == 0 and row in self.kept]
        for row in gone:
            self.kept[row].forget()
        return {row: one for row, one in rows.items() if row not in gone}

    for ahead in (True, False):
        with delayed_device(monkeypatch) as late:
            if unsure and ahead:
                monkeypatch.setattr(launched_draws.Drawn, "sampled", some)
            core = machine_engine(llm, late, 4, ahead, max_batch_tokens=80)
            width, eos = llm.engine.loaded.capacity.vocab_size, llm.engine.loaded.capacity.eos_token_ids
            core.overlap.draws = LaunchedDraws(DeviceSampler(), width, eos)
            client = Client(core)
            client.add("a", prompt(1, 58), max_tokens=12, n=2, repetition_penalty=1.8, presence_penalty=0.5, **GREEDY)
            client.add("b", prompt(2, 9), max_tokens=14, logit_bias={7: 3.0}, **GREEDY)
            client.add("c", prompt(3, 60), max_tokens=9, min_tokens=5, stop_token_ids=list(range(0, 2000, 3)), **GREEDY)
            client.add("d", prompt(4, 9), max_tokens=14, frequency_penalty=1.5, **GREEDY)
            for _ in range(6):
                client.step()
            client.abort("d")
            client.add("e", prompt(5, 20), max_tokens=10, frequency_penalty=1.5, **GREEDY)
            client.finish()
            assert (client.machine.ahead > 10) == ahead
            assert client.core.stats().scheduler.preemptions or not ahead
        found[ahead] = client
    compare(found[True], found[False])


def test_tokens_of_steps_that_were_waited_for_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has drawn one five times by itself."""
    with delayed_device(monkeypatch) as late:
        steps, output = Steps(late), output_of(SamplingParams(**FREQUENT[0]), [3, 99])
        for turn in range(2):
            steps.launch([output], random_logits(turn, 1, WIDTH, scale=0.5))
            steps.land()
            output.sequence.tokens += [33] * 5 * (1 - turn)
        assert output.sequence.output[-1] == 33


def test_without_memory_steps_are_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Of sequences whose logits are changed alone; the log says so once."""

    def none(*given: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(launched_draws, "KeptChanges", none)
    draws = LaunchedDraws(DeviceSampler(), WIDTH, EOS)
    assert draws.takes(output_of(SamplingParams(logprobs=2), [3]))
    for _ in range(2):
        assert not draws.takes(output_of(SamplingParams(logit_bias={3: 1.0}), [3]))
    assert caplog.text.count("has no memory") == 1
