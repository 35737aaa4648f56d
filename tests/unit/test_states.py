"""Recurrent states in the tree: what is scheduled begins with the state of just the tokens before it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import SequenceState, Slice
from headrace.engine.speculation.verify import confirmed, settle
from headrace.kv.cache import KVCache
from headrace.kv.milestones import INTERVAL
from headrace.kv.table_state import NONE
from headrace.kv.tree import Node
from headrace.types import CHUNK, Request, SamplingParams
from tests.support.states_ahead import StepsMachine, blocks, name_of

pytestmark = pytest.mark.unit


class Steps:
    """A scheduler over states that are the tokens they come from; answers go on with token 3. drafts: sequences that
    decode have drafts, of which some go wrong."""

    def __init__(
        self, chunks: int, budget: int, states: int, shares: bool = True, interval: int = INTERVAL,
        drafts: bool = False,
    ) -> None:  # fmt: skip
        self.drafts, self.random = drafts, random.Random(1)
        self.drafted = self.settled = 0
        self.cache = KVCache(chunks, states=states, state_interval=interval)
        self.scheduler = Scheduler(self.cache, lambda s: self.cache.open(s.tokens, shares=shares), budget, 8)
        self.memory: dict[int, list[int]] = {}
        self.left: dict[SequenceState, int] = {}
        self.prefilled = 0
        self.left_tree = 0
        assert self.cache.states is not None
        self.states = self.cache.states
        self.states.leaving = self._leaves
        self.states._evict = self._evicted(self.states._evict)  # type: ignore[method-assign]

    def _leaves(self, node: Node) -> None:
        """Whoever stores the state at this moment must find it."""
        self.left_tree += 1
        self._check_state(node)

    def _evicted(self, evict: Callable[[int], None]) -> Callable[[int], None]:
        """States at milestones go first."""

        def checked(slot: int) -> None:
            states = self.states
            open_to_all = [each for each in states.idle if each not in states._read | states._written]
            spare = [each for each in open_to_all if each in states.milestones]
            assert slot in states.milestones or not spare, "a prompt's end made room before a milestone"
            evict(slot)

        return checked

    def add(self, prompt: list[int], answer: int) -> SequenceState:
        sequence = SequenceState(Request(str(len(self.left)), prompt, SamplingParams()), 0, self._order())
        self.left[sequence] = answer
        self.scheduler.add(sequence)
        return sequence

    def _order(self) -> int:
        return max((each.order for each in self.left), default=0) + 1

    def step(self) -> None:
        for sequence in self.scheduler.running:
            if self.drafts and sequence.n_output and (sequence.remaining == 1 or sequence.forced):
                self._draft(sequence)
        slices = self.scheduler.schedule()
        for part in slices:
            self._compute(part)
        self.cache.commit()
        for part in slices:
            if part.samples:
                self._draw(part.sequence)
        self.check()

    def _draft(self, sequence: SequenceState) -> None:
        """Up to 40 tokens, all right or with a wrong one."""
        sequence.draft = [3] * self.random.choice([0, 1, 2, 5, 40])
        if sequence.draft and self.random.random() < 0.5:
            sequence.draft[self.random.randrange(len(sequence.draft))] = 4

    def _compute(self, part: Slice) -> None:
        table, tokens, at = part.sequence.table, part.sequence.tokens, part.start
        assert table is not None
        known = tokens + part.sequence.draft
        for end, source, target in table.track.segments:
            assert (self.memory[source] if source != NONE else []) == known[:at], "begins with another state"
            self.memory[target], at = known[:end], end
        assert at == part.end, "the segments are not the slice"
        self.prefilled += part.length
        self.drafted += part.drafted

    def _draw(self, sequence: SequenceState) -> None:
        while True:
            self.left[sequence] -= 1
            sequence.tokens.append(3)
            if self.left[sequence] <= 0 or not confirmed(sequence):
                break
        if sequence.draft:
            self.settled += settle(sequence, self.cache)
            if sequence.table is not None:
                state = sequence.table.track.slot
                assert self.memory[state] == sequence.tokens[: sequence.computed], "a wrong token is in a state"
        if self.left[sequence] <= 0:
            self.scheduler.remove(sequence)
            del self.left[sequence]

    def check(self) -> None:
        self.scheduler.check()
        for node in self.cache.tree.nodes.values():
            if node.state != NONE:
                self._check_state(node)

    def _check_state(self, node: Node) -> None:
        tokens = self.memory[node.state]
        assert len(tokens) % CHUNK == 0 and name_of(self.cache, tokens) == node.digest

    def finish(self) -> None:
        while self.left:
            self.step()


class StatesMachine(StepsMachine):
    @initialize(
        chunks=st.integers(9, 20),
        budget=st.sampled_from([8, 64, 100, 1000]),
        states=st.sampled_from([1, 2, 3, 5, 20]),
        shares=st.sampled_from([True, True, True, False]),
        interval=st.sampled_from([INTERVAL, CHUNK, 2 * CHUNK]),
        drafts=st.booleans(),
    )
    def start(self, chunks: int, budget: int, states: int, shares: bool, interval: int, drafts: bool) -> None:
        self.steps = Steps(chunks, budget, states, shares, interval, drafts)

    @rule(
        blocks=st.lists(st.integers(0, 1), max_size=5),
        tail=st.integers(1, CHUNK),
        answer=st.sampled_from([1, 3, 140]),
        twice=st.booleans(),
    )
    def add(self, blocks: list[int], tail: int, answer: int, twice: bool) -> None:
        prompt = [token for block in blocks for token in [block] * CHUNK] + [3] * tail
        for _ in range(1 + twice):
            self.steps.add(prompt, answer)

    @precondition(lambda self: self.steps.left)
    @rule(count=st.sampled_from([1, 1, 2, 70]))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.steps.step()

    @precondition(lambda self: self.steps.left)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.steps.left, key=lambda each: each.order)))
        self.steps.scheduler.remove(sequence)
        del self.steps.left[sequence]

    @rule()
    def forget(self) -> None:
        self.steps.cache.tree.clear()


TestStatesMachine = StatesMachine.TestCase
TestStatesMachine.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


def test_a_state_where_the_prompt_ends() -> None:
    steps = Steps(40, 1000, 8)
    steps.add(blocks(1, 2, 3), 1)
    steps.finish()
    again = steps.add(blocks(1, 2, 3), 1)
    steps.finish()
    assert again.cached_tokens == 3 * CHUNK and steps.prefilled == 3 * CHUNK + 5 + 5


def test_a_state_where_branches_part() -> None:
    """Of the first prompt nothing is kept there; the second finds keys and values, is computed all the same, and keeps
    a state there for the third."""
    steps = Steps(40, 1000, 8)
    found = []
    for last in (3, 4, 5):
        found.append(steps.add(blocks(1, 2, last), 1))
        steps.finish()
    assert [each.cached_tokens for each in found] == [0, 0, 2 * CHUNK]


def test_a_state_is_asked_for_in_the_step_that_passes_it() -> None:
    steps = Steps(40, 1000, 8)
    for last in (3, 4, 5):
        steps.add(blocks(1, 2, last), 1)
    steps.finish()
    assert steps.prefilled == 2 * CHUNK + 3 * (CHUNK + 5)


def test_an_answer_keeps_its_latest_state_alone() -> None:
    steps = Steps(40, 1000, 8)
    steps.add(blocks(1), 300)
    steps.finish()
    states = steps.cache.states
    assert states is not None and states.kept == 2
    assert sorted(len(steps.memory[slot]) for slot in states.idle) == [64, 320]


def test_states_that_are_needed_take_the_place_of_kept_ones() -> None:
    steps = Steps(40, 1000, 2)
    for first in range(4):
        steps.add(blocks(first, first), 80)
        steps.finish()
    assert steps.cache.states is not None and steps.cache.states.evictions > 0
    assert steps.left_tree > 0


def test_no_states_are_kept_where_nothing_is_shared() -> None:
    steps = Steps(40, 1000, 8, shares=False)
    steps.add(blocks(1, 2), 200)
    steps.finish()
    assert steps.cache.states is not None and steps.cache.states.kept == 0


def test_there_is_at_least_one_state() -> None:
    with pytest.raises(ValueError, match="at least one state, got 0"):
        KVCache(4, states=0)


def test_a_late_state_takes_no_slot_of_its_step() -> None:
    """Four states: one that the second request goes on from in this very step, two of the first, one of the second."""
    steps = Steps(40, 1000, 4)
    steps.add(blocks(7), 1)
    steps.finish()
    steps.add(blocks(1, 2, 3), 1)
    second, third = steps.add(blocks(7, tail=9), 1), steps.add(blocks(1, 2, 5), 1)
    steps.step()
    assert second.cached_tokens == CHUNK and third.cached_tokens == 0


def test_a_hit_beyond_the_last_state_is_cut_back_to_it() -> None:
    steps = Steps(40, 1000, 8)
    for prompt in (blocks(1), blocks(1, 2, 3)):
        steps.add(prompt, 1)
        steps.finish()
    third = steps.add(blocks(1, 2, 5), 1)
    steps.finish()
    assert third.cached_tokens == CHUNK


def test_a_borrowed_slot_is_none_that_the_step_names() -> None:
    """It is written to before the step is computed, which still reads what its segments begin with."""
    steps = Steps(40, 1000, 3)
    steps.add(blocks(7), 1)
    steps.finish()
    states = steps.cache.states
    assert states is not None
    steps.add(blocks(7, tail=9), 1)
    (part,) = steps.scheduler.schedule()
    assert part.sequence.table is not None
    named = {slot for each in part.sequence.table.track.segments for slot in each[1:]}
    borrowed = states.borrow()
    assert borrowed is not None and borrowed not in named and states.borrow() is None
    states.give_back(borrowed)


def test_a_draft_takes_a_state_that_no_sequence_needs() -> None:
    """Three of four are held, and one sequence at a time has a draft; of three, none."""
    most = []
    for states in (3, 4, 8):
        steps = Steps(40, 1000, states, drafts=True)
        steps.random.choice = lambda seen: 5  # type: ignore[method-assign, assignment]
        for first in range(3):
            steps.add(blocks(first), 60)
        steps.step()
        steps.step()
        most.append(steps.drafted)
        steps.finish()
    assert most == [0, 5, 15]


@pytest.mark.parametrize("right", [False, True], ids=["some-wrong", "all-right"])
def test_an_answer_of_drafts_keeps_its_latest_state(right: bool) -> None:
    """A draft ends with its chunk, so the state behind the chunk is there."""
    steps = Steps(40, 1000, 8, drafts=True)
    if right:
        steps.random.choice = lambda seen: 40  # type: ignore[method-assign, assignment]
        steps.random.random = lambda: 1.0  # type: ignore[method-assign]
    steps.add(blocks(1), 300)
    steps.finish()
    assert steps.settled > 100
    assert sorted(len(steps.memory[slot]) for slot in steps.states.idle) == [64, 320]


def test_a_slot_that_is_used_again_in_its_step_is_not_kept_for_what_it_was() -> None:
    """Five slots: that of a state whose chunk has no name yet makes room for another such, of the same step."""
    steps = Steps(9, 1000, 5)
    for chunks in (*[0] * 8, *[1] * 4, 2):
        steps.add([0] * CHUNK * chunks + [3], 1)
    steps.finish()


def halvings(number: int) -> int:
    """How often 2 divides it."""
    return 0 if number % 2 else 1 + halvings(number // 2)


def milestones_of(steps: Steps) -> list[int]:
    return sorted(len(steps.memory[slot]) for slot in steps.states.milestones)


@settings(max_examples=60, deadline=None)
@given(
    chunks=st.integers(1, 24), states=st.integers(2, 16), every=st.integers(1, 3),
    budget=st.sampled_from([CHUNK, 100, 5 * CHUNK, 2000]),
)  # fmt: skip
def test_milestones_are_as_many_as_there_is_room_for_at_even_distances(
    chunks: int, states: int, every: int, budget: int
) -> None:
    """The end of the prompt has its state in any case, and what is not kept weighs no more than what is."""
    steps = Steps(40, budget, states, interval=every * CHUNK)
    steps.add([chunk for chunk in range(chunks) for _ in range(CHUNK)] + [99] * 5, 1)
    steps.finish()
    ends, found = chunks * CHUNK, milestones_of(steps)
    assert ends in [len(steps.memory[slot]) for slot in steps.states.idle]
    every_one = [mark for mark in range(every * CHUNK, ends, every * CHUNK)]
    first = every * CHUNK
    missed = [halvings(mark // first) for mark in every_one if mark not in found]
    assert set(found) <= set(every_one)
    assert len(found) >= min(len(every_one), states - 2), (found, every_one)
    assert max(missed, default=0) <= min((halvings(mark // first) for mark in found), default=99), (found, missed)


def test_a_prompt_that_shares_the_first_part_begins_at_a_milestone() -> None:
    steps = Steps(40, 1000, 8, interval=2 * CHUNK)
    document = blocks(*range(1, 10))
    steps.add(document, 1)
    steps.finish()
    other = steps.add(document[: 5 * CHUNK + 10] + [77] * 100, 1)
    steps.finish()
    assert other.cached_tokens == 4 * CHUNK


def test_milestones_make_room_before_ends_of_prompts() -> None:
    steps = Steps(60, 1000, 6, interval=CHUNK)
    for first in (20, 30, 40, 50):
        steps.add(blocks(*range(first, first + 8)), 1)
        steps.finish()
    kept = sorted(len(steps.memory[slot]) for slot in steps.states.idle if slot not in steps.states.milestones)
    assert kept == [8 * CHUNK] * 4 and milestones_of(steps)


def test_a_milestone_where_a_prompt_ends_is_kept_like_any_end() -> None:
    steps = Steps(40, 1000, 8, interval=2 * CHUNK)
    steps.add(blocks(1, 2, 3, 4, 5), 1)
    steps.finish()
    assert milestones_of(steps) == [2 * CHUNK, 4 * CHUNK]
    steps.add(blocks(1, 2), 1)
    steps.finish()
    assert milestones_of(steps) == [4 * CHUNK]
