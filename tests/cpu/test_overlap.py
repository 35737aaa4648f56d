"""The host one step ahead of a device that is late (tests.support.delayed_device): the answers are those without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is built for Linux only")

from torch import Tensor

from headrace import LLM, device
from headrace.engine.below import NothingBelow
from headrace.engine.core import EngineCore
from headrace.engine.fairness import FairScheduler
from headrace.engine.sequence import SequenceState, Slice
from headrace.kernels import step_copies
from headrace.kernels.step_copies import Reading
from headrace.types import CHUNK, Structured
from tests.support.delayed_device import delayed_device
from tests.support.overlap_client import CHUNKS, GREEDY, Client, compare, prompt
from tests.support.stream_order import StreamOrder
from tests.support.token_machine import machine_engine


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", kv_cache_tokens=1024)


def test_all_but_the_first_step_are_launched_ahead(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those behind the prompts too, 19 in all; two of three sequences end meanwhile, one enters a chunk. The third's
    logits are changed before its tokens are chosen, and listed log probabilities are reported."""
    found = {}
    for ahead in (True, False):
        with delayed_device(monkeypatch) as late:
            client = Client(machine_engine(llm, late, CHUNKS, ahead))
            client.add("a", prompt(1, 61), max_tokens=20, **GREEDY)
            client.add("b", prompt(2, 9), max_tokens=12, temperature=0.7, seed=3, ignore_eos=True)
            changed = {"presence_penalty": 1.5, "logit_bias": {7: 5.0}, "min_tokens": 6, "logprob_token_ids": [7, 8]}
            client.add("c", prompt(3, 9), max_tokens=12, **changed, **GREEDY)
            client.finish()
        found[ahead] = client.answers, set(client.core.cache.tree.nodes)
        assert (client.machine.ahead, late.most_ahead) == ((19, 2) if ahead else (0, 0))
    assert found[True] == found[False] and len(found[True][1]) == 1, "the chunk that was filled has its name"


def test_a_sequence_that_stops_keeps_its_chunk_while_a_step_writes_into_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four chunks one sequence takes the last one for the step that is in vain for another; the third needs one more
    for the step behind it."""
    found = {}
    for ahead, stops in ((False, ()), (False, None), (True, None)):
        with delayed_device(monkeypatch) as late:
            client = Client(machine_engine(llm, late, 4, ahead))
            client.add("a", prompt(1, 61), max_tokens=20, **GREEDY)
            client.add("c", prompt(3, 62), max_tokens=20, **GREEDY)
            third = found[False]["b", 0].tokens[2:3] if stops is None else []
            client.add("b", prompt(2, 9), max_tokens=4, stop_token_ids=third, **GREEDY)
            client.finish()
        found[ahead] = client.answers
    assert found[True] == found[False] and len(found[True]["b", 0].tokens) == 3


def test_what_the_device_is_not_sure_of_the_host_chooses(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the tokens. A step behind one of them, of a token that is wrong, is under way meanwhile."""
    found = {}
    for ahead in (True, False):
        with delayed_device(monkeypatch) as late:
            client = Client(machine_engine(llm, late, CHUNKS, ahead, unsure=True))
            for name in "abc":
                client.add(name, prompt(ord(name), 30), max_tokens=40, temperature=1.0, seed=2, ignore_eos=True)
            client.finish()
            assert bool(client.core.stats().scheduler.preemptions) == ahead and (client.machine.ahead > 9) == ahead
        found[ahead] = client.answers
    assert found[True] == found[False]


