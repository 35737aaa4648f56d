"""Drafts that tests choose: right ones, wrong ones, and right ones with a wrong end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from headrace import LLM
from headrace.engine.executor import Computed
from headrace.engine.sequence import SequenceState
from headrace.engine.speculation import draft_model
from headrace.engine.speculation.lengths import StepCost
from headrace.types import Request, SamplingParams
from tests.support.traces import Trace


class Oracle:
    """Knows whole sequences, prompt and answer. Of three drafts one is right, one goes wrong somewhere, and one is
    wrong from the start or ends at once."""

    def __init__(self, known: Sequence[Sequence[int]]) -> None:
        self._known = [list(each) for each in known]
        self._calls = 0

    def propose(self, tokens: list[int], most: int) -> list[int]:
        self._calls += 1
        whole = next((each for each in self._known if each[: len(tokens)] == tokens), tokens)
        draft = whole[len(tokens) : len(tokens) + most]
        wrong = (self._calls // 3 % 4, None, 0)[self._calls % 3]
        if wrong is not None and wrong < len(draft):
            draft[wrong] ^= 1
        return draft


def answered(prompt: list[int], trace: Trace) -> list[int]:
    """A prompt and its greedy answer."""
    return prompt + [int(trace[position].argmax()) for position in sorted(trace)]


def drafts_from(llm: LLM, known: Sequence[Sequence[int]]) -> None:
    """Has the engine draft what an oracle says, as many tokens as it may."""
    speculator: Any = llm.engine.speculator
    speculator.matcher_of = lambda sequence: Oracle(known)
    free_rows(llm)


def free_rows(llm: LLM) -> None:
    """Has every drafted token pay, whatever the clock says."""
    speculator: Any = llm.engine.speculator
    speculator.cost.row = 0.0
    speculator.cost.row_of = lambda sequences: 0.0
    StepCost.note(speculator.cost, 1, 0, 1.0)  # as long as no step was seen, one without drafts is due
    speculator.cost.note = lambda *seen: None


def free_model(llm: LLM) -> None:
    """Has every token of a draft model pay, and every prompt be computed by it."""
    free_rows(llm)
    cost: Any = llm.engine.speculator.cost  # type: ignore[union-attr]
    cost.of_pass = lambda sequences: lambda rows: 0.0
    cost.rest = lambda: None
    cost.of_token = lambda sequences: 0.0
    cost.account.affords = lambda seconds: True


def draft_model_says(monkeypatch: pytest.MonkeyPatch, known: Sequence[Sequence[int]]) -> None:
    """Has a draft model say, whatever it computes, what an oracle does, as long as that knows: about half is right."""
    oracle, computes = Oracle(known), draft_model.last_tokens

    def said(computed: Computed) -> dict[SequenceState, int]:
        found = computes(computed)
        return {own: (oracle.propose(own.tokens + own.draft, 1) or [found[own]])[0] for own in found}

    monkeypatch.setattr(draft_model, "last_tokens", said)


def abort_one_by_one(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, steps: int) -> None:
    """Asks all prompts, aborts one after each of so many steps, and has the others answered: nothing is left then."""
    core = llm.engine
    for number, prompt in enumerate(prompts):
        core.add(Request(f"r-{number}", prompt, params, arrival_s=time.monotonic()))
    for step in range(steps):
        core.step()
        core.scheduler.check()
        assert core.abort(f"r-{step}")
        core.scheduler.check()
    while core.has_work:
        core.step()
        core.scheduler.check()
    assert core.cache.used == 0
