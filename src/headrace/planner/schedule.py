"""Who computes and keeps which tokens, and which way messages go: what headrace.parallel does and planner.cost books.

A chain is a list of ranks by place 0, 1, ..; a ring is 0 -> 1 -> .. -> ranks - 1 -> 0. Ranges are half-open, of
absolute positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace.planner.partition import Bounds
from headrace.types import BLOCK_CHUNKS, CHUNK

BLOCK = BLOCK_CHUNKS * CHUNK
"""Tokens that have one owner, if that has room, and whose states ring-q folds before it sends them: the canonical order
goes by block."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Shards:
    """Who computes which new tokens: shard i, bounds[i] .. bounds[i+1]-1, is computed by ranks[i].

    bounds are absolute positions from P to P + T.
    """

    bounds: Bounds
    ranks: tuple[int, ...]


def length(block: Range) -> int:
    return block[1] - block[0]


def ranges_of(bounds: Sequence[int], ranks: Sequence[int], rank: int) -> list[Range]:
    """The shards of one rank, without empty ones."""
    shards = zip(pairwise(bounds), ranks, strict=False)
    return [shard for shard, owner in shards if owner == rank and shard[1] > shard[0]]


def keeper_of(block: int, ranks: int, first: int = 0) -> int:
    """The rank that keeps a new block where no rank keeps all: blocks go round, block 0 to `first`."""
    return (first + block) % ranks


def placed(ranks: int, begin: int, end: int) -> tuple[tuple[Range, ...], ...]:
    """New tokens begin .. end-1 that each rank keeps where no rank keeps all: blocks go round the ranks.

    From rank 0 on; the engine begins with the rank that has most room.
    """
    found: list[list[Range]] = [[] for _ in range(ranks)]
    for block in range(begin // BLOCK, -(-end // BLOCK)):
        found[keeper_of(block, ranks)].append((max(begin, block * BLOCK), min(end, (block + 1) * BLOCK)))
    return tuple(tuple(ranges) for ranges in found)


def last_row(blocks: Sequence[Sequence[Range]]) -> tuple[int, tuple[tuple[Range, ...], ...]]:
    """The rank whose ranges hold the last position of all, and the ranges cut down to that position."""
    end, rank = max(
        ((block[1], rank) for rank, mine in enumerate(blocks) for block in mine if length(block)), default=(0, 0)
    )
    return rank, tuple(((end - 1, end),) if other == rank else () for other in range(len(blocks)))


def chain_next(place: int, ranks: int) -> int | None:
    """The place to which a chain hands on all keys and values up to those of `place`; None at its end."""
    return place + 1 if place + 1 < ranks else None


def ring_next(rank: int, ranks: int) -> int:
    return (rank + 1) % ranks


def ring_origin(rank: int, hops: int, ranks: int) -> int:
    """The rank whose message has come to `rank` after so many hops."""
    return (rank - hops) % ranks


def ring_hops(origin: int, visited: Iterable[int], ranks: int) -> int:
    """Hops until a message of `origin` has been on all `visited` ranks."""
    return max(((rank - origin) % ranks for rank in visited), default=0)
