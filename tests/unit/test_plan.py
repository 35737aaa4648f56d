"""The plan is plain data: printed, compared and tested with no tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.attention.plan import Int32, Plan, Planner, Span, TableRows, batch_order, build
from headrace.types import CHUNK


def span(slots: list[int], start: int, count: int) -> Span:
    return Span(np.array(slots, dtype=np.int32), start, count)


def test_shared_chunks_first_at_every_level_then_own_ones() -> None:
    spans = [span([0, 1, 2], 150, 1), span([0, 1, 3], 140, 2), span([0, 4], 100, 1)]
    plan = build(spans)
    assert plan.shared == 2
    assert plan.items.tolist() == [
        [0, 0, 0, 4],
        [1, 64, 0, 3],
        [2, 128, 0, 1],
        [3, 128, 1, 3],
        [4, 64, 3, 4],
    ]
    assert plan.positions.tolist() == [150, 140, 141, 100]
    assert plan.row_slots.tolist() == [2, 3, 3, 4]
    assert plan.row_offsets.tolist() == [22, 12, 13, 36]
    assert "slot     0  keys      0..63" in str(plan)


def test_prefill_rows_meet_a_chunk_from_its_first_key_on() -> None:
    plan = build([span([5, 6, 7], 10, 140)])
    assert plan.items.tolist() == [[5, 0, 0, 140], [6, 64, 54, 140], [7, 128, 118, 140]]


def test_batch_order_brings_equal_prefixes_together() -> None:
    tables = [np.array(t, dtype=np.int32) for t in ([3, 300], [1, 2], [3, 4], [1, 500], [3, 300, 7])]
    assert batch_order(tables) == [1, 3, 2, 0, 4]


@st.composite
def forests(draw: st.DrawFn) -> list[Span]:
    """Sequences over a random tree: slot numbers are paths, so equal slots mean equal prefixes."""
    names: dict[tuple[int, ...], int] = {}
    spans = []
    for index in range(draw(st.integers(1, 6))):
        path = tuple(draw(st.lists(st.integers(0, 1), min_size=0, max_size=4)))
        private = (*path, 100 + index)
        slots = [names.setdefault(private[: n + 1], len(names)) for n in range(len(private))]
        end = len(path) * CHUNK + draw(st.integers(1, CHUNK))
        # A follower starts after what it shares; at most one sequence may write a shared chunk: kept simple here.
        count = draw(st.integers(1, end - len(path) * CHUNK))
        spans.append(span(slots, end - count, count))
    return [spans[i] for i in batch_order([s.slots for s in spans])]


@settings(max_examples=300, deadline=None)
@given(forests())
def test_every_row_meets_each_of_its_chunks_once_from_left_to_right(spans: list[Span]) -> None:
    plan = build(spans)
    met: list[list[tuple[int, int]]] = [[] for _ in range(plan.rows)]
    for slot, key, begin, end in plan.items.tolist():
        for row in range(begin, end):
            met[row].append((slot, key))
    row = 0
    for s in spans:
        for position in range(s.start, s.start + s.rows):
            chunks = position // CHUNK + 1
            seen = [(slot, key) for slot, key in met[row] if key <= position]
            assert seen == [(int(s.slots[c]), c * CHUNK) for c in range(chunks)]
            assert plan.positions[row] == position
            assert plan.row_slots[row] == s.slots[position // CHUNK] and plan.row_offsets[row] == position % CHUNK
            row += 1
    assert all(len({key for _, key in items}) == len(items) for items in met)
    spanned = [_sequences(plan, spans, item) for item in plan.items.tolist()]
    assert all(n > 1 for n in spanned[: plan.shared]) and all(n == 1 for n in spanned[plan.shared :])


def _sequences(plan: Plan, spans: list[Span], item: list[int]) -> int:
    ends = np.cumsum([s.rows for s in spans])
    return len(set(np.searchsorted(ends, range(item[2], item[3]), side="right").tolist()))


@settings(max_examples=300, deadline=None)
@given(forests(), st.integers(1, 200))
def test_window_leaves_out_only_what_nobody_sees(spans: list[Span], window: int) -> None:
    plan = build(spans)
    kept = {tuple(item) for item in plan.items_within(window).tolist()}
    for slot, key, begin, end in plan.items.tolist():
        visible = any(
            max(0, p - window + 1) <= k <= p
            for p in plan.positions[begin:end].tolist()
            for k in range(key, key + CHUNK)
        )
        assert visible == ((slot, key, begin, end) in kept)


def test_no_rows() -> None:
    assert build([]).rows == 0 and build([]).items_within(5).shape == (0, 4)


@dataclass(eq=False)
class Table:
    """A sequence's chunks, as the planner knows them."""

    slots: Int32
    changes: int = 0


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_plans_of_steps_are_those_built_anew(data: st.DataObject) -> None:
    """Sequences that decode on, now and then with a new chunk, more rows, or others in their place."""
    planner, parts = Planner(), _anew(data)
    for _ in range(data.draw(st.integers(2, 12))):
        step = planner.plan(parts)
        spans = [Span(part.table.slots, part.start, part.rows) for part in parts]
        assert step.order == batch_order([s.slots for s in spans])
        fresh = build([spans[i] for i in step.order])
        for name in ("items", "positions", "row_slots", "row_offsets"):
            ours, theirs = getattr(step.plan, name), getattr(fresh, name)
            assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs), name
        assert step.plan.shared == fresh.shared
        parts = _anew(data) if data.draw(st.integers(0, 9)) == 9 else [_on(data, part) for part in parts]


def _anew(data: st.DataObject) -> list[TableRows]:
    return [TableRows(Table(s.slots), s.start, s.rows) for s in data.draw(forests())]


def _on(data: st.DataObject, before: TableRows) -> TableRows:
    """The next step of a sequence: most often one row, the one behind. A table may have a chunk more than it needs."""
    start = before.start + before.rows
    rows = data.draw(st.sampled_from((1, 1, 1, 1, 2)))
    table, slots = before.table, before.table.slots.tolist()
    assert isinstance(table, Table)
    wanted = (start + rows - 1) // CHUNK + 1 + data.draw(st.sampled_from((0, 1)))
    slots += [1000 + int(slots[0]) * 100 + n for n in range(len(slots), wanted)]
    if data.draw(st.integers(0, 19)) == 19:
        slots[-1] += 50
    if slots != table.slots.tolist():
        table.slots, table.changes = np.array(slots, np.int32), table.changes + 1
    return TableRows(table, start, rows)


@given(st.integers(1, 6), st.data())
def test_a_sequence_alone_has_the_plan_that_it_has_beside_others(chunks: int, data: st.DataObject) -> None:
    end = data.draw(st.integers(1, chunks * CHUNK))
    rows = data.draw(st.integers(1, end))
    elsewhere = data.draw(st.lists(st.booleans(), min_size=chunks, max_size=chunks))  # with other ranks
    slots = [-1 if away else 10 + chunk for chunk, away in enumerate(elsewhere)]
    one, other = span(slots, end - rows, rows), span([90], 3, 2)
    alone, beside = build([one]), build([one, other])
    assert np.array_equal(alone.items, beside.items[: chunks - sum(elsewhere)]) and alone.shared == 0
    for name in ("positions", "row_slots", "row_offsets"):
        ours, theirs = getattr(alone, name), getattr(beside, name)
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs[:rows]), name