def test_a_prompt_that_comes_is_read_ahead(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """By four slices beside a sequence that decodes, while another one begins like it; both then go on by first tokens
    that only the device knows. No step but the first is waited for."""
    found = {}
    for ahead in (True, False):
        with delayed_device(monkeypatch) as late:
            client = Client(machine_engine(llm, late, CHUNKS, ahead, max_batch_tokens=65))
            client.add("a", prompt(1, 60), max_tokens=20, **GREEDY)
            for _ in range(3):
                client.step()
            client.add("b", prompt(2, 100, 130), max_tokens=5, temperature=0.8, seed=1, ignore_eos=True)
            client.add("c", prompt(3, 4, 130), max_tokens=5, **GREEDY)
            client.finish()
        taken = client.core.stats().scheduler.steps
        found[ahead] = client.answers, set(client.core.cache.tree.nodes), client.core.stats().tokens.cached
        assert (client.machine.ahead, client.machine.mixed) == ((taken - 1, 4) if ahead else (0, 0))
    assert found[True] == found[False] and found[True][2] == 2 * CHUNK


def test_a_planned_step_that_is_not_launched_leaves_no_unwritten_chunk(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is planned in a step that the device refuses, and aborted before it runs: whoever begins like it next
    finds nothing of it."""
    found = {}
    for ahead in (True, False):
        with delayed_device(monkeypatch) as late:
            client = Client(machine_engine(llm, late, CHUNKS, ahead))
            client.add("a", prompt(1, 5), max_tokens=20, **GREEDY)
            client.step()
            client.step()
            client.add("b", prompt(2, 9, 64), max_tokens=2, **GREEDY)
            with monkeypatch.context() as refusing:
                refusing.setattr(client.machine, "launch", lambda *given: None)
                client.step()
            client.abort("b")
            client.add("c", prompt(2, 9, 64), max_tokens=2, **GREEDY)
            client.finish()
            assert client.machine.mixed == ahead
        found[ahead] = client
    compare(found[True], found[False])


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_who_has_to_give_way_does_so_soon(policy: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences outgrow the pool long before their ends, while a third one waits. Steps ahead preempt nobody: one
    is waited for."""
    found = {}
    for ahead in (True, False):
        with delayed_device(monkeypatch) as late:
            client = Client(machine_engine(llm, late, 6, ahead, scheduling_policy=policy, max_batch_tokens=80))
            client.add("a", prompt(1, 60), max_tokens=200, **GREEDY)
            client.add("b", prompt(2, 60), max_tokens=200, **GREEDY)
            client.add("c", prompt(3, 200), max_tokens=9, **GREEDY)
            while client.core.has_work and not client.core.stats().scheduler.preemptions:
                client.step()
            assert not client.answers["a", 0].end
            client.finish()
            assert client.machine.ahead > 200 or not ahead
        found[ahead] = client.answers
    assert found[True] == found[False]


class Losing(NothingBelow):
    """Once, when a sequence has two tokens, the chunk behind its first one was on its way, and is lost."""

    lost = 0

    def coming(self, sequence: SequenceState) -> int:
        return 0 if self.lost or sequence.n_output != 2 else CHUNK

    def confirm(self, slices: Sequence[Slice]) -> set[SequenceState]:
        gone = {part.sequence for part in slices if self.coming(part.sequence)}
        for sequence in gone:
            assert sequence.table is not None
            self.cache.truncate(sequence.table, 1)
        self.lost += len(gone)
        return gone


def test_nothing_is_launched_behind_chunks_that_may_not_come(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that has come back with one token left to compute: its table is cut when that step has ended."""
    found = {}
    for ahead in (True, False):
        with delayed_device(monkeypatch) as late:
            client = Client(machine_engine(llm, late, CHUNKS, ahead))
            core = client.core
            core.below = core.scheduler.below = below = Losing(core.cache)
            client.add("a", prompt(1, 70), max_tokens=12, **GREEDY)
            core.overlap.on = False
            while len(client.answers["a", 0].tokens) < 2:
                client.step()
            core.overlap.on = ahead
            client.finish()
            assert below.lost == 1 and bool(client.machine.ahead) == ahead
        found[ahead] = client.answers
    assert found[True] == found[False]


class Looked(NothingBelow):
    """Looks for stored chunks of a sequence for three steps, none of which is planned ahead."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core.cache)
        self.core, self.asked = core, Counter[SequenceState]()

    def until(self, sequence: SequenceState, alone: bool) -> int:
        assert not self.core.scheduler.ahead or self.settled(sequence), "it may attach what is on its way"
        self.asked[sequence] += 1
        return len(sequence.tokens) if self.settled(sequence) else sequence.computed

    def settled(self, sequence: SequenceState) -> bool:
        return self.asked[sequence] > 3


def test_what_may_be_stored_is_looked_for_by_steps_that_are_waited_for(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for ahead in (True, False):
        with delayed_device(monkeypatch) as late:
            client = Client(machine_engine(llm, late, CHUNKS, ahead))
            core = client.core
            core.below = core.scheduler.below = Looked(core)
            client.add("a", prompt(1, 70), max_tokens=12, **GREEDY)
            while len(client.answers["a", 0].tokens) < 2:
                client.step()
            client.add("b", prompt(2, 70), max_tokens=12, **GREEDY)
            client.finish()
            assert bool(client.machine.ahead) == ahead
        found[ahead] = client.answers
    assert found[True] == found[False]


def test_an_ended_sequence_takes_no_share(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the step is under way that computes its row in vain, and a prompt beside it, of which alone is told."""
    with delayed_device(monkeypatch) as late:
        client, told = Client(machine_engine(llm, late, CHUNKS, ahead=True)), set[str]()
        core = client.core
        core.on_prefill = lambda prompts, seconds: told.update(each.request_id for each in prompts)
        client.add("a", prompt(1, 5), tenant="x", max_tokens=20, **GREEDY)
        client.add("b", prompt(2, 7), tenant="y", max_tokens=20, **GREEDY)
        for number in range(4):
            if number == 3:
                client.add("c", prompt(3, 70), tenant="x", max_tokens=2, **GREEDY)
            client.step()
        client.abort("b")
        assert len(core.scheduler.running) == 3 and late.steps == 1
        assert not core.shares.is_live("b") and core.shares.is_live("a")
        assert isinstance(core.scheduler, FairScheduler) and set(core.scheduler._held()) == {"x"}
        client.step()
        assert told == {"c"}
        client.finish()


KINDS: tuple[dict[str, Any], ...] = (
    GREEDY,
    {"temperature": 0.0},
    {"temperature": 1.3, "seed": 1, "n": 2},
    {"temperature": 0.8, "top_p": 0.9, "min_tokens": 5},
    {"temperature": 0.0, "stop": ["e", "th"]},
    {"temperature": 0.9, "seed": 4, "frequency_penalty": 0.5},
    {"temperature": 0.0, "n": 2, "repetition_penalty": 1.7, "min_tokens": 9},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "logit_bias": {7: 9.0, 99: -9.0}, "logprob_token_ids": (7, 99)},
    {"temperature": 1.0, "seed": 2, "stop_token_ids": list(range(0, 2300, 7))},
)
"""Parameters of requests."""


@dataclass(frozen=True)
class Event:
    """What happens before a step: an abort of an earlier request, or a new one."""

    step: int
    aborts: int
    kind: int
    length: int
    shared: int
    answer: int
    tenant: str
    priority: int


events = st.builds(
    Event, st.integers(0, 60), st.integers(-12, 3), st.integers(0, len(KINDS) - 1), st.integers(1, 150),
    st.sampled_from([0, 0, 64, 70, 130]), st.integers(9, 70), st.sampled_from(["", "x"]), st.integers(0, 1),
)  # fmt: skip


def play(core: EngineCore, planned: list[Event]) -> Client:
    client, step = Client(core), 0
    for number, event in enumerate(sorted(planned, key=lambda each: each.step)):
        while step < event.step:
            client.step()
            step += 1
        if event.aborts >= 0:
            client.abort(str(event.aborts))
            continue
        known = prompt(number, event.length, event.shared)
        params = {**KINDS[event.kind], "max_tokens": event.answer}
        client.add(str(number), known, event.tenant, event.priority, **params)
    client.finish()
    return client


@given(
    planned=st.lists(events, min_size=1, max_size=8), chunks=st.sampled_from([6, 9, 40]),
    policy=st.sampled_from(["fair", "fcfs"]), sequences=st.sampled_from([2, 5]), wild=st.booleans(),
    haste=st.sampled_from([0.0, 0.3]), states=st.sampled_from([None, 2, 5, 20]),
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_answers_are_those_without(
    llm: LLM, planned: list[Event], chunks: int, policy: str, sequences: int, wild: bool, haste: float,
    states: int | None,
) -> None:  # fmt: skip
    """Stops, aborts, preemption, shared prefixes, tenants, priorities, penalties, seeds. wild: some steps are refused,
    and some tokens left to the host. haste: how often the device is not late. states: recurrent ones."""
    given = {"scheduling_policy": policy, "max_sequences": sequences, "max_batch_tokens": 128, "states": states}
    with pytest.MonkeyPatch.context() as patch, delayed_device(patch, haste) as late:
        ahead = play(machine_engine(llm, late, chunks, True, refuses=wild, unsure=wild, **given), planned)
        compare(ahead, play(machine_engine(llm, late, chunks, False, **given), planned))


def test_the_host_waits_for_steps_of_an_answer_with_a_shape(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the steps before it, and behind it, it does not. What waits for a place begins when one is free."""
    found = {}
    for ahead in (True, False):
        with delayed_device(monkeypatch) as late:
            client = Client(machine_engine(llm, late, CHUNKS, ahead, max_sequences=2))
            client.add("a", prompt(1, 5), max_tokens=40, **GREEDY)
            for _ in range(5):
                client.step()
            before = client.machine.ahead
            shape = Structured(choice=("Lisbon", "Porto"))
            client.add("b", prompt(2, 5), max_tokens=9, temperature=0.0, structured=shape)
            client.add("c", prompt(3, 5), max_tokens=12, **GREEDY)
            client.await_grammars()
            while not client.answers["b", 0].end:
                client.step()
            assert (before, client.machine.ahead) == ((5, 5) if ahead else (0, 0))
            client.finish()
            assert client.machine.ahead > 15 or not ahead
        found[ahead] = client.answers
    assert found[True] == found[False] and found[True]["b", 0].text in ("Lisbon", "Porto")


def test_an_engine_left_alone_holds_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort of all that there is, with a step under way."""
    with delayed_device(monkeypatch) as late:
        client = Client(machine_engine(llm, late, CHUNKS, ahead=True))
        client.add("a", prompt(1, 61), max_tokens=20, **GREEDY)
        for _ in range(4):
            client.step()
        assert late.steps == 1 and client.core.has_work
        client.abort("a")
        assert not late.steps and not client.core.has_work and not client.core.cache.used


class Ordered(StreamOrder):
    """Keeps a record of what the machine's steps do, which is done at once."""

    steps = 0

    @staticmethod
    def give(work: Callable[[], object]) -> None:
        work()

    begin = give


NEEDED = ("wait in waited", "synchronize")
"""For a step's results."""


def ordered(llm: LLM, patch: pytest.MonkeyPatch, dropped: tuple[str, str] | None = None) -> Ordered:
    """Some steps ahead, with the host's memory watched that copies pass through."""
    order = Ordered(dropped)
    fill, wait = step_copies.fill, Reading.wait

    def filled(room: Tensor, values: Tensor) -> None:
        order.host(room.numpy(), writes=True)
        fill(room, values)

    def waited(self: Reading) -> Tensor:
        found = wait(self)
        order.host(found.numpy(), writes=False)
        return found

    patch.setattr(step_copies, "fill", filled)
    patch.setattr(Reading, "wait", waited)
    with device.use(order), order.recording():
        client = Client(machine_engine(llm, order, CHUNKS, ahead=True))
        client.add("a", prompt(1, 62), max_tokens=6, **GREEDY)
        client.finish()
        assert client.machine.ahead == 5
    return order


def test_host_memory_is_left_alone_while_the_device_is_at_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    order = ordered(llm, monkeypatch)
    assert NEEDED in order.seen and not order.violations


def test_a_dropped_wait_is_found(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ordered(llm, monkeypatch, dropped=NEEDED).violations
