"""Who holds, computes and sends what in a group: derived by every rank alike from the same records. No tensors.

Rows: new tokens. A run is a contiguous range of one sequence's rows on one rank. Chunks whose keys travel lie in a
workspace of one layer, arranged in pieces; a piece is what is sent as one message (of K, of V):

    | cached on rank 0 | cached on rank 1 | .. | new, shard 0 | cut by 0|1 | new, shard 1 | cut by 1|2 | ..

Where a shard begins inside a chunk, that chunk is a piece of its own, filled by one rank after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace.attention.plan import Int32, batch_order
from headrace.parallel.messages import StepGroup, StepPart
from headrace.planner.schedule import ranges_of
from headrace.types import CHUNK, chunks_for


class RowRange(NamedTuple):
    """Rows start .. end-1 (absolute positions) of parts[part], in one shard."""

    part: int
    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start


def runs(group: StepGroup, rank: int, *, wanted: bool = False) -> list[RowRange]:
    """The rows of a rank in batch order: runs that share chunks stand side by side. wanted: only rows whose hidden
    states the driver wants, in the same order."""
    found = [
        RowRange(index, begin, end)
        for index, part in enumerate(group.parts)
        for begin, end in ranges_of(part.bounds, part.ranks, rank)
    ]
    order = batch_order([slots_of(group, run) for run in found])
    ordered = [found[i] for i in order]
    return [cut for run in ordered if (cut := _wanted(group, run)).rows] if wanted else ordered


def _wanted(group: StepGroup, run: RowRange) -> RowRange:
    part = group.parts[run.part]
    return run._replace(start=min(run.end, max(run.start, part.end - part.wanted)))


def slots_of(group: StepGroup, run: RowRange) -> Int32:
    """Global slots of the chunks that the rows of a run may see, int32."""
    return np.array(group.parts[run.part].slots[: chunks_for(run.end)], dtype=np.int32)


def own_places(group: StepGroup, run: RowRange, rank: int, slots_per_rank: int) -> tuple[Int32, Int32]:
    """Of each row of a run the rank's own slot of its chunk, -1 for a chunk of another rank, and its offset in it."""
    positions = np.arange(run.start, run.end, dtype=np.int32)
    slots = slots_of(group, run)[positions // CHUNK]
    own = np.where(slots // slots_per_rank == rank, slots % slots_per_rank, -1)
    return own.astype(np.int32), positions % CHUNK


def wanted(group: StepGroup, rank: int) -> list[tuple[int, int]]:
    """(part, position) of each hidden state that the driver wants of a rank, in the order of the rank's rows."""
    return [(run.part, position) for run in runs(group, rank, wanted=True) for position in range(run.start, run.end)]


def check(group: StepGroup, ranks: int) -> None:
    """Raises ValueError unless the bounds cover the new tokens in order, the slots hold them, and recurrent states go
    once through each rank: one that computes rows before and after another's would wait for it."""
    for part in group.parts:
        ordered = part.bounds == sorted(part.bounds)
        if not ordered or part.bounds[:1] != [part.start] or part.bounds[-1] != part.end:
            raise ValueError(f"bounds {part.bounds} do not cut the tokens {part.start} .. {part.end}")
        if len(part.ranks) != len(part.bounds) - 1 or not set(part.ranks) <= set(range(ranks)):
            raise ValueError(f"{len(part.bounds) - 1} shards but ranks {part.ranks} (of {ranks})")
        if len(part.slots) != chunks_for(part.end):
            raise ValueError(f"{len(part.slots)} chunks cannot hold {part.end} tokens")
        if part.states and len(set(part.ranks)) < len(part.ranks):
            raise ValueError(f"recurrent states cannot go through ranks {part.ranks}: use chain or single")


@dataclass(frozen=True, slots=True)
class KVPiece:
    """Chunks begin .. end-1 of the workspace.

    holder: the rank that has them first. first, last: the shards that write them, -1 for cached chunks.
    filled[s]: tokens in the piece once shards up to s have written (cached: all, at any index).
    """

    index: int
    begin: int
    end: int
    holder: int
    first: int
    last: int
    filled: tuple[int, ...]

    @property
    def cached(self) -> bool:
        return self.first < 0

    @property
    def cut(self) -> bool:
        return self.first != self.last


@dataclass(frozen=True, slots=True)
class WorkspaceLayout:
    """Pieces, and where each chunk lies: index[global slot] -> chunk of the workspace."""

    pieces: tuple[KVPiece, ...]
    index: dict[int, int]

    @property
    def chunks(self) -> int:
        return len(self.index)

    def table(self, slots: Int32) -> Int32:
        """Workspace chunks in place of global slots."""
        return np.array([self.index[slot] for slot in slots.tolist()], dtype=np.int32)


class _Chunk(NamedTuple):
    slot: int
    part: int
    chunk: int
    first: int
    last: int


def arrange(group: StepGroup, slots_per_rank: int) -> WorkspaceLayout:
    """The workspace of a group. Cached chunks are held by their owners, new ones by those who compute them."""
    chunks = _chunks(group)
    keyed: dict[tuple[int, int, int, int], list[_Chunk]] = {}
    for each in chunks:
        holder = each.slot // slots_per_rank if each.first < 0 else group.parts[each.part].ranks[each.first]
        keyed.setdefault((2 * each.first + (each.last > each.first), each.last, each.first, holder), []).append(each)
    pieces: list[KVPiece] = []
    index: dict[int, int] = {}
    shards = max(len(part.ranks) for part in group.parts)
    for (_, last, first, holder), members in sorted(keyed.items()):
        begin = len(index)
        for each in members:
            index[each.slot] = len(index)
        filled = tuple(sum(_filled(group.parts[each.part], each, shard) for each in members) for shard in range(shards))
        pieces.append(KVPiece(len(pieces), begin, len(index), holder, first, last, filled))
    return WorkspaceLayout(tuple(pieces), index)


def _filled(part: StepPart, each: _Chunk, shard: int) -> int:
    """Tokens in a chunk when the shards up to `shard` have written."""
    begin = each.chunk * CHUNK
    end = part.bounds[min(shard + 1, len(part.bounds) - 1)] if each.first >= 0 else begin + CHUNK
    return max(0, min(end, begin + CHUNK) - begin)


def _chunks(group: StepGroup) -> list[_Chunk]:
    """Each distinct chunk of a group once; one that any part writes counts as new."""
    found: dict[int, _Chunk] = {}
    for index, part in enumerate(group.parts):
        for each in _chunks_of(index, part):
            known = found.get(each.slot)
            if known is None or known.first < 0:
                found[each.slot] = each
    return list(found.values())


def _chunks_of(index: int, part: StepPart) -> Iterator[_Chunk]:
    first_new = part.start // CHUNK
    for chunk, slot in enumerate(part.slots):
        if chunk < first_new:
            yield _Chunk(slot, index, chunk, -1, -1)
        else:
            begin = max(part.start, chunk * CHUNK)
            end = min(part.end, (chunk + 1) * CHUNK)
            yield _Chunk(slot, index, chunk, _shard(part, begin), _shard(part, end - 1))


def _shard(part: StepPart, position: int) -> int:
    """The shard of a new token; of several shards that begin there, the one that is not empty."""
    return int(np.searchsorted(np.array(part.bounds), position, side="right")) - 1
