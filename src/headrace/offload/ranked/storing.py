"""Storing chunks of several ranks, and the tiers of all of them as one."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from headrace.kv.tree import Node
from headrace.offload.ranked import words
from headrace.offload.ranked.joining import summed
from headrace.offload.ranked.peers import TierPeers
from headrace.offload.writeback import Parked, Storer
from headrace.stats import TierStats

log = logging.getLogger(__name__)

TELL_S = 0.2
"""Between two questions to the ranks how their tiers are."""


@dataclass(slots=True)
class RankedStorer(Storer):
    """Has each chunk stored by the rank that owns it. in_memory: whether the ranks have a tier in memory."""

    peers: TierPeers
    per_rank: int
    in_memory: bool
    queued_bytes: int = 0

    def store(self, node: Node, parked: Parked | None = None, *, in_memory: bool = False) -> None:
        digest = node.digest
        assert digest is not None
        rank, slot = divmod(node.slot, self.per_rank)
        command = words.StoreChunk(0, slot, digest, node.tenant, parked is not None, in_memory)
        if parked is None:
            self.peers.call(rank, command, words.ChunkStored)
        else:
            with parked.lock:
                if parked.revoked:
                    return
                self.peers.call(rank, command, words.ChunkStored)
        node.stored = True


class RankedTiers:
    """What StoredPrefixes asks of the tiers of all ranks. Figures are those of the latest answer of each rank."""

    def __init__(self, peers: TierPeers) -> None:
        self.peers = peers
        self._told: dict[int, words.TiersTold] = {}
        self._asked_s = 0.0

    def _ask(self) -> None:
        now = time.monotonic()
        if now < self._asked_s:
            return
        self._asked_s = now + TELL_S
        for rank in range(self.peers.ranks):
            self.peers.ask(rank, words.TellTiers(0), self._told.__setitem__)

    def stats(self) -> dict[str, TierStats]:
        """By kind, of all ranks together."""
        self._ask()
        return {kind: TierStats(**each) for kind, each in summed(list(self._told.values())).items()}

    @property
    def queued_blobs(self) -> int:
        self._ask()
        return sum(told.queued for told in list(self._told.values()))

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything offered is written or refused; False if that is not so after timeout_s."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            asked: dict[int, words.Command] = {rank: words.TellTiers(0) for rank in range(self.peers.ranks)}
            self._told |= self.peers.call_all(asked, words.TiersTold)
            if not sum(told.queued for told in self._told.values()):
                return True
            time.sleep(0.01)
        return False

    def close(self, timeout_s: float) -> None:
        """Raises RankLost."""
        if self.peers.closed:
            return
        self.peers.closed = True
        asked: dict[int, words.Command] = {rank: words.CloseTiers(0, timeout_s) for rank in range(self.peers.ranks)}
        told = self.peers.call_all(asked, words.TiersTold, timeout_s + 1.0)
        if len(told) < len(asked):
            log.warning("the tiers of %d ranks did not close within %.0f s", len(asked) - len(told), timeout_s)
