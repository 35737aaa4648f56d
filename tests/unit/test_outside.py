"""What ranks derive of a group whose own slots each of them has renamed: the same as before, by places in staging."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.group_room import GroupRoom
from headrace.parallel import group_layout
from headrace.parallel.messages import StepGroup, StepPart
from headrace.parallel.outside import own_chunks, renamed
from headrace.types import CHUNK

pytestmark = pytest.mark.unit

PER_RANK, RANKS = 40, 3


@st.composite
def groups(draw: st.DrawFn) -> StepGroup:
    """Sequences that share chunks at their beginnings, cut at whole chunks between the ranks."""
    shuffled = list(range(PER_RANK * RANKS))
    random.Random(draw(st.integers(0, 99))).shuffle(shuffled)
    shared, parts = shuffled[: draw(st.integers(0, 6))], []
    free = iter(shuffled[6:])
    for _ in range(draw(st.integers(1, 4))):
        own = [next(free) for _ in range(draw(st.integers(1, 6)))]
        slots = shared[: draw(st.integers(0, len(shared)))] + own
        first = draw(st.integers(len(slots) - len(own), len(slots) - 1))
        start, end = first * CHUNK, len(slots) * CHUNK - draw(st.integers(0, CHUNK - 1))
        cuts = sorted(draw(st.lists(st.integers(first, len(slots) - 1), min_size=2, max_size=2)))
        bounds = [start, *(cut * CHUNK for cut in cuts), end]
        parts.append(StepPart([0] * (end - start), start, slots, bounds, draw(st.permutations(range(RANKS)))))
    return StepGroup("ring-kv", parts)


@given(groups())
def test_every_rank_derives_the_same(group: StepGroup) -> None:
    plain = group_layout.arrange(group, PER_RANK)
    for rank in range(RANKS):
        own = own_chunks(group, rank, PER_RANK, [None])
        other = renamed(group, own, rank, PER_RANK)
        back = dict(enumerate(own.slots.tolist()))
        layout = group_layout.arrange(other, PER_RANK)
        assert layout.pieces == plain.pieces
        first = rank * PER_RANK
        names = {slot: first + back[slot - first] if slot // PER_RANK == rank else slot for slot in layout.index}
        assert {names[slot]: chunk for slot, chunk in layout.index.items()} == plain.index
        for each in range(RANKS):
            assert group_layout.runs(other, each) == group_layout.runs(group, each)
            assert group_layout.wanted(other, each) == group_layout.wanted(group, each)


@given(groups(), st.sampled_from([None, 1, 64, 100, 1000]))
def test_what_is_loaded_and_written(group: StepGroup, window: int | None) -> None:
    """By each chunk of each sequence: loaded where a row sees earlier keys in it, unless the group itself begins it."""
    for rank in range(RANKS):
        own = own_chunks(group, rank, PER_RANK, [window])
        assert np.all(np.diff(own.slots) > 0)
        begun, seen, written, every = set(), set(), set(), set()
        for part in group.parts:
            for chunk, slot in enumerate(part.slots):
                every.add(slot)
                keys = range(chunk * CHUNK, (chunk + 1) * CHUNK)
                if keys.start >= part.start:
                    begun.add(slot)
                if keys.stop > part.start:
                    written.add(slot)
                if keys.start < part.start and (window is None or keys.stop > part.start - window + 1):
                    seen.add(slot)

        def here(slots: set[int], rank: int = rank) -> list[int]:
            return sorted(slot - rank * PER_RANK for slot in slots if slot // PER_RANK == rank)

        assert own.slots.tolist() == here(every)
        assert own.slots[own.cached[window]].tolist() == here(seen - begun)
        assert own.slots[own.written].tolist() == here(written)
        assert own.slots[own.begun].tolist() == here(begun)
        rows = [row for part in group.parts for row in computed_by(part, rank)]
        assert own.rows == len(rows)
        foreign = written - {slot for part in group.parts for slot in whole_of(part, rank)}
        assert own.slots[own.foreign].tolist() == here(foreign)
        for slot, number in zip(own.slots.tolist(), own.numbers.tolist(), strict=True):
            assert all(part.slots.index(slot + rank * PER_RANK) == number for part in group.parts
                       if slot + rank * PER_RANK in part.slots)  # fmt: skip


def computed_by(part: StepPart, rank: int) -> list[int]:
    """Positions of a part whose rows a rank computes."""
    cuts = zip(part.bounds, part.bounds[1:], part.ranks, strict=False)
    return [position for begin, end, other in cuts if other == rank for position in range(begin, end)]


def whole_of(part: StepPart, rank: int) -> set[int]:
    """Slots of the chunks whose new rows are all a rank's."""
    mine = set(computed_by(part, rank))
    return {
        slot
        for chunk, slot in enumerate(part.slots)
        if set(range(max(part.start, chunk * CHUNK), min(part.end, (chunk + 1) * CHUNK))) <= mine
    }


def test_a_chunk_that_goes_on_is_loaded_and_written() -> None:
    """That of a decoding sequence, at its 131st token."""
    own = own_chunks(StepGroup("ring-q", [StepPart([1], 130, [9, 50, 7], [130, 131], [0])]), 0, PER_RANK, [None, 4])
    assert own.slots.tolist() == [7, 9]
    assert {window: places.tolist() for window, places in own.cached.items()} == {None: [0, 1], 4: [0]}
    assert own.written.tolist() == [0]


def part(*slots: int) -> StepPart:
    return StepPart([1], len(slots) * CHUNK - 1, list(slots), [0, 1], [0])


def test_who_fits_a_group() -> None:
    """Two chunks of each rank; where chunks travel, two of all ranks together."""
    for strategy, last in (("ring-q", True), ("single", True), ("chain", False)):
        room = GroupRoom(2, PER_RANK)
        room.begin(part(0, 1))
        assert room.takes(part(0, 1), strategy)
        assert not room.takes(part(0, 2), strategy)
        assert room.takes(part(1, PER_RANK), strategy) == last
        assert not room.takes(part(PER_RANK + 1, PER_RANK + 2), strategy)
        room.begin(part(5, 6, 7))
    assert GroupRoom(None, PER_RANK).takes(part(*range(30)), "chain")


@given(st.lists(st.lists(st.integers(0, PER_RANK * RANKS - 1), min_size=1, max_size=5), max_size=9))
def test_no_group_is_larger_than_its_room(tables: list[list[int]]) -> None:
    room, together = GroupRoom(5, PER_RANK), set[int]()
    for table in tables:
        if together and room.takes(part(*table), "ring-q"):
            together |= set(table)
        else:
            room.begin(part(*table))
            together = set(table)
        assert all(sum(slot // PER_RANK == rank for slot in together) <= 5 for rank in range(RANKS))
