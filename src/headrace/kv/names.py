"""How chunks come by their names in the tree, once their last token is known and a step has filled them."""

from __future__ import annotations

from collections.abc import Container, Iterable

from headrace.kv.chunk_table import ChunkTable
from headrace.kv.node import Node
from headrace.kv.partial import LEAST, words
from headrace.kv.tree import PrefixTree, chain, token_array
from headrace.types import CHUNK


class ChunkNames:
    """Gives names to chunks of tables, from left to right, and knows those that wait for theirs."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self._filled: list[tuple[ChunkTable, int]] = []
        self._planned: list[tuple[ChunkTable, int]] | None = None
        self._shared: list[tuple[ChunkTable, int, Node]] = []
        """Chunks that others could attach before they were filled."""

    def give(self, table: ChunkTable, chunk: int, node: Node) -> None:
        """Puts an own node into the tree, if the chunk before it is there."""
        parent = table.node_before(chunk)
        if parent is None or parent.digest is not None:
            node.tenant, node.pays = table.tenant(chunk), table.payer(chunk)
            self.tree.charge(node, table.account_of(chunk))
            self.tree.insert(node, table.digest(chunk), parent)

    def fill(self, table: ChunkTable, chunk: int) -> None:
        """The coming step completes the chunk: named ones can be shared at once, since a step stores keys and values
        before it attends; private ones wait for `settle`."""
        node = table.nodes[chunk]
        if self._planned is not None:
            self._planned.append((table, chunk))
        elif node.digest is not None:
            node.writer = None
            if self.tree.partial is not None:
                self._shared.append((table, chunk, node))
        elif table.shares:
            self.later(table, chunk)

    def plan_ahead(self) -> None:
        """Chunks that are filled from now on are so by a step that may come to nothing: `launched` says that it does
        not."""
        self._planned = []

    def launched(self, tables: Container[ChunkTable]) -> None:
        """Fills the chunks of these tables that a step planned ahead completes."""
        planned, self._planned = self._planned, None
        for table, chunk in planned or ():
            if table in tables and chunk < len(table.nodes):
                self.fill(table, chunk)

    def later(self, table: ChunkTable, chunk: int) -> None:
        """The next `settle` names the chunk."""
        self._filled.append((table, chunk))

    def confirm(self, table: ChunkTable, chunks: Iterable[int]) -> None:
        """The same of chunks that come before all others."""
        self._filled[:0] = [(table, each) for each in chunks]

    def forget(self, table: ChunkTable, chunk: int) -> None:
        """Chunks of the table from `chunk` on are given up."""
        self._filled = [(t, c) for t, c in self._filled if t is not table or c < chunk]

    def settle(self, tables: Container[ChunkTable], block_chunks: int) -> None:
        """Names the private chunks of these tables that were filled, or gives them up for their twin in the tree."""
        for table, chunk in self._filled:
            if table not in tables:
                continue  # closed in the meantime
            own = table.nodes[chunk]
            twin = self.tree.find(table.digest(chunk))
            if twin is None:
                own.writer = None
                self.give(table, chunk, own)
                self._index(table, chunk, own)
            elif self._replaces(twin, table, chunk, block_chunks):
                self.tree.hold(twin)
                table.replace(chunk, twin)
                self.tree.release(own)
        self._filled.clear()
        for table, chunk, node in self._shared:
            self._index(table, chunk, node)
        self._shared.clear()

    def _index(self, table: ChunkTable, chunk: int, node: Node) -> None:
        """Its keys and values are there: if it is in the tree, its rows may be copied."""
        if self.tree.partial is not None and node.digest is not None and self.tree.find(node.digest) is node:
            self.tree.partial.enter(node, table.stands_at(chunk), table.tokens[chunk * CHUNK : (chunk + 1) * CHUNK])

    def keep_tail(self, table: ChunkTable) -> None:
        """Before a table is closed: what is computed of its last chunk, if that is not whole, stays for its rows. (The
        newest token has no row yet, or that of a draft.)"""
        partial, length = self.tree.partial, min(table.length, len(table.tokens) - 1)
        chunk, rows = divmod(max(0, length), CHUNK)
        if partial is None or not table.shares or rows < LEAST or table.nodes[chunk].digest is not None:
            return
        tokens, place = table.tokens[chunk * CHUNK : chunk * CHUNK + rows], table.stands_at(chunk)
        if partial.longest(place, words(tokens))[1] == rows:
            return
        node = table.nodes[chunk]
        self.tree.insert_tail(node, chain(place[0], token_array(tokens), *place[1:]), rows)
        partial.enter(node, place, tokens)

    def _replaces(self, twin: Node, table: ChunkTable, chunk: int, block_chunks: int) -> bool:
        if not twin.complete or twin.parent is not table.node_before(chunk):
            return False
        return not self._cuts(twin, table, chunk, block_chunks)

    def _cuts(self, twin: Node, table: ChunkTable, chunk: int, block_chunks: int) -> bool:
        """Whether the twin, on another rank, would part the chunk from its followers in the block. (Only where a step
        began inside a chunk and filled it and more, since a whole chunk that the tree has is attached by `reuse`.)"""
        follows = chunk + 1 < len(table.nodes) and (chunk + 1) % block_chunks
        return bool(follows) and self.tree.pool.rank_of(twin.slot) != table.owner(chunk)
