"""The table of a sequence: its chunks in order, their slots and their names."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headrace.kv.accounts import Account
from headrace.kv.partial import Place
from headrace.kv.table_state import TableState
from headrace.kv.tree import Node, chain, token_array
from headrace.types import CHUNK

Owners = Callable[[int], int]
"""Chunk of a table -> the rank that shall own it."""


class ChunkTable:
    """The chunks of one sequence. `tokens` is the sequence's own growing list; `length` counts those cached.

    coming: loose chunks (KVCache.take_loose) that are meant for it. joins: (number of the first of them, its owner),
    where what is computed before it may be of the same block.
    reusable: tokens from the beginning that may be taken from elsewhere; None: all.
    place: may be set by whoever prepares a step: the owner of each block that begins, named by its first chunk.
    account: of the tenant, where it has one: its chunks but for public ones are charged to it. pays: what stands for
    the tenant in the tiers, where it has a name. mark: see KVCache.open.
    changes: how often its chunks have changed. track: its recurrent state; used by kv.states alone.
    """

    __slots__ = (
        "_digests", "_mark", "_per_rank", "_root", "_salt", "_salt_chunk", "_slots", "account", "changes", "coming",
        "joins", "length", "nodes", "pays", "place", "reusable", "shares", "tokens", "track",
    )  # fmt: skip

    def __init__(
        self, tokens: list[int], root: bytes, salt: bytes, salt_chunk: int, shares: bool, per_rank: int,
        mark: tuple[bytes, int] | None = None,
    ) -> None:  # fmt: skip
        self.tokens = tokens
        self.length = 0
        self.coming = 0
        self.joins: tuple[int, int] | None = None
        self.changes = 0
        self.nodes: list[Node] = []
        self.shares = shares
        self.account: Account | None = None
        self.pays = b""
        self.track = TableState(len(tokens))
        self.reusable: int | None = None
        self.place: Owners | None = None
        self._per_rank = per_rank
        self._root = root
        self._salt = salt
        self._salt_chunk = salt_chunk
        self._mark = mark
        self._digests: list[bytes] = []
        self._slots: NDArray[np.int32] = np.empty(16, dtype=np.int32)

    @property
    def slots(self) -> NDArray[np.int32]:
        """Slots of the chunks in order, int32 [chunks]; valid until the table changes."""
        return self._slots[: len(self.nodes)]

    @property
    def reusable_chunks(self) -> int:
        """Chunks that may be taken from elsewhere: never that of the last known token, so that at least one token is
        left to compute."""
        most = (len(self.tokens) - 1) // CHUNK
        return most if self.reusable is None else min(most, self.reusable // CHUNK)

    def owner(self, chunk: int) -> int:
        """Rank that has the chunk, which the table must hold."""
        return self.nodes[chunk].slot // self._per_rank

    def digest(self, chunk: int) -> bytes:
        """Name of the chunk, all of whose tokens must be known."""
        while len(self._digests) <= chunk:
            self._extend_digests(chunk + 1)
        return self._digests[chunk]

    def _extend_digests(self, chunks: int) -> None:
        first = len(self._digests)
        known = token_array(self.tokens[first * CHUNK : chunks * CHUNK])
        if len(known) < (chunks - first) * CHUNK:
            raise ValueError(f"chunk {chunks - 1} is not full: {len(self.tokens)} tokens")
        parent = self._digests[-1] if first else self._root
        for chunk in range(first, chunks):
            start = (chunk - first) * CHUNK
            parent = chain(parent, known[start : start + CHUNK], *self._said_at(chunk))
            self._digests.append(parent)

    def _said_at(self, chunk: int) -> tuple[bytes, bytes]:
        """Salt and mark that begin with the chunk."""
        salt = self._salt if chunk == self._salt_chunk else b""
        return salt, self._mark[0] if self._mark is not None and chunk == self._mark[1] else b""

    def stands_at(self, chunk: int) -> Place:
        """Of a chunk all tokens before which are known."""
        return self.digest(chunk - 1) if chunk else self._root, *self._said_at(chunk)

    @property
    def _made_by(self) -> tuple[bytes, bytes, int, tuple[bytes, int] | None]:
        """What names depend on beside the tokens."""
        return self._root, self._salt, self._salt_chunk, self._mark

    def borrow(self, other: ChunkTable) -> None:
        """Takes the names of the chunks with which both begin from the other table: tokens are compared in a third of
        the time in which they are hashed."""
        if self._made_by != other._made_by:
            return
        tokens, theirs = self.tokens, other.tokens
        for chunk in range(len(self._digests), min(len(other._digests), len(tokens) // CHUNK)):
            begin, end = chunk * CHUNK, (chunk + 1) * CHUNK
            if tokens[begin:end] != theirs[begin:end]:
                return
            self._digests.append(other._digests[chunk])

    def tenant(self, chunk: int) -> bytes:
        """Whose the chunk is: 16 bytes made of the salt, none for a chunk that all tenants may share."""
        return self._salt if 0 <= self._salt_chunk <= chunk else b""

    def payer(self, chunk: int) -> bytes:
        """For whom tiers count the chunk: the tenant with all its salts, where it has a name, else the salt."""
        own = self.tenant(chunk)
        return own and (self.pays or own)

    @property
    def public_chunks(self) -> int:
        """Chunks that it holds and that all tenants may share."""
        return min(len(self.nodes), self._salt_chunk) if self._salt_chunk >= 0 else len(self.nodes)

    def account_of(self, chunk: int) -> Account | None:
        """Whose the chunk is."""
        return self.account if self.tenant(chunk) else None

    def node_before(self, chunk: int | None = None) -> Node | None:
        """The node before `chunk` (default: the last one). Named chunks are held together with all before them."""
        count = len(self.nodes) if chunk is None else chunk
        return self.nodes[count - 1] if count else None

    def append(self, node: Node) -> None:
        count = len(self.nodes)
        if count == len(self._slots):
            self._slots = np.concatenate([self._slots, np.empty_like(self._slots)])
        self._slots[count] = node.slot
        self.nodes.append(node)
        self.changes += 1

    def cut(self, chunk: int) -> list[Node]:
        """Takes away the chunks from `chunk` on, and returns them."""
        gone = self.nodes[chunk:]
        del self.nodes[chunk:]
        self.length = min(self.length, chunk * CHUNK)
        self.changes += 1
        return gone

    def replace(self, chunk: int, node: Node) -> None:
        self.nodes[chunk] = node
        self._slots[chunk] = node.slot
        self.changes += 1
