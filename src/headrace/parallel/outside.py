"""Ranks whose keys and values lie outside their fast memory: each group works on what is staged of its rank's chunks.

A strategy knows a chunk by its slot. For a group, the slots of this rank are renamed to places in a staging buffer, in
the same order; those of other ranks keep their names. Order, owners and equality of slots are all that ranks derive
their plans from (group_layout), so each may rename its own, and all still agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace.attention.plan import Int32
from headrace.config.attention import first_seen
from headrace.kernels.backend import Attend
from headrace.kernels.block import Watch
from headrace.kv.own_chunks import OwnChunks
from headrace.kv.storage import KVStorage, LayerPools
from headrace.parallel.coming import Coming
from headrace.parallel.messages import StepGroup, StepPart
from headrace.planner.schedule import ranges_of
from headrace.types import CHUNK, chunks_for


class StagedGroup(LayerPools, Coming, Protocol):
    """The staged chunks of one group: pool(layer) holds them in the order of OwnChunks.slots.

    A layer's pool is valid from the end of the layer before until `finish(layer)`.
    """

    def finish(self, layer: int) -> None:
        """The layer has been computed: what was written goes out, and the buffer to a later layer."""

    def keep(self, places: Int32, offsets: Int32) -> Watch | None:
        """What keeps the activations of rows, given the staged chunk (-1: another rank's) and the offset of each; None
        where none are kept."""


class OutsideKV(Protocol):
    """KV of a rank outside its fast memory: `slots` chunks; up to `capacity` of them are staged for a group."""

    slots: int
    capacity: int
    dtype: torch.dtype

    def stage(self, groups: Sequence[OwnChunks]) -> Sequence[StagedGroup]:
        """For the groups of the next step, in their order, whose first layers it begins to load. Raises ValueError for
        more chunks than can be staged, and what went wrong while the step before was written."""

    def computed(self) -> None:
        """The step that was staged last has been computed: takes its time into the figures."""

    def close(self) -> None:
        """Ends its threads. May be called again."""


def own_chunks(group: StepGroup, rank: int, slots_per_rank: int, windows: Iterable[int | None]) -> OwnChunks:
    """What the group has on a rank. A chunk that it begins is never cached, whatever its other sequences see of it."""

    def mine(cut: Callable[[StepPart], list[int]]) -> Int32:
        """Local slots of the chunks that `cut` gives of each part, ascending."""
        slots = np.array([slot for part in group.parts for slot in cut(part)], dtype=np.int32)
        return np.unique(slots[slots // slots_per_rank == rank]) - np.int32(rank * slots_per_rank)

    slots = mine(lambda part: part.slots)
    begun = mine(lambda part: part.slots[chunks_for(part.start) :])

    def cached(window: int | None) -> Int32:
        seen = mine(lambda part: part.slots[_first_chunk(part.start, window) : chunks_for(part.start)])
        return _places(slots, np.setdiff1d(seen, begun))

    written = mine(lambda part: part.slots[part.start // CHUNK :])
    first = rank * slots_per_rank
    number_of = {slot - first: chunk for part in group.parts for chunk, slot in enumerate(part.slots)}
    part_of = {slot - first: part for part in group.parts for slot in part.slots}
    parts = [part_of[slot] for slot in slots.tolist()]
    return OwnChunks(
        slots,
        {window: cached(window) for window in sorted(set(windows), key=str)},
        _places(slots, written),
        rows=sum(_rows(part, rank) for part in group.parts),
        numbers=np.array([number_of[slot] for slot in slots.tolist()], dtype=np.int32),
        prompts=np.array([part.prompt_len for part in parts], dtype=np.int32),
        adapters=np.array([(part.adapter, part.adapter_start) for part in parts], dtype=np.int32).reshape(-1, 2),
        begun=_places(slots, begun),
        foreign=_places(slots, mine(lambda part: _computed_elsewhere(part, rank))),
    )


def _rows(part: StepPart, rank: int) -> int:
    return sum(end - begin for begin, end in ranges_of(part.bounds, part.ranks, rank))


def _computed_elsewhere(part: StepPart, rank: int) -> list[int]:
    """Slots of the chunks of which other ranks compute rows."""
    ranges = [each for other in set(part.ranks) - {rank} for each in ranges_of(part.bounds, part.ranks, other)]
    return [slot for begin, end in ranges if end > begin for slot in part.slots[begin // CHUNK : chunks_for(end)]]


def _first_chunk(start: int, window: int | None) -> int:
    """The first chunk with a key that a row at `start` or later sees."""
    return 0 if window is None else max(0, first_seen(start, window)) // CHUNK


def _places(slots: Int32, some: Int32) -> Int32:
    return np.searchsorted(slots, some).astype(np.int32)


def renamed(group: StepGroup, own: OwnChunks, rank: int, slots_per_rank: int) -> StepGroup:
    """The group with places in staging for the slots of this rank, which are in `own`."""
    first = rank * slots_per_rank

    def in_staging(part: StepPart) -> StepPart:
        slots = np.array(part.slots, dtype=np.int32)
        here = slots // slots_per_rank == rank
        slots[here] = first + _places(own.slots, slots[here] - first)
        return msgspec.structs.replace(part, slots=slots.tolist())

    return msgspec.structs.replace(group, parts=[in_staging(part) for part in group.parts])


@dataclass(frozen=True, slots=True)
class PlacedGroup:
    """A group by the slots of `storage`, some of whose chunks may be `coming`. finish(layer): see StagedGroup."""

    group: StepGroup
    storage: KVStorage | StagedGroup
    coming: Coming
    finish: Callable[[int], None] | None = None

    def told(self, attend: Attend) -> Attend:
        """Attention that says when each layer has been computed, where that is asked for."""
        return attend if self.finish is None else _FinishingLayers(attend, self.finish)


def placed(
    groups: Sequence[StepGroup],
    storage: KVStorage | OutsideKV,
    coming: Coming,
    rank: int,
    windows: Iterable[int | None],
) -> list[PlacedGroup]:
    """A step's groups on a rank, in their order. Raises ValueError for one that cannot be staged."""
    if isinstance(storage, KVStorage):
        return [PlacedGroup(group, storage, coming) for group in groups]
    owned = [own_chunks(group, rank, storage.slots, windows) for group in groups]
    return [
        PlacedGroup(renamed(group, own, rank, storage.slots), staged, staged, staged.finish)
        for group, own, staged in zip(groups, owned, storage.stage(owned), strict=True)
    ]


class _FinishingLayers(Attend):
    """Attention of a group whose layers are staged: says when each has been computed."""

    def __init__(self, attend: Attend, finish: Callable[[int], None]) -> None:
        self.attend, self.finish = attend, finish

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        out = self.attend(layer, q, k, v, rows)
        self.finish(layer)
        return out
