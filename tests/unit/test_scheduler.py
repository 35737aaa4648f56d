"""The scheduler, without a model: budgets, order, preemption, and a Hypothesis state machine over whole requests."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence, Slice
from headrace.kv.cache import KVCache
from headrace.types import CHUNK, Request, SamplingParams


class Harness:
    """A scheduler and a memory of tokens in place of keys and values. The next token is a function of those before it,
    so that a sequence computed wrongly, or twice, shows."""

    def __init__(self, chunks: int, budget: int, sequences: int = 64, shares: bool = True) -> None:
        self.cache = KVCache(chunks)
        self.scheduler = Scheduler(
            self.cache,
            lambda s: self.cache.open(s.tokens, salt=s.request.cache_salt, shares=shares),
            budget,
            sequences,
        )
        self.memory: dict[int, list[int]] = {}
        self.live: dict[Sequence, int] = {}
        self.order = 0
        self.prefilled = 0

    def add(self, prompt: list[int], answer: int, salt: str | None = None) -> Sequence:
        request = Request(str(self.order), prompt, SamplingParams(), cache_salt=salt)
        sequence = Sequence(request, 0, self.order)
        self.order += 1
        self.live[sequence] = answer
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[Slice]:
        slices = self.scheduler.schedule()
        assert sum(part.length for part in slices) <= self.scheduler.max_batch_tokens
        for part in slices:
            self.write(part)
        self.cache.commit()
        for part in slices:
            assert self.seen(part.sequence) == part.sequence.tokens[: part.sequence.computed], "reads another's tokens"
            if part.samples:
                self.sample(part.sequence)
        self.scheduler.check()
        return slices

    def write(self, part: Slice) -> None:
        table = part.sequence.table
        assert table is not None and part.end == table.length
        self.prefilled += part.length
        for position in range(part.start, part.end):
            rows = self.memory.setdefault(int(table.slots[position // CHUNK]), [-1] * CHUNK)
            rows[position % CHUNK] = part.sequence.tokens[position]

    def seen(self, sequence: Sequence) -> list[int]:
        table = sequence.table
        assert table is not None
        rows = [token for slot in table.slots.tolist() for token in self.memory[slot]]
        return rows[: table.length]

    def sample(self, sequence: Sequence) -> None:
        sequence.tokens.append(sum(self.seen(sequence)) % 11)
        if len(sequence.tokens) - sequence.prompt_len == self.live[sequence]:
            del self.live[sequence]
            self.scheduler.remove(sequence)

    def abort(self, sequence: Sequence) -> None:
        del self.live[sequence]
        self.scheduler.remove(sequence)

    def finish(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            assert self.step(), "a step without work although there is some"
        assert not self.live, "requests were starved"
        assert self.cache.used == 0


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(11) for _ in range(length)]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run, are aborted, fork and are preempted in a cache that holds but a few of them."""

    harness: Harness

    @initialize(chunks=st.integers(8, 20), budget=st.sampled_from([1, 7, 64, 100, 1000]), shares=st.booleans())
    def start(self, chunks: int, budget: int, shares: bool) -> None:
        self.harness = Harness(chunks, budget, shares=shares)
        self.capacity = chunks * CHUNK

    @rule(
        length=st.integers(1, 300),
        seed=st.integers(0, 1),
        answer=st.integers(1, 150),
        salt=st.sampled_from([None, "a"]),
        n=st.sampled_from([1, 1, 3]),
    )
    def join(self, length: int, seed: int, answer: int, salt: str | None, n: int) -> None:
        """n > 1 forks: sequences with one prompt."""
        answer = min(answer, self.capacity - length)
        for _ in range(n):
            self.harness.add(prompt(length, seed), answer, salt)

    @precondition(lambda self: self.harness.live)
    @rule(steps=st.integers(1, 30))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.step()

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = list(self.harness.live)
        self.harness.abort(live[data.draw(st.integers(0, len(live) - 1))])

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        running = self.harness.scheduler.running
        if running:
            self.harness.scheduler._preempt(running[data.draw(st.integers(0, len(running) - 1))])

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "harness"):
            self.harness.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.finish(20_000)
            self.harness.cache.tree.clear()
            assert self.harness.cache.pool.free == self.harness.cache.pool.total


SchedulerMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = SchedulerMachine.TestCase


def test_long_prompt_leaves_decoding_sequences_their_turn() -> None:
    harness = Harness(chunks=200, budget=64)
    short = harness.add(prompt(10), 50)
    harness.step()
    harness.add(prompt(5000, seed=1), 1)
    for _ in range(40):
        slices = harness.step()
        assert [part.length for part in slices if part.sequence is short] == [1], "decodes at every step"
        assert sum(part.length for part in slices) == 64, "and the prompt takes the rest of the budget"


def test_common_prefix_is_computed_once_by_requests_of_one_step() -> None:
    harness = Harness(chunks=200, budget=8192)
    for index in range(16):
        harness.add(prompt(1984) + [index] * 20, 5)
    assert len(harness.step()) == 16, "all sixteen in the first step"
    assert harness.prefilled == 1984 + 16 * 20
    harness.finish()


def test_common_prefix_is_computed_once_over_many_small_steps() -> None:
    harness = Harness(chunks=200, budget=100)
    for index in range(16):
        harness.add(prompt(1984) + [index] * 20, 1)
    harness.finish()
    assert harness.prefilled == 1984 + 16 * 20


def test_followers_go_on_when_the_writer_is_aborted() -> None:
    harness = Harness(chunks=200, budget=100)
    first, second = harness.add(prompt(1000), 1), harness.add(prompt(1000), 1)
    harness.step()
    harness.abort(first)
    harness.finish()
    assert len(second.tokens) == 1001
    assert harness.prefilled < 1000 + 100 + CHUNK


def test_preemption_takes_the_latest_and_loses_nothing() -> None:
    harness = Harness(chunks=10, budget=1000, shares=False)
    calm = Harness(chunks=100, budget=1000, shares=False)
    sequences = [harness.add(prompt(200, seed), 150) for seed in range(3)]
    truth = [calm.add(prompt(200, seed), 150) for seed in range(3)]
    harness.finish()
    calm.finish()
    assert harness.scheduler.preemptions and not sequences[0].preemptions, "the first was never preempted"
    assert [s.tokens for s in sequences] == [s.tokens for s in truth]


def test_admission_waits_for_room() -> None:
    harness = Harness(chunks=10, budget=10_000)
    for seed in range(4):
        harness.add(prompt(250, seed), 10)
    harness.step()
    assert len(harness.scheduler.running) == 2 and len(harness.scheduler.waiting) == 2
    harness.finish()


def test_limits_on_sequences() -> None:
    harness = Harness(chunks=100, budget=1000, sequences=3)
    for seed in range(9):
        harness.add(prompt(20, seed), 5)
    harness.step()
    assert len(harness.scheduler.running) == 3
    harness.finish()
