"""The prefix tree: chunks of 64 tokens, named by a hash chain, shared by every request that begins alike.

One tree serves all layers; a node owns one slot of the pool. A node is `pending` while one sequence, its writer, is
still filling it, and complete afterwards; only complete nodes are shared. Complete nodes that nobody holds stay, in
the order in which they were let go, until their slot is needed (least recently used leaf first).

    root (no node) -- chunk 0 --+-- chunk 1 --- chunk 2
                                +-- chunk 1'            refs: tables that hold the node; a child's refs <= its parent's
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from typing import Any

from headrace.kv.pool import SlotPool
from headrace.types import CHUNK


class Node:
    """A chunk: its slot and, once it has a name, its place in the tree. A node without digest is private."""

    __slots__ = ("children", "digest", "parent", "refs", "slot", "writer")

    def __init__(self, slot: int, digest: bytes | None, parent: Node | None, writer: Any) -> None:
        self.slot = slot
        self.digest = digest
        self.parent = parent
        self.children = 0
        self.refs = 1
        self.writer = writer

    @property
    def complete(self) -> bool:
        return self.writer is None


def chain(parent: bytes, tokens: array[int], salt: bytes = b"") -> bytes:
    """Name of the chunk of 64 `tokens` (unsigned 32 bit) after the chunk named `parent`; `salt` separates tenants."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=32, key=parent, salt=salt).digest()


class PrefixTree:
    """Named nodes and the order of eviction. Slots are taken from and returned to `pool`."""

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self.nodes: dict[bytes, Node] = {}
        self.idle: OrderedDict[bytes, Node] = OrderedDict()
        self.evictions = 0

    @property
    def available(self) -> int:
        """Slots that can be had now: free ones and those of idle nodes."""
        return self.pool.free + len(self.idle)

    def find(self, digest: bytes) -> Node | None:
        return self.nodes.get(digest)

    def take_slot(self) -> int | None:
        """A slot, at the price of the least recently used idle leaf if none is free; None if all are held."""
        slot = self.pool.take()
        if slot is None and self.idle:
            # A descendant is let go before (or with, and listed before) its ancestor: the oldest is always a leaf.
            node = next(iter(self.idle.values()))
            self._remove(node)
            self.evictions += 1
            slot = self.pool.take()
        return slot

    def insert(self, node: Node, digest: bytes, parent: Node | None) -> None:
        """Names a node that its holder owns alone. Raises ValueError if the name exists."""
        if digest in self.nodes:
            raise ValueError("a chunk of that name is in the tree already")
        node.digest, node.parent = digest, parent
        if parent is not None:
            parent.children += 1
        self.nodes[digest] = node

    def hold(self, node: Node) -> None:
        """One more table uses a complete node."""
        if node.refs == 0:
            assert node.digest is not None
            del self.idle[node.digest]
        node.refs += 1

    def release(self, node: Node) -> None:
        """One table fewer uses the node. Tables release from their last chunk to their first."""
        node.refs -= 1
        if node.refs:
            return
        if node.digest is None or not node.complete:
            self._remove(node)
        else:
            self.idle[node.digest] = node

    def clear(self) -> None:
        """Forgets all idle nodes."""
        while self.idle:
            self._remove(next(iter(self.idle.values())))

    def _remove(self, node: Node) -> None:
        if node.digest is not None:
            del self.nodes[node.digest]
            self.idle.pop(node.digest, None)
            if node.parent is not None:
                node.parent.children -= 1
        self.pool.give(node.slot)

    def check(self) -> None:
        """Raises AssertionError unless names, children, idleness and the order of eviction agree."""
        children: dict[int, int] = {}
        for digest, node in self.nodes.items():
            assert node.digest == digest, "a node stands under another name"
            assert (node.refs == 0) == (digest in self.idle), "idle means complete and held by nobody"
            assert node.refs >= 0 and (node.refs or node.complete), "a pending node has its writer as holder"
            assert node.complete or node.refs == 1, "a pending node is not shared"
            if node.parent is not None:
                assert self.nodes.get(node.parent.digest or b"") is node.parent, "a parent left before its child"
                assert node.parent.refs >= node.refs, "a child is held more often than its parent"
                children[id(node.parent)] = children.get(id(node.parent), 0) + 1
        for node in self.nodes.values():
            assert node.children == children.get(id(node), 0), "the count of children is off"
        age = {digest: order for order, digest in enumerate(self.idle)}
        for digest, node in self.idle.items():
            parent = node.parent
            if parent is not None and parent.refs == 0:
                assert age[digest] < age[parent.digest or b""], "an idle parent would be evicted before its child"


def token_array(tokens: list[int]) -> array[int]:
    """Tokens as unsigned 32-bit integers, the form that is hashed."""
    return array("I", tokens)


assert array("I").itemsize == 4 and CHUNK == 64
