"""The workloads of `headrace bench engine`: token ids, seeded, new ones in every repetition so that no cache helps
where none is meant to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class WorkloadRun:
    """Requests that arrive at once, after `prime` has been answered with one token."""

    prompts: list[list[int]]
    max_tokens: list[int]
    prime: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Workload:
    """`make(rng, scale)` draws a run, lengths divided by `scale`. overall: see protocol.figures."""

    name: str
    make: Callable[[random.Random, int], WorkloadRun]
    overall: bool = False

    def draw(self, repetition: int, scale: int) -> WorkloadRun:
        return self.make(random.Random(f"{self.name} {repetition}"), scale)

    def longest(self, scale: int) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.draw(0, scale).prompts))


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, VOCABULARY) for _ in range(max(count, 1))]


def _first_token(length: int) -> Workload:
    """W1: one prompt, one token."""
    return Workload(f"W1_{length}", lambda rng, scale: WorkloadRun([_ids(rng, length // scale)], [1]))


def _decode(length: int) -> Workload:
    """W2: one prompt, 64 tokens."""
    return Workload(f"W2_{length}", lambda rng, scale: WorkloadRun([_ids(rng, length // scale)], [max(64 // scale, 4)]))


def _shared(prefix: int, primed: bool) -> Workload:
    """W3: 16 sequences on a shared prefix with 64 own tokens, 32 generated each."""

    def make(rng: random.Random, scale: int) -> WorkloadRun:
        common = _ids(rng, prefix // scale)
        prompts = [common + _ids(rng, 64 // scale) for _ in range(16)]
        return WorkloadRun(prompts, [max(32 // scale, 4)] * 16, common if primed else [])

    return Workload(f"W3_{prefix}" + ("" if primed else "_cold"), make)


def _tree() -> Workload:
    """W4: 4 groups of 8 sequences; 4,096 tokens are shared within a group, the first 1,024 of them with everyone."""

    def make(rng: random.Random, scale: int) -> WorkloadRun:
        common = _ids(rng, 1024 // scale)
        groups = [common + _ids(rng, 3072 // scale) for _ in range(4)]
        prompts = [group + _ids(rng, 64 // scale) for group in groups for _ in range(8)]
        return WorkloadRun(prompts, [max(32 // scale, 4)] * 32)

    return Workload("W4", make)


def _chat() -> Workload:
    """W5: 64 requests with log-normal lengths like ShareGPT's (means of about 160 and 330 tokens)."""

    def length(rng: random.Random, median: float, spread: float, scale: int) -> int:
        return max(2, min(1024, int(rng.lognormvariate(median, spread))) // scale)

    def make(rng: random.Random, scale: int) -> WorkloadRun:
        fixed = random.Random(0)  # the same lengths in every repetition
        sizes = [(length(fixed, 4.4, 1.2, scale), length(fixed, 5.5, 0.8, scale)) for _ in range(64)]
        return WorkloadRun([_ids(rng, prompt) for prompt, _ in sizes], [answer for _, answer in sizes])

    return Workload("W5", make, overall=True)


def _second_turn(length: int) -> Workload:
    """W6: 64 new tokens on a prompt that was answered before, one token."""

    def make(rng: random.Random, scale: int) -> WorkloadRun:
        first = _ids(rng, length // scale)
        return WorkloadRun([first + _ids(rng, 64 // scale)], [1], first)

    return Workload(f"W6_{length}", make)


def _next_question(length: int) -> Workload:
    """W7: 20 new tokens on a text about which 20 others were asked before, one token."""

    def make(rng: random.Random, scale: int) -> WorkloadRun:
        text = _ids(rng, length // scale)
        before, now = (text + _ids(rng, 20 // scale) for _ in range(2))
        return WorkloadRun([now], [1], before)

    return Workload(f"W7_{length}", make)


WORKLOADS = [
    *(_first_token(length) for length in (512, 2048, 8192, 16384)),
    *(_decode(length) for length in (512, 2048, 8192, 16384)),
    *(_shared(prefix, primed) for prefix in (2048, 8192) for primed in (True, False)),
    _tree(),
    _chat(),
    _second_turn(8192),
    *(_next_question(length) for length in (1000, 4000)),
]


def chosen(names: Sequence[str]) -> list[Workload]:
    """Workloads by family (W1) or by name (W1_8192). Raises ValueError for a name that is neither."""
    known = {workload.name for workload in WORKLOADS} | {workload.name.split("_")[0] for workload in WORKLOADS}
    for name in names:
        if name not in known:
            raise ValueError(f"workload must be one of {', '.join(sorted(known))}; got {name!r}")
    return [workload for workload in WORKLOADS if {workload.name, workload.name.split("_")[0]} & set(names)]
