"""The scheduler: which tokens of which sequences the next step computes. Pure Python over small records.

Decoding sequences come first, one token each; what is left of the step's token budget goes to prompts in order of
arrival, so that a long prompt delays a decoding sequence by at most one budget per token. A prompt whose next chunk
another sequence is writing waits for that chunk, not for the sequence; one whose next rows can be copied does not
compute them (engine.row_copies). When the cache is full, the sequence that arrived last gives up its chunks and is
computed again later; nothing of its answer is lost.

With several ranks a slice of a prompt ends at a multiple of `align` tokens, or at the prompt's end:

    |<-- align -->|<-- align -->|<-- align -->|<- rest ->|
    |     slice of one step     |   of the next step     |

so that every slice but a decoding one begins with a chunk. A prompt for which a step has less left waits.

Tokens that a grammar forces, or whose rows went with a wrong draft (SequenceState.forced), are computed with the
decoding sequences, as many at once as the budget leaves. Drafted tokens (SequenceState.draft) are too, behind those
that are known. With several ranks both go as far as the chunk does, whose owner computes them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Sequence

from headrace.engine.below import Below, NothingBelow
from headrace.engine.row_copies import Copy, RowCopies
from headrace.engine.sequence import SequenceState, Slice
from headrace.kv.cache import KVCache
from headrace.kv.chunk_table import ChunkTable, Owners
from headrace.stats import EngineStats
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
    copy: may be given with one rank: see Executor.copy (engine.row_copies).
    give_way: may be set to a function that lets go of something in the pool that no request needs; False if there is
    nothing left of that kind.
    ahead: while a step is planned behind one that is under way (engine.overlap). Nobody is preempted then, and nothing
    stored is attached; lacking: whether a sequence waits for that.

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
        copy: Copy | None = None,
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
        self.rows = RowCopies(cache, self.below, copy) if copy is not None and align == 1 else None
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self.give_way: Callable[[], bool] = lambda: False
        self.preemptions = 0
        self.ahead = self.lacking = False
        self._slices: dict[SequenceState, Slice] = {}
        self._budget = 0
        self._kept = 0
        self._promised = -1

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: SequenceState) -> None:
        insort(self.waiting, sequence, key=_by_order)

    def remove(self, sequence: SequenceState) -> None:
        """Takes a sequence out, finished or aborted, at any moment between steps; its own chunks are free at once."""
        if sequence.table is None:
            self._leave_queue(sequence)
            return
        self.running.remove(sequence)
        self._close(sequence, ended=True)

    def again(self, sequence: SequenceState) -> None:
        """Between steps: a running sequence, whose newest row is of no use, waits to be computed again."""
        self._preempt(sequence)

    @property
    def makes_way(self) -> bool:
        """Whether a step that is not planned ahead may preempt somebody for the sake of one that waits to begin."""
        return False

    def schedule(self, unseen: Collection[SequenceState] | None = None) -> list[Slice]:
        """The slices of the next step; empty only when there is nothing to do. The cache has room for all of them.

        unseen: while a step is under way, which of its sequences go on with the token that it chooses. Then a step may
        be empty, too, where all others end or wait."""
        self._slices = {}
        self.ahead, self.lacking = unseen is not None, False
        self._budget = self.max_batch_tokens
        if self.cache.states is not None:
            self.cache.states.tables = min(self.max_sequences, len(self.running) + len(self.waiting))
        self._promised = -1
        self._make_way()
        decoding: list[SequenceState] = []
        several: list[SequenceState] = []
        prefilling: list[SequenceState] = []
        for sequence in self.running:
            remaining = sequence.remaining
            if sequence.ended:
                continue
            if remaining == 1:
                if not sequence.held:
                    (several if sequence.draft else decoding).append(sequence)
            elif remaining:
                (several if sequence.forced else prefilling).append(sequence)
            elif unseen is not None and sequence in unseen:
                self._decode_unseen(sequence)
        for sequence in decoding:
            self._decode(sequence)
        for behind, sequence in zip(reversed(range(len(several))), several, strict=True):
            kept = behind + (self.align if prefilling or self.waiting else 0)  # a token for each, and a prompt's least
            self._decode(sequence, self._budget - kept)
        self._prompts(prefilling)
        return list(self._slices.values())

    def _decode_unseen(self, sequence: SequenceState) -> None:
        """Takes the token that a step under way chooses."""
        table = sequence.table
        assert table is not None, "a step computes it"
        if table.length % CHUNK == 0 and not self._room(table, 1):
            self.lacking = True
            return
        self.cache.grow_unknown(table)
        self._slices[sequence] = Slice(sequence, table.length - 1, 1)
        self._budget -= 1

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
            if not self._gain_room(sequence, itself=True):
                return
            table = sequence.table
        if table is not None:
            if self.align > 1:
                most = min(most, CHUNK - table.length % CHUNK)
            if self.cache.states is not None:
                del sequence.draft[self.cache.states.draftable(table) :]
            count = max(1, min(most, sequence.remaining + len(sequence.draft), self.cache.room(table)))
            del sequence.draft[max(0, count - sequence.remaining) :]
            self._take(sequence, table, count)

    def _make_way(self) -> None:
        """Before a step: preempts what holds places or chunks beyond its share."""

    def _prompts(self, prefilling: list[SequenceState]) -> None:
        """Prompts of a step, with what decoding sequences have left of the budget. prefilling: half computed ones, as
        they came."""
        for sequence in prefilling:
            self._prefill(sequence)
        while self.waiting and self._begin(self.waiting[0]):
            pass

    def _reuse(self, sequence: SequenceState, table: ChunkTable) -> bool:
        """Takes what the tree has; whether the next chunk is being written for another sequence."""
        gained, blocked = self.cache.reuse(table)
        if not sequence.preemptions and not sequence.n_output:
            sequence.cached_tokens += gained
        return blocked

    def _prefill(self, sequence: SequenceState) -> None:
        table = sequence.table
        if table is None:
            return  # preempted in this very step
        budget = self._budget - self._kept
        if self._reuse(sequence, table) or budget < min(sequence.remaining, self.align):
            return
        left = self._until(sequence) - table.length
        least = min(left, self.align - table.length % self.align)
        if left <= 0 or budget < least:
            return
        while self._room(table, least) < least:
            if not self._gain_room(sequence):
                return
        if self.rows is not None and not table.length % CHUNK:
            before = table.length
            if not self.rows.take(sequence, self.running, self._slices):
                return
            left -= table.length - before
            if left <= 0:
                return
        count = min(budget, left, self.cache.room(table))
        if count < left:
            count -= (table.length + count) % self.align
        self._take(sequence, table, count)

    def _until(self, sequence: SequenceState) -> int:
        if self.ahead and not self.below.settled(sequence):
            self.lacking = True
            return sequence.computed
        end = self.below.until(sequence, alone=len(self.running) == 1)
        return min(end, (len(sequence.tokens) - 1) // self.align * self.align) if sequence.held else end

    def _room(self, table: ChunkTable, least: int) -> int:
        """Tokens by which the table can be extended, after making room if they are less than `least`."""
        if self.cache.room(table) < least:
            self.below.make_room()
        while (room := self.cache.room(table)) < least and self.give_way():
            pass
        return room

    def _take(self, sequence: SequenceState, table: ChunkTable, count: int) -> None:
        start = table.length
        owners = self.owners(sequence, start, count)
        extended = self.cache.extend(table, count, owners, drafted=len(sequence.draft))
        assert extended, "room() promised the chunks"
        self._slices[sequence] = Slice(sequence, start, count)
        self._budget -= count

    def _begin(self, sequence: SequenceState) -> bool:
        """Starts a waiting sequence if budget, places and chunks suffice; whether it has started."""
        if self._budget - self._kept < self.align or len(self.running) >= self.max_sequences:
            return False
        table = self.open_table(sequence)
        if self._promised < 0:
            self._promised = sum(self.cache.cost(s.table) for s in self.running if s.table and s.remaining > 1)
        if self.running and not self._affordable(table, self.cache.cost(table) + self._promised):
            self.cache.close(table)
            return False
        self._leave_queue(sequence)
        sequence.table = table
        insort(self.running, sequence, key=_by_order)
        self._prefill(sequence)
        self._promised += self.cache.cost(table)
        return True

    def _leave_queue(self, sequence: SequenceState) -> None:
        del self.waiting[bisect_left(self.waiting, sequence.order, key=_by_order)]

    def _affordable(self, table: ChunkTable, chunks: int) -> bool:
        """Whether more than so many chunks can be had for the table."""
        if chunks >= self.cache.available_for(table.account):
            self.below.make_room()
        while chunks >= self.cache.available_for(table.account):
            if not self.give_way():
                return False
        return True

    def _gain_room(self, sequence: SequenceState, itself: bool = False) -> bool:
        """`_preempt_for`, where somebody may be preempted."""
        self.lacking |= self.ahead
        return not self.ahead and self._preempt_for(sequence, itself)

    def _preempt_for(self, sequence: SequenceState, itself: bool = False) -> bool:
        """Preempts the latest sequence that arrived after this one, at last itself if that may be, and can leave it
        something; False if there is none."""
        order = sequence.order - itself
        for other in reversed(self.running):
            if other.order <= order:
                return False
            if self._yields(other, sequence):
                self._preempt(other)
                return True
        return False

    def _yields(self, other: SequenceState, taker: SequenceState) -> bool:
        """Whether a sequence is not in this step, and may leave chunks to another one or to itself."""
        if other in self._slices or other.table is None or taker.table is None:
            return False
        return self.cache.yields(other.table, taker.table)

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

    def note_computed(self, slices: Sequence[Slice]) -> int:
        """A step begins now. Returns how many tokens of prompts it computes, or again of answers."""
        return sum(part.length for part in slices if not part.decodes)

    def add_stats(self, stats: EngineStats) -> None:
        """Writes its figures into `stats`."""
        told = stats.scheduler
        told.running, told.waiting, told.preemptions = len(self.running), len(self.waiting), self.preemptions
        stats.kv.copied_tokens = 0 if self.rows is None else self.rows.copied

    def check(self, under_way: Collection[SequenceState] = ()) -> None:
        """Raises AssertionError unless queues, tables and cache agree. For tests. under_way: sequences that a step is
        computing whose tokens are not known, or that have ended meanwhile."""
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=_by_order), "a queue is out of order"
        assert all(s.table is None for s in self.waiting), "a waiting sequence holds chunks"
        assert {s.table for s in self.running} == self.cache.tables, "tables and running sequences differ"
        for s in self.running:
            assert s.table is not None and s.table.tokens is s.tokens and (s.remaining >= 1 or s in under_way)
        self.cache.check()
