"""Requests to an engine whose steps may run ahead of the host, and what came of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from headrace import SamplingParams
from headrace.engine.core import EngineCore
from headrace.types import Request, TokenLogprobs
from tests.support.token_machine import TokenMachine

CHUNKS = 12
"""Of an engine's pool, unless a test needs others."""


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: tuple[Any, ...] = ()


class Client:
    """Requests to an engine, and what came of them."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.answers: dict[tuple[str, int], Answer] = {}
        machine = core.loaded.executor
        assert isinstance(machine, TokenMachine)
        self.machine = machine

    def add(self, name: str, prompt: list[int], tenant: str = "", priority: int = 0, **params: Any) -> None:
        checked = self.core.loaded.capacity.check(prompt, SamplingParams(**params))
        for index in range(checked.n):
            self.answers[name, index] = Answer()
        self.core.add(Request(name, prompt, checked, tenant=tenant, priority=priority))

    def abort(self, name: str) -> None:
        if self.core.abort(name):
            for (each, _), answer in self.answers.items():
                if each == name and not answer.end:
                    answer.end = ("abort",)

    def step(self) -> None:
        for delta in self.core.step():
            answer = self.answers[delta.request_id, delta.index]
            assert not answer.end, "something comes behind the end"
            answer.tokens += delta.token_ids
            answer.text += delta.text
            answer.logprobs += delta.logprobs or []
            if delta.finish_reason is not None:
                answer.end = (delta.finish_reason, delta.stop_reason)
        self.core.overlap.check()

    def await_grammars(self) -> None:
        for output in self.core._outputs.values():
            if output.matcher is not None and output.matcher.job is not None:
                output.matcher.job.result()

    def finish(self) -> None:
        for _ in range(2000):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work and not self.core.cache.used and not self.core.cache.tables
        self.core.overlap.check()
        self.machine.check(self.core.cache)


def prompt(seed: int, length: int, shared: int = 0) -> list[int]:
    own, common = random.Random(seed), random.Random(0)
    return [common.randrange(10, 2000) for _ in range(shared)] + [own.randrange(10, 2000) for _ in range(length)]


GREEDY = {"temperature": 0.0, "ignore_eos": True}


def compare(ahead: Client, truth: Client) -> None:
    """Requests that were aborted have the tokens that came until then, of the same answer."""
    for key, answer in ahead.answers.items():
        other = truth.answers[key]
        if ("abort",) in (answer.end, other.end):
            assert all(one == two for one, two in zip(answer.tokens, other.tokens, strict=False))
        else:
            assert answer == other
