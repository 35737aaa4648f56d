"""Recurrent states in the tiers of rank 0: stored when they are evicted or the engine is idle, read when a restore of
the chunks before them has come.

All is done by the thread that computes: a state changes at no other moment. A state that another rank has is fetched
first; one that was read is with rank 0.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from headrace.kv.states import StateCache
from headrace.kv.table_state import NONE
from headrace.kv.tree import Node
from headrace.offload import frame
from headrace.offload.ranked.agent import offer
from headrace.offload.state_codec import StateCodec
from headrace.offload.tiers.base import Read, name_of
from headrace.offload.tiers.stack import Tiers
from headrace.offload.writeback import IDLE_QUEUE

log = logging.getLogger(__name__)


class StateHome(Protocol):
    """Who knows which rank has a state."""

    def fetch(self, slot: int) -> int:
        """Returns when this rank has the state in the slot: where, in the memory of the codec. Raises RankLost."""
        ...

    def place(self, slot: int) -> int:
        """Where in that memory a state is to be put that is for the slot."""
        ...

    def written(self, slot: int) -> None:
        """This rank has put the state for the slot there. Raises RankLost."""


class OnlyRank(StateHome):
    """There is one rank."""

    def fetch(self, slot: int) -> int:
        return slot

    def place(self, slot: int) -> int:
        return slot

    def written(self, slot: int) -> None:
        pass


class StoredStates:
    """only_idle: nothing is given to disk while the engine computes (offload.writeback). home: may be set."""

    def __init__(self, cache: StateCache, codec: StateCodec, tiers: Tiers, only_idle: bool) -> None:
        self.cache, self.codec, self.tiers, self.only_idle = cache, codec, tiers, only_idle
        self.home: StateHome = OnlyRank()
        self._stored: set[bytes] = set()
        self._waiting: list[Node] = []
        """Some of the chunks whose states may not be stored, the next one last."""
        cache.leaving = self._leaving

    def find(self, digests: Sequence[bytes]) -> list[int | None]:
        """The tier that has the state behind each chunk."""
        return self.tiers.find([name_of(digest, "s") for digest in digests])

    def store(self, node: Node) -> None:
        """Gives the state behind a chunk to the tiers, if it has one that was not given to them."""
        if node.state != NONE:
            self._store(node)

    def _leaving(self, node: Node) -> None:
        self._store(node, in_memory=self.only_idle)

    def _store(self, node: Node, in_memory: bool = False) -> None:
        digest = node.digest
        if digest is None or digest in self._stored:
            return
        name = name_of(digest, "s")
        lacking = self.tiers.doubtful(name)
        if in_memory:
            lacking = [tier for tier in lacking if not self.tiers.queues(tier)]
        else:
            self._stored.add(digest)
        if lacking:
            place = self.home.fetch(node.state)
            offer(self.tiers, lacking, name, node.payer, self.codec.encode(place, digest))

    def store_idle(self) -> bool:
        """Stores one state that is not stored, unless enough waits to be written; False if there is none."""
        node = self._next() or self._next(look=True)
        if node is not None and self.tiers.queued_bytes <= IDLE_QUEUE:
            self._store(node)
        return node is not None

    def _next(self, look: bool = False) -> Node | None:
        """A chunk with a state that is not stored. look: through all of the cache, not those found before alone."""
        if look:
            self._waiting = [each for each in self.cache.nodes() if each.digest not in self._stored][::-1]
        while self._waiting:
            node = self._waiting[-1]
            if node.state != NONE and node.complete and node.digest not in self._stored:
                return node
            self._waiting.pop()
        return None

    def store_all(self, timeout_s: float) -> None:
        """What is not stored yet, within that time."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self.store_idle():
            self.tiers.flush(max(0.0, end - time.monotonic()))

    def load(self, digest: bytes, slot: int) -> str:
        """Reads the state behind a chunk into a slot. Why it could not; empty where it is there."""
        assert slot != NONE
        name = name_of(digest, "s")
        (tier,) = self.tiers.find([name])
        if tier is None:
            return "the state behind the last chunk is gone"
        blob = torch.empty(self.codec.blob_bytes, dtype=torch.uint8)
        if not all(self.tiers.read(tier, [Read(name, 0, memoryview(blob.numpy().data).cast("B"))])):
            return "the state behind the last chunk cannot be read"
        try:
            self.codec.decode(blob, digest, self.home.place(slot))
        except frame.DamagedBlob as error:
            self.tiers.drop([name])
            return f"the state behind the last chunk {error}"
        self._stored.add(digest)
        self.home.written(slot)
        return ""
