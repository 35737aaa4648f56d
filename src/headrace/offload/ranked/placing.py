"""Which rank shall load each of a run of stored chunks: the ranks that have them in reach, one for each block.

A block of 2,048 tokens has one owner (kv.cache). Chunks in a rank's host memory are that rank's to load; those on disk
or remote may be loaded by any. A run ends before the first chunk that the owner of its block has not in reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.types import BLOCK_CHUNKS

Reach = Sequence[Sequence[object | None]]
"""[chunks][ranks]: whence the rank can load the chunk; None if it cannot."""


def placements(first: int, reach: Reach, room: Sequence[int], begun: int | None) -> list[list[int]]:
    """Ways to place chunks first, first + 1, ...: each with one rank for each chunk, as far as the run goes.

    room: chunks that each rank can take. begun: the owner of the chunk before, if that is in the same block. First all
    on one rank, the one that gets furthest, then block by block round the ranks; no way twice.
    """
    ranks = range(len(room))
    alone = max(([rank] * _reach_of(rank, reach, room[rank], begun) for rank in ranks), key=len)
    spread = _round(first, reach, list(room), begun)
    return [way for way in ([alone] if alone == spread else [alone, spread]) if way]


def _reach_of(rank: int, reach: Reach, room: int, begun: int | None) -> int:
    if begun not in (None, rank):
        return 0
    return min(room, next((i for i, each in enumerate(reach) if each[rank] is None), len(reach)))


def _round(first: int, reach: Reach, room: list[int], begun: int | None) -> list[int]:
    """Block by block: the rank that has most of the block in reach and, of equals, fewest chunks of the run so far."""
    placed: list[int] = []
    while len(placed) < len(reach):
        chunk = first + len(placed)
        block = reach[len(placed) : len(placed) + BLOCK_CHUNKS - chunk % BLOCK_CHUNKS]
        able = [begun] if begun is not None and chunk % BLOCK_CHUNKS else range(len(room))
        best = max(able, key=_by(block, room, placed))
        count = _reach_of(best, block, room[best], None)
        placed += [best] * count
        room[best] -= count
        if count < len(block):
            break
        begun = None
    return placed


def _by(block: Reach, room: Sequence[int], placed: Sequence[int]) -> Callable[[int], tuple[int, int, int]]:
    return lambda rank: (_reach_of(rank, block, room[rank], None), -placed.count(rank), -rank)
