"""How plans become work for a GPU: every row meets its chunks, each once, from left to right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.attention.plan import Plan, Span, batch_order, build
from headrace.kernels.triton.tile_schedule import SPAN, SPAN_CHUNKS, Bounds, TileSchedule, cut, run_edges
from headrace.types import CHUNK

GROUPS = st.sampled_from([1, 4, 7, 48, 64])
LANES = st.sampled_from([64, 128])
BOUNDS = st.builds(
    Bounds,
    GROUPS,
    st.sampled_from([0, 5, 40, 1 << 20]),
    st.sampled_from([0, 3, 1 << 20]),
    LANES,
    st.sampled_from([32, 64]),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Sequences over a random tree whose paths cross several spans; some decode, some prefill, some share what they
    write."""
    names: dict[tuple[int, ...], int] = {}
    spans = []
    for index in range(draw(st.integers(1, 5))):
        path: tuple[int, ...] = ()
        for _ in range(draw(st.integers(0, 3))):
            path += (draw(st.integers(0, 1)),) * draw(st.integers(1, SPAN_CHUNKS + 1))
        private = path + (100 + index,) * draw(st.integers(1, 4))
        slots = [names.setdefault(private[: n + 1], len(names)) for n in range(len(private))]
        end = (len(slots) - 1) * CHUNK + draw(st.integers(1, CHUNK))
        count = draw(st.one_of(st.just(1), st.integers(1, 20), st.integers(1, end)))
        spans.append(Span(np.array(slots, np.int32), max(0, end - count), min(count, end)))
    order = batch_order([span.slots for span in spans])
    return build([spans[i] for i in order])


