"""Recurrent states while the host plans a step behind one that is under way: no chunk is said to have a state that
nobody has written, whatever becomes of the plan."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from headrace.kv.milestones import INTERVAL
from headrace.kv.tree import Node
from headrace.types import CHUNK
from tests.support.states_ahead import RIGHT, StepsAhead, StepsMachine, blocks

pytestmark = pytest.mark.unit


class AheadMachine(StepsMachine):
    @initialize(
        chunks=st.integers(9, 20), budget=st.sampled_from([8, 64, 100, 1000]), states=st.sampled_from([1, 2, 3, 5, 20]),
        interval=st.sampled_from([INTERVAL, CHUNK, 2 * CHUNK]),
    )  # fmt: skip
    def start(self, chunks: int, budget: int, states: int, interval: int) -> None:
        self.steps = StepsAhead(chunks, budget, states)
        self.steps.states.milestones.interval = interval

    @rule(
        blocks=st.lists(st.integers(0, 1), max_size=5), tail=st.integers(1, CHUNK),
        answer=st.sampled_from([1, 3, 140]), twice=st.booleans(),
    )  # fmt: skip
    def add(self, blocks: list[int], tail: int, answer: int, twice: bool) -> None:
        prompt = [token for block in blocks for token in [block] * CHUNK] + [RIGHT] * tail
        for _ in range(1 + twice):
            self.steps.add(prompt, answer)

    @precondition(lambda self: self.steps.scheduler.has_work)
    @rule(
        count=st.sampled_from([1, 1, 2, 70]), refuses=st.booleans(),
        unsure=st.sampled_from([-1, -1, 0, 1]), stops=st.sampled_from([-1, -1, 0, 1]),
    )  # fmt: skip
    def step(self, count: int, refuses: bool, unsure: int, stops: int) -> None:
        """refuses: the step behind is planned at most."""
        device = self.steps.device
        for number in range(count):
            last = number == count - 1
            device.refuses, device.unsure = refuses and last, unsure if last else -1
            self.steps.step(stops if last else -1)
        device.refuses, device.unsure = False, -1

    @precondition(lambda self: self.steps.left)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.steps.abort(data.draw(st.sampled_from(sorted(self.steps.left, key=lambda each: each.order))))

    @rule()
    def forget(self) -> None:
        self.steps.cache.tree.clear()

    @rule()
    def borrow(self) -> None:
        """Something is written into a slot at once, as a state that is read from a file."""
        slot = self.steps.states.borrow()
        if slot is not None:
            self.steps.device.memory[slot] = [99]
            self.steps.states.give_back(slot)

    @rule()
    def commit(self) -> None:
        """Of a session's chunks, between two steps."""
        self.steps.cache.commit()


TestAheadMachine = AheadMachine.TestCase
TestAheadMachine.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "waited-for"])
def test_an_answer_keeps_its_latest_state_alone(ahead: bool) -> None:
    """All steps but the first are ahead. The token that fills a chunk is not known when its step is planned."""
    steps = StepsAhead(40, 1000, 8, ahead)
    steps.add(blocks(1), 300)
    while steps.left:
        steps.step()
        steps.check()
    steps.finish()
    assert steps.ends() == [64, 320] and steps.device.ahead == (299 if ahead else 0)


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "waited-for"])
def test_an_answer_that_stops_as_it_fills_a_chunk_keeps_its_state_before(ahead: bool) -> None:
    """The row that would fill the chunk is computed in vain, if at all."""
    steps = StepsAhead(40, 1000, 8, ahead)
    first = steps.add(blocks(1), 300)
    while len(first.tokens) < 3 * CHUNK - 1:
        steps.step()
    steps.step(stops=0)
    steps.finish()
    assert len(first.tokens) == 3 * CHUNK and steps.ends() == [64, 128]
    again = steps.add([*first.tokens, 9], 1)
    steps.finish()
    assert again.cached_tokens == 128


def test_a_prompt_that_is_planned_and_not_launched_leaves_no_state() -> None:
    """Until it is launched nobody is told of its states, either; of what is computed they are."""
    steps = StepsAhead(40, 1000, 8)
    first = steps.add(blocks(1), 99)
    steps.step()
    steps.device.refuses = True
    second = steps.add(blocks(2, 3), 9)
    steps.step()
    assert second.table is not None and second.table.nodes[1].state >= 0 and len(steps.states.nodes()) == 1
    steps.abort(second)
    steps.step()
    steps.device.refuses = False
    third = steps.add(blocks(2, 3, 4), 1)
    steps.finish()
    assert third.cached_tokens == 0 and not steps.left and first.n_output == 99


def test_a_step_all_of_whose_rows_are_in_vain_takes_no_segments_of_others() -> None:
    """A prompt that was computed for nobody is found by the next one, which parts from it where it has no state."""
    steps = StepsAhead(40, 1000, 8)
    first = steps.add(blocks(1), 99)
    steps.step()
    second = steps.add(blocks(2, 3, 4), 9)
    steps.step()
    assert second.table is not None and second.table.length == 3 * CHUNK + 5
    steps.abort(first)
    steps.abort(second)
    third = steps.add(blocks(2, 3, 5), 1)
    steps.finish()
    assert third.cached_tokens == 0 and steps.ends() == [CHUNK, 2 * CHUNK, 3 * CHUNK, 3 * CHUNK]


def test_a_state_without_a_name_yet_is_taken_back_by_the_step_behind() -> None:
    """There is one: an answer fills its chunk, and goes on in place, so the chunk has no state when it has its name."""
    steps = StepsAhead(40, 1000, 1)
    first = steps.add(blocks(1), 99)
    while first in steps.left:
        steps.step()
        steps.check()
    steps.finish()
    assert steps.ends() == [] and steps.device.ahead == 98


def test_what_a_step_under_way_leaves_is_gone_on_from_behind_it() -> None:
    """The second prompt begins with the state that the first one's last slice is still to leave."""
    steps = StepsAhead(40, 1000, 8)
    steps.add(blocks(1), 99)
    steps.step()
    steps.add(blocks(2, 3), 9)
    steps.step()
    second = steps.add(blocks(2, 3, tail=9), 9)
    steps.step()
    assert second.cached_tokens == 2 * CHUNK and steps.device.ahead == 3
    steps.finish()


def test_nobody_is_told_of_a_state_that_its_own_step_evicts() -> None:
    """Three slots, two of which each prompt takes in the same step."""
    steps = StepsAhead(40, 1000, 3)
    steps.add(blocks(1, 2), 1)
    steps.add(blocks(3, 4), 1)
    steps.finish()
    assert steps.states.evictions == 1 and steps.ends() == [2 * CHUNK]


def test_a_state_in_memory_that_makes_room_is_told_of_with_its_own_numbers() -> None:
    """As each of three slots is taken by the next prompt, a step planned ahead of one under way."""
    steps, told = StepsAhead(40, 1000, 3), list[int]()

    def leaves(node: Node) -> None:
        steps.check_state(node)
        told.append(node.state)

    steps.states.leaving = leaves
    steps.add(blocks(1), 200)
    for number in range(2, 9):
        steps.step()
        steps.add(blocks(number), 1)
        steps.step()
        steps.step()
    steps.finish()
    assert len(told) > 5
