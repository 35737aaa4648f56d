"""Which rank loads which stored chunk: one for each block, from what it has in reach and room for."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.offload.ranked.placing import placements
from headrace.types import BLOCK_CHUNKS

pytestmark = pytest.mark.unit

ALL = (0, 0)
"""In reach of both ranks."""


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, list[tuple[int | None, ...]], list[int], int | None]:
    ranks = draw(st.integers(1, 3))
    tier = st.sampled_from([None, 0, 1])
    stretches = draw(st.lists(st.tuples(st.integers(1, 40), st.tuples(*[tier] * ranks)), min_size=1, max_size=5))
    reach = [each for count, each in stretches for _ in range(count)]
    first = draw(st.integers(0, 2 * BLOCK_CHUNKS))
    begun = draw(st.integers(0, ranks - 1)) if first % BLOCK_CHUNKS else None
    return first, reach, draw(st.lists(st.integers(0, 90), min_size=ranks, max_size=ranks)), begun


@given(runs())
def test_every_way_can_be_gone(run: tuple[int, list[tuple[int | None, ...]], list[int], int | None]) -> None:
    first, reach, room, begun = run
    for way in placements(first, reach, room, begun):
        assert 0 < len(way) <= len(reach)
        assert all(reach[i][rank] is not None for i, rank in enumerate(way))
        assert all(count <= room[rank] for rank, count in Counter(way).items())
        blocks: dict[int, set[int]] = {}
        for i, rank in enumerate(way):
            blocks.setdefault((first + i) // BLOCK_CHUNKS, set()).add(rank)
        assert all(len(owners) == 1 for owners in blocks.values())
        assert begun is None or way[0] == begun


def test_alone_and_block_by_block() -> None:
    assert placements(0, [ALL] * 100, [100, 100], None) == [[0] * 100, [0] * 32 + [1] * 32 + [0] * 32 + [1] * 4]
    assert placements(30, [ALL] * 4, [100, 100], 1) == [[1] * 4, [1] * 2 + [0] * 2]
    assert placements(0, [(0,)] * 9, [100], None) == [[0] * 9]


def test_it_ends_where_nobody_gets_on() -> None:
    """The owner of a block is the rank that has most of it; what only the other has is computed again."""
    here, there = (0, None), (None, 0)
    assert placements(0, [here] * 20 + [there] * 12, [100, 100], None) == [[0] * 20]
    assert placements(0, [here] * 32 + [there] * 12, [100, 100], None) == [[0] * 32, [0] * 32 + [1] * 12]
    assert placements(0, [ALL] * 40, [10, 5], None) == [[0] * 10]
    assert placements(0, [ALL] * 40, [0, 0], None) == []
