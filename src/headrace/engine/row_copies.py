"""The first rows of a prompt's own chunk, copied from a chunk that begins alike (kv.partial).

A prompt takes whole chunks of the tree. Where it parts from all of them in the middle of one, or its last chunk is not
whole, the rows up to there have been computed all the same: for an earlier question on the same document, for another
answer to the same prompt. They are copied before the step, which computes what follows. What another
sequence computes in the coming step can be copied after it: a prompt waits for that one step, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from headrace.engine.below import Below
from headrace.engine.sequence import SequenceState, Slice
from headrace.kv.cache import KVCache
from headrace.kv.chunk_table import ChunkTable
from headrace.kv.node import Node
from headrace.kv.partial import LEAST, PartialMatches, common, words
from headrace.types import CHUNK

WAITS = 16
"""Rows for the sake of which a prompt waits for a step. A step of few rows takes as long as about so many more."""

Copy = Callable[[int, int], None]
"""(slot, other slot): the second has what the first has, in all layers."""


class RowCopies:
    """Copies rows for the prompts of a scheduler. copied: tokens so far."""

    def __init__(self, cache: KVCache, below: Below, copy: Copy) -> None:
        self.cache, self.below, self.copy = cache, below, copy
        self.partial = cache.tree.partial = PartialMatches()
        self.copied = 0

    def take(
        self, sequence: SequenceState, running: Sequence[SequenceState], slices: Mapping[SequenceState, Slice]
    ) -> bool:
        """Copies what there is for the next chunk of a prompt, for which there is room, ends with a chunk, and is about
        to be computed; False if it shall wait instead. running, slices: who else has tables, and what of them the
        coming step computes so far."""
        table = sequence.table
        assert table is not None, "it is about to be computed"
        most = len(table.tokens) - 1 if table.reusable is None else min(len(table.tokens) - 1, table.reusable)
        wanted = table.tokens[table.length : min(most, table.length + CHUNK)]
        if not table.shares or len(wanted) < LEAST:
            return True
        node, rows = self.partial.longest(table.stands_at(table.length // CHUNK), words(wanted))
        coming = 0
        for other, its, alike in self._alike(table, running, wanted):
            if rows == len(wanted):
                break
            coming = max(coming, min(alike, other.computed - table.length))
            computed = slices[other].start if other in slices else other.computed
            if not its.complete and (there := min(alike, computed - table.length)) > rows:
                node, rows = its, there
        if coming - rows >= WAITS and not sequence.waited:
            sequence.waited = True
            return False
        if node is not None and rows >= LEAST:
            self._copy(sequence, table, node, rows)
        return True

    def _alike(
        self, table: ChunkTable, running: Sequence[SequenceState], wanted: list[int]
    ) -> Iterator[tuple[SequenceState, Node, int]]:
        """Sequences that have a chunk at this place, that chunk, and with how many of the wanted tokens it begins, if
        these are not too few. (A complete one whose keys and values are there is among `partial`. Another one is
        computed by the coming step.)"""
        start, chunk, before = table.length, table.length // CHUNK, table.node_before()
        for other in running:
            its = other.table
            if its is None or its is table or len(its.nodes) <= chunk or its.node_before(chunk) is not before:
                continue
            if its.tokens[start : start + LEAST] != wanted[:LEAST] or its.stands_at(chunk) != table.stands_at(chunk):
                continue
            if its.shares and not self.below.coming(other):
                yield other, its.nodes[chunk], common(words(its.tokens[start : start + CHUNK]), words(wanted))

    def _copy(self, sequence: SequenceState, table: ChunkTable, source: Node, rows: int) -> None:
        extended = self.cache.extend(table, rows)
        assert extended, "there is room"
        own = table.nodes[-1]
        own.activations = source.activations
        self.copy(source.slot, own.slot)
        self.copied += rows
        if rows == source.rows:
            self.cache.tree.drop(source)
        if not sequence.preemptions and not sequence.n_output:
            sequence.cached_tokens += rows
