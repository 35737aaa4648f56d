"""The scheduler: which tokens of which sequences the next step computes. Pure Python over small records.

Decoding sequences come first, one token each; what is left of the step's token budget goes to prompts in order of
arrival, so that a long prompt delays a decoding sequence by at most one budget per token. A prompt whose next chunk
another sequence is writing waits for that chunk, not for the sequence. When the cache is full, the sequence that
arrived last gives up its chunks and is computed again later; nothing of its answer is lost.

With several ranks a slice of a prompt ends at a multiple of `align` tokens, or at the prompt's end:

    |<-- align -->|<-- align -->|<-- align -->|<- rest ->|
    |     slice of one step     |   of the next step     |

so that every slice but a decoding one begins with a chunk. A prompt for which a step has less left waits.

Tokens that a grammar forces (SequenceState.forced) are computed with the decoding sequences, as many at once as the
budget leaves; with several ranks one at a time. Drafted tokens (SequenceState.draft) are too, behind those that are
known; with several ranks as far as the chunk goes, whose owner computes them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from headrace.engine.below import Below, NothingBelow
from headrace.engine.sequence import SequenceState, Slice
from headrace.kv.cache import KVCache
from headrace.kv.chunk_table import ChunkTable, Owners
from headrace.types import CHUNK

ChooseOwners = Callable[[SequenceState, int, int], Owners | None]


def cache_chooses(sequence: SequenceState, start: int, count: int) -> Owners | None:
    """No owners are given: the cache chooses."""
    return None


def _by_order(sequence: SequenceState) -> int:
    return sequence.order


class Scheduler:
    """waiting and running are kept in order of arrival; a running sequence has a table, a waiting one has none.

    open_table(sequence) gives a new sequence its empty table.
    align: see above; 1 with one rank, the chunk size with several.
    owners: a function of (sequence, start, count), the slice that is about to be taken: who shall own its new chunks
    (see KVCache.extend), or None where the cache shall choose.
    below: what lies below the pool, with one rank.

    There are at most max_batch_tokens - align + 1 sequences at a time: with a prompt among them, the others leave at
    least `align` tokens of each step, so that the first prompt in the order of arrival goes on at every step. Nor are
    there more than the cache has recurrent states, if the model has any.

    Raises ValueError if a step cannot hold `align` tokens.
    """

    def __init__(
        self,
        cache: KVCache,
        open_table: Callable[[SequenceState], ChunkTable],
        max_batch_tokens: int,
        max_sequences: int,
        align: int = 1,
        owners: ChooseOwners = cache_chooses,
        below: Below | None = None,
    ) -> None:
        if align < 1:
            raise ValueError(f"align must be at least 1, got {align}")
        if max_batch_tokens < align:
            raise ValueError(f"max_batch_tokens {max_batch_tokens} is less than {align}, the least a prompt needs of a "
                             f"step; raise max_batch_tokens")  # fmt: skip
        self.cache = cache
        self.open_table = open_table
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = min(max_sequences, max_batch_tokens - align + 1)
        if cache.states is not None:
            self.max_sequences = min(self.max_sequences, cache.states.total)
        self.align = align
        self.owners = owners
        self.below = NothingBelow(cache) if below is None else below
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self.preemptions = 0
        self._slices: dict[SequenceState, Slice] = {}
        self._budget = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: SequenceState) -> None:
        insort(self.waiting, sequence, key=_by_order)

    def remove(self, sequence: SequenceState) -> None:
        """Takes a sequence out, finished or aborted, at any moment between steps; its own chunks are free at once."""
        if sequence.table is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._close(sequence, ended=True)

    def schedule(self) -> list[Slice]:
        """The slices of the next step; empty only when there is nothing to do. The cache has room for all of them."""
        self._slices = {}
        self._budget = self.max_batch_tokens
        decoding: list[SequenceState] = []
        several: list[SequenceState] = []
        prefilling: list[SequenceState] = []
        for sequence in self.running:
            if sequence.remaining == 1:
                if not sequence.held:
                    (several if sequence.draft else decoding).append(sequence)
            else:
                (several if sequence.forced else prefilling).append(sequence)
        for sequence in decoding:
            self._decode(sequence)
        for behind, sequence in zip(reversed(range(len(several))), several, strict=True):
            kept = behind + (self.align if prefilling or self.waiting else 0)  # a token for each, and a prompt's least
            self._decode(sequence, self._budget - kept)
        for sequence in prefilling:
            self._prefill(sequence)
        self._admit()
        return list(self._slices.values())

    def _decode(self, sequence: SequenceState, most: int = 1) -> None:
        """Takes one token, or at most so many of those that are forced or drafted."""
        table = sequence.table
        if most <= 1:
            sequence.draft.clear()
        if table is not None and most == 1 and self.cache.grow(table):
            self._slices[sequence] = Slice(sequence, table.length - 1, 1)
            self._budget -= 1
            return
        while table is not None and not self._room(table, 1):
            if not self._preempt_after(sequence.order - 1, table):
                return
            table = sequence.table
        if table is not None:
            if self.align > 1:
                most = min(most, CHUNK - table.length % CHUNK if sequence.draft else 1)
            count = max(1, min(most, sequence.remaining + len(sequence.draft), self.cache.room(table)))
            del sequence.draft[max(0, count - sequence.remaining) :]
            self._take(sequence, table, count)

    def _prefill(self, sequence: SequenceState) -> None:
        table = sequence.table
        if table is None:
            return  # preempted in this very step
        gained, blocked = self.cache.reuse(table)
        if not sequence.preemptions and not sequence.n_output:
            sequence.cached_tokens += gained
        if blocked or self._budget < min(sequence.remaining, self.align):
            return
        left = self._until(sequence) - table.length
        least = min(left, self.align - table.length % self.align)
        if left <= 0 or self._budget < least:
            return
        while self._room(table, least) < least:
            if not self._preempt_after(sequence.order, table):
                return
        count = min(self._budget, left, self.cache.room(table))
        if count < left:
            count -= (table.length + count) % self.align
        self._take(sequence, table, count)

    def _until(self, sequence: SequenceState) -> int:
        end = self.below.until(sequence, alone=len(self.running) == 1)
        return min(end, (len(sequence.tokens) - 1) // self.align * self.align) if sequence.held else end

    def _room(self, table: ChunkTable, least: int) -> int:
        """Tokens by which the table can be extended, after making room if they are less than `least`."""
        room = self.cache.room(table)
        if room < least:
            self.below.make_room()
            room = self.cache.room(table)
        return room

    def _take(self, sequence: SequenceState, table: ChunkTable, count: int) -> None:
        start = table.length
        owners = self.owners(sequence, start, count)
        extended = self.cache.extend(table, count, owners, drafted=len(sequence.draft))
        assert extended, "room() promised the chunks"
        self._slices[sequence] = Slice(sequence, start, count)
        self._budget -= count

    def _admit(self) -> None:
        """Starts waiting sequences, in order, while budget, places and chunks last."""
        promised = -1
        while self.waiting and self._budget >= self.align and len(self.running) < self.max_sequences:
            sequence = self.waiting[0]
            table = self.open_table(sequence)
            if promised < 0:
                promised = sum(self.cache.cost(s.table) for s in self.running if s.table and s.remaining > 1)
            if self.running and not self._affordable(table, self.cache.cost(table) + promised):
                self.cache.close(table)
                return
            sequence.table = table
            insort(self.running, self.waiting.pop(0), key=_by_order)
            self._prefill(sequence)
            promised += self.cache.cost(table)

    def _affordable(self, table: ChunkTable, chunks: int) -> bool:
        """Whether more than so many chunks can be had for the table."""
        if chunks >= self.cache.available_for(table.account):
            self.below.make_room()
        return chunks < self.cache.available_for(table.account)

    def _preempt_after(self, order: int, taker: ChunkTable) -> bool:
        """Preempts the latest sequence that arrived after `order`, is not in this step and may leave something to
        `taker`; False if there is none."""
        for sequence in reversed(self.running):
            if sequence.order <= order:
                return False
            if sequence not in self._slices and sequence.table and self.cache.yields(sequence.table, taker):
                self._preempt(sequence)
                return True
        return False

    def _preempt(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        self._close(sequence, ended=False)
        sequence.preemptions += 1
        sequence.forced = False
        sequence.draft = []
        self.preemptions += 1
        self.add(sequence)

    def _close(self, sequence: SequenceState, ended: bool) -> None:
        table, sequence.table = sequence.table, None
        assert table is not None
        self.below.leave(sequence, table, ended)

    def check(self) -> None:
        """Raises AssertionError unless queues, tables and cache agree. For tests."""
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=_by_order), "a queue is out of order"
        assert all(s.table is None for s in self.waiting), "a waiting sequence holds chunks"
        assert {s.table for s in self.running} == self.cache.tables, "tables and running sequences differ"
        for s in self.running:
            assert s.table is not None and s.table.tokens is s.tokens and s.remaining >= 1
        self.cache.check()
