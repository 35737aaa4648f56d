"""Index data of steps in memory of a fixed size: what goes on from a plan comes to the same as what is cut anew."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.attention.plan import Plan, Span, batch_order, build
from headrace.device import current
from headrace.kernels.triton.arena import Arena, TaskArena, TaskSizes
from headrace.kernels.triton.tile_schedule import SPAN, SPAN_CHUNKS, Bounds, cut
from headrace.types import CHUNK

BOUNDS = Bounds(4, 1 << 20, 0)
ROOM = TaskSizes((40, 40), 0, 600)


def arena(sizes: TaskSizes = ROOM, rows: int = 8) -> Arena:
    return Arena(rows, {None: sizes}, current(), torch.device("cpu"), pinned=False)


def decoding(lengths: list[int], shared: int) -> list[Span]:
    """Sequences that decode at these positions behind `shared` chunks that all have."""
    spans = []
    for number, position in enumerate(lengths):
        own = [1000 * (number + 1) + chunk for chunk in range(position // CHUNK + 1)]
        spans.append(Span(np.array([*range(shared), *own[shared:]], np.int32), position, 1))
    return spans


def met(tasks: TaskArena, rows: int) -> list[list[list[int]]]:
    """By row, the slots that it meets in each span, in their order."""
    found: list[dict[int, list[int]]] = [{} for _ in range(rows)]
    for number, part in enumerate(tasks.rounds):
        for begin, end, first, count in part.host[: tasks.counts.host[number]].tolist():
            for slot, key, low, high in tasks.items.host[first : first + count].tolist():
                for row in range(max(begin, low), min(end, high)):
                    found[row].setdefault(key // SPAN, []).append(slot)
    return [[slots for _, slots in sorted(spans.items())] for spans in found]


def filled(plan: Plan) -> TaskArena:
    here = arena()
    here.fill({None: cut(plan.items, plan.positions, BOUNDS)})
    return here.tasks[None]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(3 * CHUNK, 2 * SPAN), min_size=1, max_size=5), st.integers(0, 3), st.integers(1, 12))
def test_a_plan_that_grows_is_the_one_cut_anew(lengths: list[int], shared: int, steps: int) -> None:
    """A chunk at a time: every row enters its next one, until there is no room for one more."""
    spans = [decoding(lengths, shared)[i] for i in batch_order([s.slots for s in decoding(lengths, shared)])]
    here, begun = arena(), [span.start for span in spans]
    first = build(spans)
    here.fill({None: cut(first.items, first.positions, BOUNDS)})
    for _ in range(steps):
        for row, span in enumerate(spans):
            start = (span.start // CHUNK + 1) * CHUNK
            slot = int(span.slots[-1]) + 100
            grown = here.grow(row, slot, start)
            assert grown == (start // SPAN < begun[row] // SPAN + 2), "there is room for the next span, and no other"
            if not grown:
                return
            spans[row] = Span(np.append(span.slots, np.int32(slot)), start, 1)
        plan = build(spans)
        ours, anew = here.tasks[None], filled(plan)
        assert met(ours, plan.rows) == met(anew, plan.rows)
        assert here.slots.host[: plan.rows].tolist() == plan.row_slots.tolist()


def test_what_is_no_row_is_padding() -> None:
    here, plan = arena(), build(decoding([100, 700], 0))
    here.fill({None: cut(plan.items, plan.positions, BOUNDS)})
    here.move(plan.positions, plan.row_offsets)
    here.send()
    assert here.positions.there.tolist() == [100, 700, *6 * [-1]]
    assert here.offsets.there.tolist() == [36, 60, *6 * [0]]
    assert here.tasks[None].bases.there.tolist() == [0, 2, *6 * [-1]]
    assert here.tasks[None].counts.there.tolist() == [3, 0, 2, 0]
    smaller = build(decoding([100], 0))
    here.fill({None: cut(smaller.items, smaller.positions, BOUNDS)})
    here.move(smaller.positions, smaller.row_offsets)
    here.send()
    assert here.tasks[None].counts.there.tolist() == [1, 0, 1, 0]
    assert here.positions.there.tolist() == [100, *7 * [-1]]


@pytest.mark.parametrize(
    "sizes",
    [TaskSizes((2, 40), 0, 600), TaskSizes((), 0, 600), TaskSizes((40,), 0, 3 * SPAN_CHUNKS - 1)],
    ids=["tasks", "rounds", "items"],
)
def test_what_does_not_fit(sizes: TaskSizes) -> None:
    plan = build(decoding([100, 700], 0))
    done = {None: cut(plan.items, plan.positions, BOUNDS)}
    assert arena().fits(done) and not arena(sizes).fits(done) and not arena(rows=1).fits(done)


def test_a_later_step_sends_its_rows_alone() -> None:
    here, plan = arena(), build(decoding([100, 700], 0))
    here.fill({None: cut(plan.items, plan.positions, BOUNDS)})
    here.move(plan.positions + 1, plan.row_offsets + 1)
    here.send(tasks=False)
    assert here.positions.there[:2].tolist() == [101, 701] and not here.tasks[None].counts.there.any()