def met_by(plan: Plan, items: np.ndarray) -> list[list[int]]:
    """By row, the slots of the chunks that it sees, from left to right."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(plan.rows)]
    for slot, key, begin, end in items.tolist():
        for row in range(begin, end):
            if key <= plan.positions[row]:
                rows[row].append((key, slot))
    return [[slot for _, slot in sorted(row)] for row in rows]


def walked(done: TileSchedule, plan: Plan, window: int | None = None) -> list[list[int]]:
    """By row, the slots of the chunks that it sees and that tasks walk with it, in the order in which they are
    merged."""
    met: list[list[tuple[int, int, int]]] = [[] for _ in range(plan.rows)]
    for number, tasks in enumerate([*done.rounds, done.flash]):
        for begin, end, first, count in tasks.tolist():
            for slot, key, low, high in done.items[first : first + count].tolist():
                for row in range(max(begin, low), min(end, high)):
                    if key <= plan.positions[row]:
                        met[row].append((key // SPAN if done.bases[row] >= 0 else 0, number, slot))
    return [[slot for _, _, slot in sorted(row, key=lambda one: one[:2])] for row in met]


@settings(max_examples=60, deadline=None)
@given(plans(), BOUNDS)
def test_every_row_meets_its_chunks_from_left_to_right(plan: Plan, bounds: Bounds) -> None:
    done = cut(plan.items, plan.positions, bounds)
    assert walked(done, plan) == met_by(plan, plan.items)


@settings(max_examples=40, deadline=None)
@given(plans(), BOUNDS, st.sampled_from([1, 40, 64, 100, 600, 1000]))
def test_windows(plan: Plan, bounds: Bounds, window: int) -> None:
    """What a row does not see through its window may be left out, all else is walked in order."""
    items = plan.items_within(window)
    done = cut(items, plan.positions, bounds, window)
    for row, (ours, offered) in enumerate(zip(walked(done, plan), met_by(plan, items), strict=True)):
        first = plan.positions[row] - window - CHUNK + 1
        mine = items[(items[:, 2] <= row) & (items[:, 3] > row) & (items[:, 1] > first)]
        mine = mine[mine[:, 1] <= plan.positions[row]]
        seen = mine[np.argsort(mine[:, 1]), 0].tolist()
        assert ours == offered[len(offered) - len(ours) :] and ours[len(ours) - len(seen) :] == seen


@settings(max_examples=60, deadline=None)
@given(plans(), BOUNDS)
def test_tasks_fit_and_none_waits_for_another_of_its_round(plan: Plan, bounds: Bounds) -> None:
    done = cut(plan.items, plan.positions, bounds)
    assert done.states <= bounds.states
    left: set[tuple[int, int]] = set()
    for number, tasks in enumerate(done.rounds):
        taken: set[tuple[int, int]] = set()
        for begin, end, first, count in tasks.tolist():
            assert 0 < end - begin <= bounds.rows_together and count > 0
            keys, low, high = done.items[first : first + count, 1:].T
            assert (low < end).all() and (high > begin).all(), "a chunk is walked for nobody"
            assert (np.diff(keys) == CHUNK).all() and keys[0] // SPAN == keys[-1] // SPAN
            mine = {(row, int(keys[0]) // SPAN) for row in range(begin, end)}
            assert not mine & taken, "two tasks of a round leave the same state"
            assert number == 0 or mine <= left, "it goes on from a state that nothing has left"
            taken |= mine
        left |= taken
        assert (np.diff(tasks[:, 3]) <= 0).all()
    for row, position in enumerate(plan.positions.tolist()):
        assert done.bases[row] < 0 or {(row, span) for span in range(position // SPAN + 1)} <= left


@settings(max_examples=40, deadline=None)
@given(plans(), BOUNDS)
def test_states_are_of_one_row_and_span(plan: Plan, bounds: Bounds) -> None:
    done = cut(plan.items, plan.positions, bounds)
    numbers = [
        base + span
        for base, position in zip(done.bases.tolist(), plan.positions.tolist(), strict=True) if base >= 0
        for span in range(position // SPAN + 1)
    ]  # fmt: skip
    assert len(set(numbers)) == len(numbers) and all(0 <= number < done.states for number in numbers)


@settings(max_examples=60, deadline=None)
@given(plans(), BOUNDS)
def test_flash_tasks_are_of_one_sequence(plan: Plan, bounds: Bounds) -> None:
    """Their rows go on by one position, and all that one of them sees of its chunks the later ones see too."""
    done = cut(plan.items, plan.positions, bounds)
    assert sorted(row for begin, end, *_ in done.flash.tolist() for row in range(begin, end)) == [
        row for row in range(plan.rows) if done.bases[row] < 0
    ]
    met = met_by(plan, plan.items)
    for begin, end, first, count in done.flash.tolist():
        assert (np.diff(plan.positions[begin:end]) == 1).all()
        assert all(met[row] == met[end - 1][: len(met[row])] for row in range(begin, end))
        assert done.items[first : first + count, 0].tolist() == met[end - 1]


def test_a_sequence_that_begins_where_another_ends() -> None:
    """64 rows of one, then 40 of another at the positions behind: two runs, though their positions go on."""
    plan = build([Span(np.array([0], np.int32), 0, 64), Span(np.array([1, 2], np.int32), 64, 40)])
    assert run_edges(plan.items[:, 3], plan.positions).tolist() == [0, 64, 104]
    shared = build([Span(np.array([0], np.int32), 0, 64), Span(np.array([0, 2], np.int32), 64, 40)])
    assert run_edges(shared.items[:, 3], shared.positions).tolist() == [0, 104], "they are as one"


def test_a_shared_prefix_is_walked_once() -> None:
    """32 sequences on 8,192 shared keys: a task for each span of the prefix and tile of rows, and one for each row."""
    shared = list(range(128))
    plan = build([Span(np.array([*shared, 200 + i], np.int32), 8192, 1) for i in range(32)])
    for group, tiles in ((1, 1), (4, 2)):
        done = cut(plan.items, plan.positions, Bounds(group, 1 << 20, 100))
        assert [len(tasks) for tasks in done.rounds] == [tiles * 16 + 32] and not len(done.flash)


def test_sequences_that_part_within_a_span_go_on_from_its_state() -> None:
    plan = build([Span(np.array([0, 1, 2 + i], np.int32), 128, 1) for i in range(3)])
    done = cut(plan.items, plan.positions, Bounds(1, 100, 100))
    first, second = done.rounds
    assert first.tolist() == [[0, 3, 0, 2]]
    assert second[:, :2].tolist() == [[0, 1], [1, 2], [2, 3]] and second[:, 3].tolist() == [1, 1, 1]
    assert done.items[second[:, 2], 0].tolist() == [2, 3, 4]


def test_each_run_goes_its_own_way() -> None:
    """Two decoding rows, 600 rows of a prompt between them, all on one shared prefix: the rows share it up to the
    prompt, which is walked by tasks of its own."""
    shared = list(range(16))
    spans = [
        Span(np.array([*shared, 100], np.int32), 1024, 1),
        Span(np.array([*shared, *range(200, 210)], np.int32), 1024, 600),
        Span(np.array([*shared, 300], np.int32), 1024, 1),
    ]
    plan = build(spans)
    done = cut(plan.items, plan.positions, Bounds(1, 1 << 20, 3))
    assert (done.bases >= 0).nonzero()[0].tolist() == [0, 601]
    assert sorted(done.rounds[0][:, :2].tolist()) == 3 * [[0, 1]] + 3 * [[601, 602]]
    assert sorted(done.flash[:, 0].tolist()) == list(range(1, 601, 64))
    assert (cut(plan.items, plan.positions, Bounds(1, 1 << 20, 100)).bases >= 0).all(), "a few tasks are split"


def test_what_is_no_tree_is_not_shared() -> None:
    """Two sequences with a chunk in common behind chunks of their own: each row goes through its own tasks."""
    plan = build([Span(np.array(slots, np.int32), 128, 1) for slots in ([0, 2, 3], [1, 2, 4])])
    done = cut(plan.items, plan.positions, Bounds(1, 100, 100))
    assert walked(done, plan) == [[0, 2, 3], [1, 2, 4]] and len(done.rounds) == 1


@pytest.mark.parametrize("position", [0, 63, 511])
def test_the_rest_of_a_span_has_room(position: int) -> None:
    """Behind the newest chunk of a row that stands alone."""
    plan = build([Span(np.arange(position // CHUNK + 1, dtype=np.int32), position, 1)])
    done = cut(plan.items, plan.positions, Bounds(1, 100, 100))
    assert len(done.items) == SPAN_CHUNKS and done.states == 2


def test_nothing() -> None:
    empty = build([])
    done = cut(empty.items, empty.positions, Bounds(1, 100, 100))
    assert done.rounds == [] and not len(done.flash) and not done.states
    assert run_edges(empty.items[:, 3], empty.positions).tolist() == [0]
