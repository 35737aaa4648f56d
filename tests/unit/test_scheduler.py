"""The scheduler, without a model: budgets, order, preemption, and a Hypothesis state machine over whole requests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.engine.fairness import FairScheduler
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import SequenceState
from headrace.kv.chunk_table import Owners
from headrace.types import CHUNK
from tests.support.scheduler_harness import Harness, prompt


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run, are aborted, fork and are preempted in a cache that holds but a few of them."""

    harness: Harness

    @initialize(
        per_rank=st.integers(8, 20),
        budget=st.sampled_from([1, 7, 64, 100, 1000]),
        shares=st.booleans(),
        ranks=st.sampled_from([1, 1, 2, 4]),
        align=st.sampled_from([1, CHUNK, CHUNK, 10, 2 * CHUNK, 5 * CHUNK]),
        forces=st.booleans(),
        drafts=st.booleans(),
        policy=st.sampled_from([Scheduler, FairScheduler, FairScheduler]),
        places=st.sampled_from([1, 2, 5, 64]),
        copies=st.booleans(),
    )
    def start(
        self, per_rank: int, budget: int, shares: bool, ranks: int, align: int, forces: bool, drafts: bool,
        policy: type[Scheduler], places: int, copies: bool,
    ) -> None:  # fmt: skip
        chunks = max(8, per_rank // ranks * ranks)
        each = max(budget, align), places, shares, ranks, align, forces, drafts, policy, copies
        self.harness = Harness(chunks, *each)
        self.harness.cache.block_chunks = 2
        self.capacity = chunks * CHUNK

    @rule(
        length=st.integers(1, 300),
        seed=st.integers(0, 1),
        answer=st.integers(1, 150),
        salt=st.sampled_from([None, "a"]),
        n=st.sampled_from([1, 1, 3]),
        tenant=st.sampled_from(["", "a", "b"]),
        weight=st.sampled_from([1.0, 1.0, 0.001, 3.0]),
        priority=st.sampled_from([0, 0, -1, 5]),
        public=st.sampled_from([0, 2 * CHUNK]),
    )
    def join(
        self, length: int, seed: int, answer: int, salt: str | None, n: int,
        tenant: str, weight: float, priority: int, public: int,
    ) -> None:  # fmt: skip
        """n > 1 forks: sequences with one prompt."""
        answer = min(answer, self.capacity - length)
        for _ in range(n):
            self.harness.add(prompt(length, seed), answer, salt, tenant, weight, priority, public)

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
    max_examples=40, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
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


def test_drafts_take_what_the_budget_has_beyond_a_token_for_each() -> None:
    steps = []
    for drafts in (False, True):
        harness = Harness(chunks=200, budget=12, drafts=drafts)
        answers = [harness.add(prompt(1, seed), 80) for seed in range(4)]
        harness.step()
        late, count, most = harness.add(prompt(400, seed=9), 1), 0, 0
        while harness.live:
            slices = harness.step()
            count, most = count + 1, max([most, *(part.length for part in slices if part.sequence in answers)])
            waits = late in harness.live and late.remaining > 1
            assert not waits or any(part.sequence is late for part in slices), "a prompt goes on at every step"
        steps.append(count)
        assert (most > 1) == drafts
    assert steps[1] < steps[0]


def test_forced_tokens_are_computed_together_before_prompts() -> None:
    """As many as the budget has for them, a token for each sequence and something for the prompt."""
    harness = Harness(chunks=200, budget=16)
    runs = [harness.add(prompt(1, seed), 60) for seed in range(3)]
    harness.step()
    for sequence in runs[:2]:
        sequence.tokens += [1] * 9
        sequence.forced = True
    late = harness.add(prompt(40, seed=9), 1)
    assert [(part.sequence, part.length) for part in harness.step()] == [
        (runs[2], 1), (runs[0], 10), (runs[1], 4), (late, 1)
    ]  # fmt: skip
    assert [(part.sequence, part.length) for part in harness.step()][-1] == (late, 8)
    harness.finish()


def test_a_held_sequence_is_computed_to_all_but_its_last_token() -> None:
    for align, computed in ((1, 199), (CHUNK, 192)):
        harness = Harness(chunks=200, budget=2048, align=align, ranks=1)
        held, other = harness.add(prompt(200), 5), harness.add(prompt(1), 30)
        held.held = True
        for _ in range(3):
            harness.step()
        assert held.computed == computed and other.n_output == 3
        single = harness.add(prompt(1), 1)
        single.held = True
        harness.step()
        held.held = single.held = False
        harness.finish()


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


@settings(max_examples=30, deadline=None)
@given(
    align=st.sampled_from([1, CHUNK, 3 * CHUNK]),
    spare=st.integers(0, 200),
    lengths=st.lists(st.integers(1, 700), min_size=2, max_size=12),
    shares=st.booleans(),
    ranks=st.integers(1, 4),
    forces=st.booleans(),
)
def test_the_first_prompt_goes_on_at_every_step(
    align: int, spare: int, lengths: list[int], shares: bool, ranks: int, forces: bool
) -> None:
    """However many decode, and however short the prompts that could use what is left of a step. The cache has room."""
    harness = Harness(ranks * 300, align + spare, shares=shares, ranks=ranks, align=align, forces=forces)
    for seed, length in enumerate(lengths):
        harness.add(prompt(length, seed), 20)
    for _ in range(sum(lengths) + 20 * len(lengths)):
        running = harness.scheduler.running
        first = next((s for s in running if s.remaining > 1 and not s.forced), None)
        decoding = [s for s in running if s.remaining == 1 or s.forced]
        served = {part.sequence for part in harness.step()}
        assert first is None or first in served
        assert served.issuperset(decoding)
        if not harness.live:
            break
    assert not harness.live


def test_slices_end_at_multiples_of_align() -> None:
    harness = Harness(chunks=200, budget=200, align=CHUNK, ranks=2)
    long = harness.add(prompt(500), 3)
    harness.add(prompt(30, seed=1), 30)
    late = harness.add(prompt(300, seed=2), 1)
    taken = [[(part.start, part.length) for part in harness.step()] for _ in range(5)]
    assert taken[0] == [(0, 192)], "8 tokens are left, too few to begin another prompt"
    assert taken[1] == [(192, 192)]
    assert taken[2] == [(384, 116), (0, 30)], "54 are left"
    assert taken[3] == [(500, 1), (30, 1), (0, 192)]
    assert taken[4] == [(501, 1), (31, 1), (192, 108)], "the rest need not be a multiple"
    assert long not in harness.live and late not in harness.live
    harness.finish()


def test_prompts_that_wait_for_budget_are_not_overtaken_for_good() -> None:
    """A budget of one chunk takes one sequence at a time; more budget, as many more."""
    harness = Harness(chunks=200, budget=CHUNK, align=CHUNK)
    assert harness.scheduler.max_sequences == 1
    first, second = harness.add(prompt(200), 5), harness.add(prompt(20, seed=1), 5)
    while first in harness.live:
        assert [part.sequence for part in harness.step()] == [first]
    assert [part.sequence for part in harness.step()] == [second]
    assert Harness(chunks=200, budget=CHUNK + 9, align=CHUNK).scheduler.max_sequences == 10
    assert Harness(chunks=200, budget=70).scheduler.max_sequences == 64, "with align 1 a token each is enough"
    harness.finish()


def test_a_prompt_is_skipped_where_less_than_align_is_left_of_the_budget() -> None:
    harness = Harness(chunks=200, budget=2 * CHUNK, align=CHUNK)
    sequence = harness.add(prompt(500), 1)
    harness.step()
    for budget, computed in ((CHUNK - 1, 128), (CHUNK, 192), (2 * CHUNK - 1, 256)):
        harness.scheduler._slices, harness.scheduler._budget = {}, budget
        harness.scheduler._prefill(sequence)
        assert sequence.computed == computed
        assert len(harness.scheduler._slices) == (computed > 128)


def test_a_prompt_waits_where_the_cache_has_less_room_than_align() -> None:
    harness = Harness(chunks=11, budget=200, shares=False, align=2 * CHUNK)
    for seed in range(3):
        harness.add(prompt(63, seed), 20)
    long = harness.add(prompt(350, seed=3), 2)
    for computed in (0, 128, 256, 256, 256):
        harness.step()
        assert long.computed == computed
    assert harness.cache.available == 1, "the rest of 94 tokens has no room in one chunk"
    harness.finish()
    assert not harness.scheduler.preemptions


@pytest.mark.parametrize(("budget", "align", "message"), [(63, 64, "raise max_batch_tokens"), (64, 0, "at least 1")])
def test_refuses_steps_that_hold_no_slice(budget: int, align: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Harness(chunks=10, budget=budget, align=align)


def test_owners_are_asked_for_each_slice() -> None:
    harness = Harness(chunks=400, budget=4096, align=CHUNK, ranks=2)
    asked: list[tuple[int, int, int]] = []

    def last(sequence: SequenceState, start: int, count: int) -> Owners | None:
        asked.append((sequence.order, start, count))
        return (lambda chunk: 1) if sequence.order == 0 else None

    harness.scheduler.owners = last
    first, second = harness.add(prompt(5000), 2), harness.add(prompt(100, seed=1), 2)
    harness.step()
    harness.step()
    assert asked == [(0, 0, 4096), (0, 4096, 904), (1, 0, 100)]
    assert first.table is not None and {first.table.owner(chunk) for chunk in range(79)} == {1}
    assert second.table is not None and second.table.owner(0) == 0, "the cache's own choice: most room"
    harness.finish()
