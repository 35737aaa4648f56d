"""The chunks that the tiers of all ranks hold (restore.source, of several ranks)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from headrace.kv.cache import KVCache
from headrace.kv.chunk_table import ChunkTable
from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.ranked import words
from headrace.offload.ranked.peers import TierPeers
from headrace.offload.ranked.placing import placements
from headrace.offload.restore.rates import Rates
from headrace.offload.restore.report import RestoreReport
from headrace.offload.restore.solver import StoredRun
from headrace.offload.restore.source import FoundChunk
from headrace.offload.restore.transfer import RestoreTransfer
from headrace.offload.tiers.base import BlobFormat
from headrace.types import BLOCK_CHUNKS


@dataclass(slots=True, eq=False)
class RankedLookup:
    """A question to the tiers of all ranks. found: the chunks up to the first one that no rank has."""

    digests: Sequence[bytes]
    ranks: int
    answers: dict[int, list[int | None]] = field(default_factory=dict)
    _there: threading.Event = field(default_factory=threading.Event)

    def note(self, rank: int, answer: words.ChunksFound) -> None:
        """On any thread."""
        self.answers[rank] = answer.tiers
        if len(self.answers) == self.ranks:
            self._there.set()

    @property
    def done(self) -> bool:
        return self._there.is_set()

    def wait_briefly(self, seconds: float) -> None:
        """Until it is done, at most so long."""
        self._there.wait(seconds)

    @property
    def found(self) -> list[FoundChunk]:
        reach = zip(*(self.answers[rank] for rank in range(self.ranks)), strict=True)
        some = (FoundChunk(digest, -1, None, on) for digest, on in zip(self.digests, reach, strict=True))
        return list(takewhile(lambda each: any(tier is not None for tier in each.on), some))


class RankedReport(RestoreReport):
    """What comes of a restore of which each rank has a part. of[rank]: its chunks' places in the run."""

    def __init__(self, tier: str, chunks: int, of: dict[int, list[int]]) -> None:
        super().__init__(["k"] * chunks, tier)
        self.of = of
        self.there = threading.Event()
        self._parts: list[words.ChunksBrought] = []
        self._lock = threading.Lock()

    def add(self, rank: int, part: words.ChunksBrought) -> None:
        """On any thread."""
        mine = self.of[rank]
        with self._lock:
            self._parts.append(part)
            if part.good < len(mine):
                self.lose(mine[part.good], f"rank {rank}: {part.reason}")
            self.cpu_s = max(each.cpu_s for each in self._parts)
            if len(self._parts) == len(self.of):
                self.there.set()

    @property
    def done(self) -> bool:
        return self.there.is_set()

    @property
    def link_s(self) -> float:
        """Of the rank that took longest."""
        return max((part.link_s for part in self._parts), default=0.0)

    @property
    def layer_transfers(self) -> list[tuple[int, float]]:
        return [each for part in self._parts for each in part.layers]

    def tell(self, rates: Rates) -> None:
        if not self.failed:
            rates.observe_together(self.tier, self.layer_transfers)


@dataclass(slots=True, eq=False)
class RankedRestore:
    """A restore under way on several ranks. numbers: of each rank's part."""

    report: RankedReport
    peers: TierPeers
    numbers: dict[int, int]

    @property
    def here(self) -> list[RestoreTransfer]:
        """None: each rank waits for its own (TierAgent.pending)."""
        return []

    def cancel(self) -> None:
        self.report.cancelled = True
        for rank, number in self.numbers.items():
            self.peers.tell(rank, words.CancelBring(number))

    def finish(self) -> None:
        """Waits for the last word of every rank. Raises RankLost."""
        self.peers.wait(self.report.there)


class RankedChunks:
    """codec, formats, kinds: as those of rank 0, which all ranks share."""

    def __init__(self, peers: TierPeers, cache: KVCache, codec: ChunkCodec, formats: Sequence[BlobFormat],
                 kinds: Sequence[str]) -> None:  # fmt: skip
        self.peers, self.cache, self.codec = peers, cache, codec
        self._formats, self._kinds = formats, kinds

    def look(self, digests: Sequence[bytes]) -> RankedLookup:
        lookup = RankedLookup(digests, self.peers.ranks)
        for rank in range(self.peers.ranks):
            self.peers.ask(rank, words.FindChunks(0, list(digests)), lookup.note)
        return lookup

    def ways(self, table: ChunkTable, first: int, found: Sequence[FoundChunk]) -> list[list[FoundChunk]]:
        """The chunks as far as they can come, each with the rank and the tier that it comes from."""
        begun = table.owner(first - 1) if first % BLOCK_CHUNKS else None
        room = [self.cache.available_on(rank) for rank in range(self.peers.ranks)]
        ways = []
        for owners in placements(first, [each.on for each in found], room, begun):
            placed = []
            for each, rank in zip(found, owners, strict=False):
                tier = each.on[rank]
                assert tier is not None, "a rank loads what it has in reach"
                placed.append(each._replace(kv=tier, rank=rank))
            ways.append(placed)
        return ways

    def as_run(self, found: Sequence[FoundChunk], first: int, suffix: int) -> StoredRun:
        """See StoredChunks.as_run; the found chunks are a way."""
        return StoredRun(
            first=first,
            chunks=len(found),
            suffix=suffix,
            kv_bytes=self.codec.blob_bytes("k", self._formats[found[0].kv]),
            x_bytes=None,
            layers=self.codec.spec.layers,
            tiers=tuple(self._kinds[each.kv] for each in found),
            ranks=tuple(each.rank for each in found),
        )

    def bring(
        self, found: Sequence[FoundChunk], first: int, slots: Sequence[int], projected: int, prompt_len: int
    ) -> RankedRestore:
        """Starts a restore of chunks first, first + 1, ... into these slots of all ranks together."""
        assert projected == 0, "ranks store no activations"
        of: dict[int, list[int]] = {}
        for index, each in enumerate(found):
            of.setdefault(each.rank, []).append(index)
        tiers = [each.kv for each in found]
        report = RankedReport(self._kinds[max(set(tiers), key=tiers.count)], len(found), of)
        restore = RankedRestore(report, self.peers, {})
        per_rank = self.cache.pool.per_rank
        for rank, mine in of.items():
            chunks = [words.WantedHere(first + i, found[i].digest, slots[i] % per_rank, found[i].kv) for i in mine]
            command = words.BringChunks(0, chunks, prompt_len)
            restore.numbers[rank] = self.peers.ask(rank, command, report.add)
        return restore

    def close(self) -> None:
        """The agents' streams end with their tiers (RankedTiers.close)."""
