"""How plans become work for a GPU: every row meets its chunks, each once, from left to right."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.attention.plan import Plan, Span, batch_order, build
from headrace.kernels.triton import tile_schedule
from headrace.types import CHUNK

SPAN_CHUNKS = tile_schedule.SPAN // CHUNK


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
        count = draw(st.one_of(st.just(1), st.integers(1, end)))
        spans.append(Span(np.array(slots, np.int32), end - count, count))
    order = batch_order([span.slots for span in spans])
    return build([spans[i] for i in order])


def met_by(plan: Plan) -> list[list[int]]:
    """By row, the slots of the chunks that the plan offers it, from left to right."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(plan.rows)]
    for slot, key, begin, end in plan.items.tolist():
        for row in range(begin, end):
            rows[row].append((key, slot))
    return [[slot for _, slot in sorted(row)] for row in rows]


def walked(done: tile_schedule.TileSchedule, rows: int) -> list[list[int]]:
    """By row, the slots of the chunks that tasks walk with it, in the order in which they are merged."""
    met: list[list[tuple[int, int, int]]] = [[] for _ in range(rows)]
    for number, each in enumerate(done.rounds):
        for begin, end, first, count in each.tasks.tolist():
            for slot, key, low, high in done.items[first : first + count].tolist():
                for row in range(max(begin, low), min(end, high)):
                    met[row].append((key // tile_schedule.SPAN if done.split else 0, number, slot))
    return [[slot for _, _, slot in sorted(row, key=lambda one: one[:2])] for row in met]


@settings(max_examples=100, deadline=None)
@given(plans(), st.sampled_from([1, 4, 7, 48, 64]))
def test_every_row_meets_its_chunks_from_left_to_right(plan: Plan, group: int) -> None:
    for way in (tile_schedule.flash, tile_schedule.split):
        assert walked(way(plan.items, plan.rows, group), plan.rows) == met_by(plan)


@settings(max_examples=100, deadline=None)
@given(plans(), st.sampled_from([1, 4, 7, 48, 64]))
def test_tasks_fit_and_none_waits_for_another_of_its_round(plan: Plan, group: int) -> None:
    for done in (tile_schedule.flash(plan.items, plan.rows, group), tile_schedule.split(plan.items, plan.rows, group)):
        for each in done.rounds:
            taken: set[tuple[int, int]] = set()
            for begin, end, first, count in each.tasks.tolist():
                assert 0 < end - begin <= tile_schedule.rows_together(group)
                keys, low, high = done.items[first : first + count, 1:].T
                assert (low < end).all() and (high > begin).all(), "a chunk is walked for nobody"
                assert (np.diff(keys) > 0).all() if done.split else (np.diff(keys) >= 0).all()
                if done.split:
                    assert count > 0 and keys[0] // tile_schedule.SPAN == keys[-1] // tile_schedule.SPAN
                    span = int(keys[0]) // tile_schedule.SPAN
                    mine = {(row, span) for row in range(begin, end)}
                    assert not mine & taken, "two tasks of a round leave the same state"
                    taken |= mine


def test_a_shared_prefix_is_walked_once() -> None:
    """32 sequences on 8,192 shared keys: a task for each span of the prefix and tile of rows, and one for each row."""
    shared = list(range(128))
    plan = build([Span(np.array([*shared, 200 + i], np.int32), 8192, 1) for i in range(32)])
    done = tile_schedule.split(plan.items, 32, 1)
    assert [len(each.tasks) for each in done.rounds] == [16 + 32]
    done = tile_schedule.split(plan.items, 32, 4)
    assert [len(each.tasks) for each in done.rounds] == [2 * 16 + 32]


def test_sequences_that_part_within_a_span_go_on_from_its_state() -> None:
    plan = build([Span(np.array([0, 1, 2 + i], np.int32), 128, 1) for i in range(3)])
    done = tile_schedule.split(plan.items, 3, 1)
    assert [each.tasks.tolist() for each in done.rounds] == [[[0, 3, 0, 2]], [[0, 1, 2, 1], [1, 2, 3, 1], [2, 3, 4, 1]]]
    assert done.items[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_nothing() -> None:
    empty = build([])
    assert [len(each.tasks) for each in tile_schedule.flash(empty.items, 0, 1).rounds] == [0]
    assert tile_schedule.split(empty.items, 0, 1).rounds == []
