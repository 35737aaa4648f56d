"""Turns between tenants and the order within one, as plain data: shares, bounds on lag, nobody starved."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.sequence import SequenceState
from headrace.engine.turns import SHORTER, TURN, TenantLine, Turns, place_in_line
from headrace.types import CHUNK, InvalidRequest, Request, SamplingParams

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


def sequence(order: int, length: int, priority: int = 0, preemptions: int = 0) -> SequenceState:
    made = SequenceState(Request(str(order), [1] * length, SamplingParams(), priority=priority), 0, order)
    made.preemptions = preemptions
    return made


def step(turns: Turns, weights: dict[str, float], budget: int, wanted: dict[str, int]) -> dict[str, int]:
    """What tenants with so many tokens to compute get in a step; all of it is used."""
    turns.begin(weights)
    granted = turns.grants(budget, wanted)
    assert sum(granted.values()) == min(budget, sum(wanted.values())), "something is left idle"
    assert all(0 < count <= wanted[name] for name, count in granted.items())
    for name, count in granted.items():
        turns.charge(name, count)
    return granted


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, budget=st.sampled_from([64, 300, 2048, 8192]), align=st.sampled_from([1, CHUNK, 3 * CHUNK]))
def test_backlogged_tenants_are_never_far_behind_their_share(weights: list[float], budget: int, align: int) -> None:
    """At any time by at most a turn, and the least turn for each other tenant, whatever the weights."""
    names = {str(index): weight for index, weight in enumerate(weights)}
    turns, had, total = Turns(align), dict.fromkeys(names, 0), 0
    least = -(-CHUNK // align) * align
    bound = TURN + least * len(names)
    for _ in range(60):
        for name, count in step(turns, names, budget, dict.fromkeys(names, 10**6)).items():
            had[name] += count
        total += budget
        for name, weight in names.items():
            assert total * weight / sum(weights) - had[name] <= bound


def test_shares_converge_to_the_weights() -> None:
    turns, had = Turns(), dict.fromkeys("abc", 0)
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    for _ in range(1000):
        for name, count in step(turns, weights, 500, dict.fromkeys(weights, 10**6)).items():
            had[name] += count
    assert [had[name] / 500_000 for name in "abc"] == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.002)


@settings(max_examples=60, deadline=None)
@given(wanted=st.lists(st.integers(0, 5000), min_size=1, max_size=6), budget=st.integers(1, 4096))
def test_what_one_leaves_is_lent_to_the_others(wanted: list[int], budget: int) -> None:
    turns = Turns()
    names = {str(index): 1.0 for index in range(len(wanted))}
    granted = step(turns, names, budget, dict(zip(names, wanted, strict=True)))
    fair = budget / len(wanted)
    for name, tokens in zip(names, wanted, strict=True):
        assert granted.get(name, 0) >= min(tokens, fair) - TURN - CHUNK * len(wanted)


def test_idle_tenants_hoard_nothing() -> None:
    """A tenant that comes after another has had the machine to itself begins beside it, not before it."""
    turns = Turns()
    for _ in range(100):
        step(turns, {"a": 1.0}, 2048, {"a": 10**6})
    both = {"a": 1.0, "b": 1.0}
    assert step(turns, both, 2048, dict.fromkeys(both, 10**6)) == {"a": 1024, "b": 1024}


def test_what_was_taken_ahead_of_others_is_not_forgotten_by_pausing() -> None:
    turns, both = Turns(), {"a": 1.0, "b": 1.0}
    assert step(turns, both, 1024, {"a": 256, "b": 10**6}) == {"a": 256, "b": 768}
    step(turns, {"a": 1.0}, 64, {"a": 64})
    assert step(turns, both, 1024, dict.fromkeys(both, 10**6))["a"] > 512, "b is ahead of a, and stays so"


def test_a_short_prompt_is_granted_whole_beside_a_long_backlog() -> None:
    turns, both = Turns(), {"a": 1.0, "b": 1.0}
    for _ in range(10):
        step(turns, {"a": 1.0}, 2048, {"a": 10**6})
        assert step(turns, both, 2048, {"a": 10**6, "b": 100}) == {"a": 1948, "b": 100}


def test_grants_do_not_depend_on_the_order_in_which_tenants_are_named() -> None:
    names = {"x": 1.0, "b": 3.0, "m": 1.0}
    one, other = Turns(), Turns()
    for budget in (100, 700, 2048, 64):
        wanted = dict.fromkeys(names, 3000)
        again = dict(reversed(names.items()))
        assert step(one, names, budget, wanted) == step(other, again, budget, dict(reversed(wanted.items())))
    assert one.order() == other.order()


# -- within a tenant


def line_of(*sequences: SequenceState, patience: int = 1000) -> TenantLine:
    line = TenantLine(patience)
    for each in sequences:
        line.add(each)
    line.check(list(sequences))
    return line


def test_order_within_a_tenant() -> None:
    """Priority, then who gave up its place, then arrival; but a prompt with a quarter of the oldest's tokens passes."""
    long, short, also = sequence(0, 500), sequence(1, 20), sequence(2, 20)
    urgent, late, back = sequence(3, 900, -1), sequence(4, 1, 7), sequence(5, 700, preemptions=1)
    line = line_of(long, short, also, urgent, late, back)
    assert line.waiting == [urgent, back, short, also, long, late]
    line.leave(back)
    assert line.first is urgent and back not in line.waiting
    line.check([long, short, also, urgent, late])
    line.leave(urgent)
    assert line.first is short
    line.leave(short)
    line.leave(also)
    line.add(nearly := sequence(6, 500 // SHORTER + 1))
    assert line.first is long, "nearly is not much shorter, and came later"
    line.add(much := sequence(7, 500 // SHORTER))
    assert line.first is much
    line.check([long, late, nearly, much])


def test_a_half_computed_prompt_is_overtaken_by_much_shorter_ones_alone() -> None:
    line, started = TenantLine(1000), sequence(0, 400)
    assert line.overtakes(sequence(1, 400 // SHORTER), started)
    assert not line.overtakes(sequence(1, 400 // SHORTER + 1), started)
    assert line.overtakes(sequence(1, 4000, -1), started) and not line.overtakes(sequence(1, 1, 1), started)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 200), st.sampled_from([0, 0, -3])), min_size=1, max_size=60),
    patience=st.integers(0, 500),
)
def test_nobody_is_overtaken_for_long(lengths: list[tuple[int, int]], patience: int) -> None:
    """Two long prompts wait while others come: each is overtaken by the patience and one prompt at most."""
    old = [sequence(0, 10_000, 9), sequence(1, 10_000, 9)]
    line, overtaken, order = line_of(*old, patience=patience), 0, 2
    served: list[SequenceState] = []
    for length, priority in lengths:
        line.add(sequence(order, length, priority))
        order += 1
        line.look(())
        first = line.first
        assert first is not None
        line.leave(first)
        line.note(first, len(first.tokens))
        served.append(first)
        oldest = next((each for each in old if each not in served), None)
        overtaken = 0 if first in old else overtaken + len(first.tokens)
        assert oldest is None or overtaken < patience + 200
    assert (
        served == sorted(served, key=lambda each: each is not old[0]) or old[0] not in served or served[0] is not old[0]
    )


def test_the_count_begins_anew_with_the_next_oldest() -> None:
    first, second, third = sequence(0, 500), sequence(1, 400), sequence(2, 10)
    line = line_of(first, second, third, patience=10)
    line.look(())
    assert line.first is third and line.due is None
    line.leave(third)
    line.note(third, 10)
    assert line.due is first and line.first is first and line.in_order([third, first]) == [first, third]
    line.leave(first)
    line.end(first)
    assert line.due is None
    line.look([third])
    assert line.first is second, "third came later than second, which is the oldest now"


def test_in_order_puts_the_least_left_first() -> None:
    some = [sequence(0, 300), sequence(1, 200), sequence(2, 900, -1)]
    assert TenantLine(1000).in_order(some) == [some[2], some[1], some[0]] == sorted(some, key=place_in_line)


@pytest.mark.parametrize(
    ("field", "value"),
    [("tenant", "x" * 257), ("tenant", None), ("weight", 0), ("weight", float("nan")), ("weight", "1"),
     ("priority", 1.5), ("priority", True), ("priority", 2**31), ("priority", None)],
)  # fmt: skip
def test_requests_refuse_what_cannot_say_when_they_have_their_turn(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field) as refused:
        Request("id", [1], SamplingParams(), **{field: value})
    assert refused.value.param == field
