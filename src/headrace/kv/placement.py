"""Which rank a new chunk goes to. The chunks of a block have one rank, unless each is asked for by itself."""

from __future__ import annotations

from headrace.kv.chunk_table import ChunkTable, Owners
from headrace.kv.tree import PrefixTree
from headrace.types import chunks_for


class Placement:
    """Of the new chunks in a tree of several ranks."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tree, self.ranks = tree, tree.pool.ranks
        self._turn = 0

    def asked(self, table: ChunkTable, end: int, ask: Owners, block: int) -> dict[int, int]:
        """Ranks asked for, by chunk, of the new chunks up to `end` tokens: of the first of each block of so many.
        Raises ValueError for a rank that does not exist."""
        asked = {chunk: ask(chunk) for chunk in range(len(table.nodes), chunks_for(end)) if not chunk % block}
        for chunk, rank in asked.items():
            if not 0 <= rank < self.ranks:
                raise ValueError(f"chunk {chunk} was placed on rank {rank}; there are ranks 0 to {self.ranks - 1}")
        return asked

    def choose(self, table: ChunkTable, chunk: int, block: int) -> int:
        """The rank of a new chunk where nobody asks for one. A table stays on its rank as long as that has room for a
        block; then its blocks take the ranks in turn. A new table begins where most can be had, of these where most is
        free, of these in turn."""
        if chunk % block:
            return table.owner(chunk - 1)
        tree, per_rank = self.tree, self.tree.pool.per_rank
        block = min(block, per_rank)
        last = table.owner(chunk - 1) if chunk else -1
        if chunk and bool((table.slots // per_rank == last).all()) and tree.available_on(last) >= block:
            return last
        first = last + 1 if chunk else self._turn
        turns = [(first + turn) % self.ranks for turn in range(self.ranks)]
        most = max(turns, key=lambda rank: (tree.available_on(rank), tree.pool.free_of(rank)))
        if not chunk:
            self._turn = most + 1
            return most
        return next((rank for rank in turns if tree.available_on(rank) >= block), most)
