"""Storing chunks of several ranks, and the tiers of all of them as one."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from headrace.kv.tree import Node
from headrace.offload.parked import Parked
from headrace.offload.ranked import words
from headrace.offload.ranked.agent import TierAgent
from headrace.offload.ranked.joining import summed
from headrace.offload.ranked.peers import TierPeers
from headrace.offload.tiers.stack import Tiers
from headrace.stats import TierStats

log = logging.getLogger(__name__)

TELL_S = 0.2
"""Between two questions to ranks elsewhere how their tiers are."""


AT_ONCE = 8
"""Chunks that a rank elsewhere stores before it answers. Eviction and new requests may have to wait for so many."""


@dataclass(slots=True)
class ChunkStorer:
    """Has each chunk stored by the rank that owns it. tiers: rank 0's, which are like those of all ranks."""

    peers: TierPeers
    per_rank: int
    tiers: Tiers

    @property
    def in_memory(self) -> bool:
        """Whether one of the tiers is in memory."""
        return any(tier.in_memory for tier in self.tiers.tiers)

    @property
    def queued_bytes(self) -> int:
        """What waits to be written, as far as is known: by rank 0."""
        return self.tiers.queued_bytes

    def batches(self, nodes: Iterable[Node]) -> Iterator[list[Node]]:
        """What is stored at once, in the order given: a chunk of a rank in this process, or up to AT_ONCE of another,
        which acknowledges them together."""
        for rank, owned in groupby(nodes, key=self._rank_of):
            most = AT_ONCE if self.peers.here(rank) is None else 1
            while batch := list(islice(owned, most)):
                yield batch

    def _rank_of(self, node: Node) -> int:
        return node.slot // self.per_rank

    def store(self, batch: Sequence[Node], parked: Parked | None = None, *, in_memory: bool = False) -> None:
        """Offers the chunks to every tier that lacks them, or to those in memory alone; afterwards their slots may be
        written again. parked: by the thread, for which every tier is asked whether it has a chunk; otherwise by the
        engine. batch: one of `batches`.
        """
        chunks = [self._to_store(node, parked is not None, in_memory) for node in batch]
        rank = self._rank_of(batch[0])
        if (agent := self.peers.here(rank)) is not None:
            stored = all([agent.store(chunk, parked) for chunk in chunks])
        else:
            with contextlib.nullcontext() if parked is None else parked.lock:
                stored = parked is None or not parked.revoked
                if stored:
                    self.peers.call(rank, words.StoreChunks(0, chunks), words.ChunksStored)
        for node in batch if stored else ():
            node.stored = True

    def _to_store(self, node: Node, sure: bool, in_memory: bool) -> words.ChunkToStore:
        assert node.digest is not None
        slot = node.slot % self.per_rank
        place = node.number if self.peers.tensor > 1 else 0
        quota = None if node.account is None else node.account.tier_quota
        return words.ChunkToStore(slot, node.digest, node.payer, sure, in_memory, node.activations, place, quota)


class AllTiers:
    """The tiers of all ranks as one. Figures of ranks in other processes are those of their latest answers."""

    def __init__(self, peers: TierPeers) -> None:
        self.peers = peers
        self._told: dict[int, words.TiersTold] = {}
        self._asked_s = 0.0

    @property
    def _here(self) -> list[TierAgent]:
        return [agent for rank in range(self.peers.ranks) if (agent := self.peers.here(rank)) is not None]

    def _ask(self) -> None:
        now = time.monotonic()
        if now < self._asked_s:
            return
        self._asked_s = now + TELL_S
        for rank in self.peers.elsewhere:
            self.peers.ask(rank, words.TellTiers(0), self._told.__setitem__)

    def stats(self) -> dict[str, TierStats]:
        """By kind, of all ranks together."""
        self._ask()
        told = [each.told() for each in self._here] + list(self._told.values())
        return {kind: TierStats(**each) for kind, each in summed(told).items()}

    @property
    def queued_blobs(self) -> int:
        """Blobs that wait to be written, or are being written."""
        self._ask()
        here = sum(agent.opened.tiers.queued_blobs for agent in self._here)
        return here + sum(each.queued for each in list(self._told.values()))

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything offered is written or refused; False if that is not so after timeout_s."""
        end = time.monotonic() + timeout_s
        flushed = all([agent.opened.tiers.flush(timeout_s) for agent in self._here])
        while flushed and (others := self.peers.elsewhere):
            self._told |= self.peers.call_all({rank: words.TellTiers(0) for rank in others}, words.TiersTold)
            if not sum(told.queued for told in self._told.values()):
                break
            flushed = time.monotonic() < end
            time.sleep(0.01)
        return flushed

    def close(self, timeout_s: float) -> None:
        """Raises RankLost. May be called again."""
        if self.peers.closed:
            return
        self.peers.closed = True
        asked: dict[int, words.Command] = {rank: words.CloseTiers(0, timeout_s) for rank in range(self.peers.ranks)}
        try:
            told = self.peers.call_all(asked, words.TiersTold, timeout_s + 1.0)
        except RuntimeError:  # RankLost: what is here ends all the same, its memory is the next engine's
            for agent in self.peers.agents.values():
                agent.obey(words.CloseTiers(0, 0.0), lambda answer: None)
            raise
        if len(told) < len(asked):
            log.warning("the tiers of %d ranks did not close within %.0f s", len(asked) - len(told), timeout_s)
