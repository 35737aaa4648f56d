"""What lies below the pool, as the scheduler and the engine see it. engine.stored_prefixes has tiers there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.engine.sequence import SequenceState, Slice
from headrace.kv.cache import KVCache
from headrace.kv.chunk_table import ChunkTable
from headrace.stats import EngineStats


class Below(Protocol):
    """Brings stored chunks back, and stores those of ended sequences."""

    def until(self, sequence: SequenceState, alone: bool) -> int:
        """Up to which token a prompt, which has a table, may be computed now; where that is no further than it has
        come, it waits. May attach chunks to the table. alone: no other sequence would wait with it."""

    def leave(self, sequence: SequenceState, table: ChunkTable, ended: bool) -> None:
        """Closes the table of a sequence that has ended, or that is preempted."""

    def make_room(self) -> None:
        """Lets go of chunks that are held for no sequence's sake."""

    def settle(self) -> None:
        """Between two steps: takes note of what has come and of what was stored."""

    def wait(self) -> None:
        """Where nothing can be computed: waits a moment for something to come."""

    def coming(self, sequence: SequenceState) -> int:
        """Tokens of its table whose chunks are still on their way."""

    def settled(self, sequence: SequenceState) -> bool:
        """Whether `until` has looked for stored chunks of the sequence, and none are on their way any more."""

    def confirm(self, slices: Sequence[Slice]) -> set[SequenceState]:
        """After the step, before KVCache.commit: the sequences whose rows are void, since chunks that they needed did
        not come. They are computed again from there."""

    def observe(self, slices: Sequence[Slice], seconds: float) -> None:
        """Before `confirm`: takes note of how long a step took, unless it waited for chunks."""

    def store_idle(self) -> bool:
        """While there is nothing to compute: stores something. False if there was nothing to store."""

    @property
    def pending(self) -> bool:
        """Whether chunks are still being stored."""

    def add_stats(self, stats: EngineStats) -> None:
        """Writes its counters into `stats`."""

    def close(self) -> None:
        """Stores what is to be stored. May be called again."""


class NothingBelow(Below):
    """No tiers: a prompt is computed whole, and a closed table's chunks are the cache's alone."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def until(self, sequence: SequenceState, alone: bool) -> int:
        return len(sequence.tokens)

    def leave(self, sequence: SequenceState, table: ChunkTable, ended: bool) -> None:
        self.cache.close(table)

    def make_room(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def coming(self, sequence: SequenceState) -> int:
        return 0

    def settled(self, sequence: SequenceState) -> bool:
        return True

    def confirm(self, slices: Sequence[Slice]) -> set[SequenceState]:
        return set()

    def observe(self, slices: Sequence[Slice], seconds: float) -> None:
        pass

    def store_idle(self) -> bool:
        return False

    @property
    def pending(self) -> bool:
        return False

    def add_stats(self, stats: EngineStats) -> None:
        pass

    def close(self) -> None:
        pass
