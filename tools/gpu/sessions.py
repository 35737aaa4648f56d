"""Runs of our engine on a GPU, step by step: when each step ended, and how many tokens it gave to whom."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from headrace import LLM, SamplingParams
from headrace.types import Request

FIRST_TOKEN = 10
"""Below are a vocabulary's special tokens."""
_NUMBERS = itertools.count()


def drawn_tokens(count: int, vocabulary: int = 32_000) -> list[int]:
    """Token ids that no prompt before began with, so that nothing of it is cached."""
    generator = torch.Generator().manual_seed(next(_NUMBERS))
    return torch.randint(FIRST_TOKEN, vocabulary, (count,), generator=generator).tolist()


@dataclass(frozen=True, slots=True)
class Step:
    """ended: seconds after the run began. tokens: of each request that got some."""

    ended: float
    tokens: dict[str, int]


@dataclass
class Session:
    """Requests given to an engine, and the steps that it took since."""

    llm: LLM
    steps: list[Step] = field(default_factory=list)
    began: float = 0.0

    def __post_init__(self) -> None:
        torch.cuda.synchronize()
        self.began = time.perf_counter()

    def add(self, prompt: Sequence[int], params: SamplingParams) -> str:
        """Queues a request; its id."""
        name = f"gpu-{next(_NUMBERS)}"
        self.llm.engine.add(Request(name, list(prompt), params, arrival_s=time.monotonic()))
        return name

    def step(self) -> Step:
        """One step of the engine. Raises RuntimeError if nothing is left to do."""
        if not self.llm.engine.has_work:
            raise RuntimeError("the engine has answered everything")
        deltas = self.llm.engine.step()
        tokens = {delta.request_id: len(delta.token_ids) for delta in deltas if delta.token_ids}
        self.steps.append(Step(time.perf_counter() - self.began, tokens))
        return self.steps[-1]

    def drain(self) -> list[Step]:
        """Steps until nothing is left to do; all steps."""
        while self.llm.engine.has_work:
            self.step()
        return self.steps


def answers(count: int, sampled: bool = False) -> SamplingParams:
    """So many tokens, greedy or drawn."""
    return SamplingParams(temperature=0.8 if sampled else 0.0, max_tokens=count, ignore_eos=True)


def run(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Step]:
    """The steps that answer these prompts, which arrive at once."""
    session = Session(llm)
    for prompt in prompts:
        session.add(prompt, params)
    return session.drain()


def first_token_s(llm: LLM, prompt: Sequence[int]) -> float:
    """Seconds to the first token of one prompt."""
    return next(step.ended for step in run(llm, [prompt], answers(1)) if step.tokens)


def whole_gaps(steps: Sequence[Step], sequences: int, skip: int = 2) -> list[float]:
    """Seconds of each step that gave every sequence its next token, but for the first few."""
    gaps = [
        later.ended - step.ended
        for step, later in itertools.pairwise(steps)
        if len(step.tokens) == len(later.tokens) == sequences
    ]
    return gaps[skip:]
