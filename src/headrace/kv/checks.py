"""Whether tables, nodes and slots agree. For tests: a full walk."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from headrace.kv.chunk_table import ChunkTable
from headrace.kv.table_state import NONE
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


def check_states(
    slots: Sequence[int],
    owned_by_none: Sequence[int],
    refs: Mapping[int, int],
    nodes: Mapping[int, Node],
    tables: Iterable[ChunkTable],
    tree: PrefixTree,
) -> None:
    """Raises AssertionError unless the tables own all other slots of recurrent states, hold as many as `refs` says, and
    just `nodes` of the tree know the slots that are kept behind them."""
    tracks = [table.track for table in tables]
    own = [track.slot for track in tracks if track.owns]
    held = [track.slot for track in tracks if not track.owns and track.slot != NONE]
    assert not any(track.ahead for track in tracks), "a draft was not settled"
    assert sorted([*owned_by_none, *own]) == list(slots), "a state's slot is lost or doubled"
    assert {slot: held.count(slot) for slot in held} == refs, "states are held by others than is counted"
    known = {node.state: node for node in tree.nodes.values() if node.state != NONE}
    assert known == nodes, "a chunk knows another state than is kept behind it"
