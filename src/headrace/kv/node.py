"""A chunk in the pool, and its place in the prefix tree (kv.tree)."""

from __future__ import annotations

from typing import Any

from headrace.kv.accounts import Account
from headrace.types import CHUNK


class Node:
    """A chunk: its slot and, once it has a name, its place in the tree. A node without digest is private.

    tenant: whose a named chunk is (ChunkTable.tenant). pays: its name in the tiers
    (ChunkTable.payer). stored: whether a tier below has been given it. activations: whether
    the slot has the inputs of its projections too, where the pool keeps them. drafted: whether a draft model's K and V
    of the whole chunk lie in the slot, too. state: slot of the recurrent state behind a named chunk (kv.states); -1 for
    none.
    number: of a named chunk, how many are before it in every sequence that has it. hits: how often a table has attached
    it; used: when it was last attached, let go of or named (PrefixTree.now).
    account, guards, idle_since: see kv.accounts, which alone changes them.
    place, words: see kv.partial, which alone changes them. rows: of a tail that was left behind, which has no place in
    the tree and is nobody's child, how many there are (kv.names); else 64.
    alike: children of the same tenant; onward: that which goes on with its segment; entered, begins: see kv.segments.
    """

    __slots__ = (
        "account", "activations", "alike", "begins", "children", "digest", "drafted", "entered", "guards", "hits",
        "idle_since", "number", "onward", "parent", "pays", "place", "refs", "rows", "slot", "state", "stored",
        "tenant", "used", "words", "writer",
    )  # fmt: skip

    def __init__(self, slot: int, digest: bytes | None, parent: Node | None, writer: Any) -> None:
        self.slot = slot
        self.digest = digest
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.refs = 1
        self.writer = writer
        self.tenant = self.pays = b""
        self.stored = False
        self.activations = True
        self.drafted = False
        self.state = -1
        self.account: Account | None = None
        self.guards: dict[Account, int] | None = None
        self.idle_since = 0
        self.number = self.alike = self.entered = self.begins = self.hits = 0
        self.used = 0.0
        self.onward: Node | None = None
        self.place: tuple[bytes, bytes, bytes] | None = None
        self.words = b""
        self.rows = CHUNK

    @property
    def payer(self) -> bytes:
        """For whom tiers count it: whoever has the account, else its tenant with all salts, else the salt."""
        return self.pays if self.account is None else self.account.mark

    @property
    def whole(self) -> bool:
        return self.rows == CHUNK

    @property
    def complete(self) -> bool:
        return self.writer is None
