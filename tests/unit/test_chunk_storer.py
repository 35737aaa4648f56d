"""Chunks of ranks in other processes are stored, and acknowledged, several at a time."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kv.accounts import Account
from headrace.kv.chunk_table import ChunkTable
from headrace.kv.pool import SlotPool
from headrace.kv.tree import Node
from headrace.offload.parked import Parked
from headrace.offload.ranked import words
from headrace.offload.ranked.peers import TierPeers
from headrace.offload.ranked.storing import AT_ONCE, ChunkStorer
from headrace.offload.tiers.stack import Tiers

pytestmark = pytest.mark.unit

PER_RANK = 64


class Here:
    """Stands for the agent of a rank in this process. stored: slots."""

    def __init__(self) -> None:
        self.stored: list[int] = []

    def store(self, chunk: words.ChunkToStore, parked: Parked | None) -> bool:
        self.stored.append(chunk.slot)
        return parked is None or not parked.revoked


class Ranks:
    """Rank 0 here, the others over links that answer at once. sent: (rank, slots) of each message to one."""

    def __init__(self, ranks: int, tensor: int = 1) -> None:
        self.here = Here()
        self.sent: list[tuple[int, list[int]]] = []
        self.payers: list[tuple[bytes, float | None]] = []
        self.peers = TierPeers(ranks, {0: cast(Any, self.here)}, self._send, tensor=tensor)
        self.storer = ChunkStorer(self.peers, PER_RANK, cast(Tiers, None))

    def _send(self, world: int, body: bytes) -> None:
        command = words.command(body)
        assert isinstance(command, words.StoreChunks)
        self.sent.append((world, [chunk.slot for chunk in command.chunks]))
        self.payers += [(chunk.tenant, chunk.quota) for chunk in command.chunks]
        self.peers.received(world, words.encode(words.ChunksStored(command.number)))

    def store(self, nodes: list[Node], parked: Parked | None = None) -> None:
        for batch in self.storer.batches(nodes):
            self.storer.store(batch, parked)


def node(slot: int) -> Node:
    return Node(slot, bytes(32), None, None)


def parked(nodes: list[Node]) -> Parked:
    return Parked(cast(ChunkTable, None), nodes, threading.Lock())


def test_chunks_of_an_account_are_its_own_under_every_salt() -> None:
    ranks, account = Ranks(2), Account("acme", SlotPool(PER_RANK))
    account.tier_quota = 0.5
    nodes = [node(PER_RANK + number) for number in range(3)]
    nodes[0].pays, nodes[1].pays, nodes[2].pays = b"one", b"two", b"another"
    nodes[0].account = nodes[1].account = account
    ranks.store(nodes)
    assert ranks.payers == [(account.mark, 0.5), (account.mark, 0.5), (b"another", None)]
    assert account.mark != Account("globex", SlotPool(PER_RANK)).mark


def test_messages_of_a_prompt() -> None:
    """70 chunks, 38 of them on rank 1: five messages there, where one by one they took 38, each with its answer."""
    ranks = Ranks(2)
    nodes = [node(slot) for slot in (*range(32), *range(PER_RANK, PER_RANK + 38))]
    ranks.store(nodes, parked(nodes))
    assert ranks.here.stored == list(range(32))
    assert ranks.sent == [(1, list(range(at, min(at + AT_ONCE, 38)))) for at in range(0, 38, AT_ONCE)]
    assert len(ranks.sent) == 5 and all(each.stored for each in nodes)


@given(st.lists(st.integers(0, 3 * PER_RANK - 1), max_size=60))
def test_every_chunk_once_in_the_order_given(slots: list[int]) -> None:
    ranks = Ranks(3)
    nodes = [node(slot) for slot in slots]
    ranks.store(nodes)
    assert all(each.stored for each in nodes)
    for rank in range(3):
        told = ranks.here.stored if rank == 0 else [slot for to, batch in ranks.sent if to == rank for slot in batch]
        assert told == [slot % PER_RANK for slot in slots if slot // PER_RANK == rank]
    assert all(1 <= len(batch) <= AT_ONCE for _, batch in ranks.sent)


def test_nothing_is_read_once_it_is_revoked() -> None:
    ranks = Ranks(2)
    nodes = [node(slot) for slot in (3, PER_RANK + 4, PER_RANK + 5)]
    table = parked(nodes)
    table.revoked = True
    ranks.store(nodes, table)
    assert not ranks.sent and not any(each.stored for each in nodes)


def test_tensor_ranks_acknowledge_together() -> None:
    ranks = Ranks(1, tensor=2)
    ranks.peers.agents.clear()
    nodes = [node(slot) for slot in range(AT_ONCE + 1)]
    ranks.store(nodes)
    first, last = list(range(AT_ONCE)), [AT_ONCE]
    assert ranks.sent == [(0, first), (1, first), (0, last), (1, last)] and all(each.stored for each in nodes)
