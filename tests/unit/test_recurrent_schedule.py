"""How a step's segments of recurrent layers become work for a GPU: groups give in any order what segments do."""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.triton.recurrent_schedule import KEPT, NOTHING, Arranged

Segments = list[list[int]]
SLOTS = 6


@st.composite
def steps(draw: st.DrawFn) -> Segments:
    """Segments of all rows, in any order, between few slots: many read what others write."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=7))
    ends = np.cumsum([0, *lengths]).tolist()
    places = draw(st.permutations(list(range(len(lengths)))))
    slots = [(draw(st.integers(-1, SLOTS - 1)), draw(st.integers(0, SLOTS - 1))) for _ in lengths]
    return [[ends[at], ends[at + 1], *each] for at, each in zip(places, slots, strict=True)]


def computed(segments: Segments, kept: int) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """One after the other: the inputs before each row's own, and what slots hold in the end."""
    held = {slot: [KEPT - slot * kept - n for n in range(kept)] for slot in range(SLOTS)}
    before: dict[int, list[int]] = {}
    for begin, end, source, target in segments:
        seen = list(held[source]) if source >= 0 else [NOTHING] * kept
        for row in range(begin, end):
            before[row] = seen[-kept:]
            seen.append(row)
        held[target] = seen[-kept:]
    return before, held


@settings(max_examples=100)
@given(steps(), st.integers(2, 5))
def test_runs_are_independent_and_taps_are_the_inputs(segments: Segments, kernel: int) -> None:
    rows = max(end for _, end, _, _ in segments)
    taps, by_group, groups = Arranged.of(segments, rows, kernel)
    before, held = computed(segments, kernel - 1)
    assert taps.tolist() == [before[row] for row in range(rows)]
    parts = [by_group[begin:end].tolist() for begin, end in pairwise(groups)]
    assert all(parts) and sorted(chain(*parts)) == sorted(segments)
    assert computed([*chain(*reversed(parts))], kernel - 1)[1] == held
    slots = [{slot for each in part for slot in each[2:]} for part in parts]
    written = [{each[3] for each in part} for part in parts]
    for at, wrote in enumerate(written):
        assert not any(wrote & others for other, others in enumerate(slots) if other != at)


def test_sequences_that_share_nothing_that_is_written_are_apart() -> None:
    """Two begin with one state, a third has its own, and goes on into two slots."""
    segments = [[0, 1, 4, 1], [1, 2, 4, 2], [2, 3, 3, 3], [3, 9, 3, 0]]
    assert Arranged.of(segments, 9, 4).groups.tolist() == [0, 1, 2, 4]
