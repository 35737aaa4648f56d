"""Whether tables, nodes and slots agree. For tests: a full walk."""

from __future__ import annotations

from collections.abc import Collection

from headrace.kv.chunk_table import ChunkTable
from headrace.kv.tree import Node, PrefixTree
from headrace.types import CHUNK, chunks_for


def check_tables(tree: PrefixTree, tables: Collection[ChunkTable], loose: Collection[Node]) -> None:
    """Raises AssertionError unless these tables and loose chunks, and no others, hold what is held of the tree."""
    holders: dict[int, list[tuple[ChunkTable, int]]] = {}
    nodes: dict[int, Node] = {id(node): node for node in tree.nodes.values()}
    for table in tables:
        assert len(table.nodes) == chunks_for(table.length), "a table holds more or fewer chunks than its length"
        assert table.slots.tolist() == [node.slot for node in table.nodes], "slots and nodes differ"
        for chunk, node in enumerate(table.nodes):
            nodes[id(node)] = node
            holders.setdefault(id(node), []).append((table, chunk))
    for node in loose:
        assert node.refs == 1 and node.digest is None and id(node) not in nodes, "a loose chunk is held or named"
    for key, node in nodes.items():
        _check_node(node, holders.get(key, []))
    every = [*nodes.values(), *loose]
    if tree.accounts is not None:
        tree.accounts.check(every)
    tree.pool.check({node.slot for node in every})
    assert len({node.slot for node in every}) == len(every), "two nodes share a slot"


def _check_node(node: Node, holders: list[tuple[ChunkTable, int]]) -> None:
    assert node.refs == len(holders), f"{len(holders)} tables hold a node that counts {node.refs}"
    for table, chunk in holders:
        filled = table.length >= (chunk + 1) * CHUNK
        assert filled or len(holders) == 1, "a partial chunk is shared"
        assert node.digest is None or node.digest == table.digest(chunk), "a table holds a chunk of other tokens"
        assert filled or node.writer is table, "a partial chunk is not its holder's own"
