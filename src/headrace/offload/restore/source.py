"""The chunks that the tiers of all ranks hold, as prompts want them back. One rank is a group of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.arrival import Arrival
from headrace.kv.cache import KVCache
from headrace.kv.chunk_table import ChunkTable
from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.ranked import words
from headrace.offload.ranked.peers import TierPeers
from headrace.offload.ranked.placing import placements
from headrace.offload.restore.report import RestoreReport
from headrace.offload.restore.run_costs import StoredRun
from headrace.offload.tiers.base import BlobKind
from headrace.offload.tiers.stack import Tiers
from headrace.types import BLOCK_CHUNKS


class FoundChunk(NamedTuple):
    """A stored chunk: its name; on[rank]: whence each rank can load its K and V; x_on[rank]: the tier that has its
    activations; `rank`: the one that shall."""

    digest: bytes
    on: tuple[words.Reach | None, ...]
    x_on: tuple[int | None, ...]
    rank: int = 0

    @property
    def places(self) -> words.Reach:
        """Those that its K and V come from."""
        found = self.on[self.rank]
        assert found is not None, "a rank loads what it has in reach"
        return found

    @property
    def kv(self) -> int:
        """The slowest tier of them, which decides."""
        return max(place.tier for place in self.places)

    @property
    def x(self) -> int | None:
        """The tier that its activations come from."""
        return self.x_on[self.rank]


class Lookup(Arrival):
    """The answer to a question to the tiers of all ranks. found: the chunks up to the first one that no rank has, once
    it is `done`."""

    def __init__(self, digests: Sequence[bytes], ranks: int) -> None:
        super().__init__()
        self.digests, self.found = digests, list[FoundChunk]()
        self._answers: list[words.ChunksFound | None] = [None] * ranks

    def note(self, rank: int, answer: words.ChunksFound) -> None:
        """On any thread."""
        self._answers[rank] = answer
        answers = [each for each in self._answers if each is not None]
        if len(answers) == len(self._answers):
            self.found = list(self._found(answers))
            self.end()

    def _found(self, answers: Sequence[words.ChunksFound]) -> Iterator[FoundChunk]:
        for at, digest in enumerate(self.digests):
            on = tuple(each.places[at] for each in answers)
            if all(tier is None for tier in on):
                break
            yield FoundChunk(digest, on, tuple(each.x[at] if at < len(each.x) else None for each in answers))


@dataclass(slots=True, eq=False)
class Restore:
    """A restore under way, each rank's part by its number."""

    report: RestoreReport
    peers: TierPeers
    numbers: dict[int, int]

    def cancel(self) -> None:
        """Lets the copy streams skip what is left; the slots may be used again when the report is `done`."""
        self.report.cancelled = True
        for rank, number in self.numbers.items():
            self.peers.tell(rank, words.CancelBring(number))

    def finish(self) -> None:
        """After a step that waited for it, or once it is `done`: the last word of every rank. Raises RankLost."""
        self.peers.wait(self.report.there)
        asked: dict[int, words.Command] = {rank: words.EndBring(0, number) for rank, number in self.numbers.items()}
        self.report.add_ended(self.peers.call_all(asked, words.BringEnded).values())


class StoredChunks:
    """codec, tiers: those of rank 0, which are like those of all ranks."""

    def __init__(self, peers: TierPeers, cache: KVCache, codec: ChunkCodec, tiers: Tiers) -> None:
        self.peers, self.cache, self.codec, self._tiers = peers, cache, codec, tiers

    def look(self, digests: Sequence[bytes], first: int) -> Lookup:
        """Asks the tiers, in the background, for chunks first, first + 1, ... of a sequence."""
        lookup = Lookup(digests, self.peers.ranks)
        for rank in range(self.peers.ranks):
            self.peers.ask(rank, words.FindChunks(0, list(digests), first), lookup.note)
        return lookup

    def ways(self, table: ChunkTable, first: int, found: Sequence[FoundChunk]) -> list[list[FoundChunk]]:
        """Ways in which chunks first, first + 1, ... of a table can come, each as far as it goes: on which ranks."""
        begun = table.owner(first - 1) if first % BLOCK_CHUNKS else None
        room = [self.cache.available_on(rank, table.account) for rank in range(self.peers.ranks)]
        return [
            [each._replace(rank=rank) for each, rank in zip(found, owners, strict=False)]
            for owners in placements(first, [each.on for each in found], room, begun)
        ]

    def as_run(self, found: Sequence[FoundChunk], first: int, suffix: int) -> StoredRun:
        """What the solver is asked: the found chunks, which are a way, behind `first` resident ones, and `suffix` new
        tokens."""
        form = self._tiers.format(found[0].kv)
        has_x = tuple(each.x is not None for each in found)
        return StoredRun(
            first=first,
            chunks=len(found),
            suffix=suffix,
            kv_bytes=self.codec.blob_bytes("k", form),
            x_bytes=self.codec.blob_bytes("x", form) if any(has_x) else None,
            layers=self.codec.layers,
            tiers=tuple(self._tiers.kind(each.kv) for each in found),
            ranks=tuple(each.rank for each in found) if self.peers.ranks > 1 else (),
            has_x=() if all(has_x) else has_x,
            x_turns=self.peers.tensor,
        )

    def bring(
        self, found: Sequence[FoundChunk], first: int, slots: Sequence[int], projected: int, prompt: words.Prompt
    ) -> Restore:
        """Starts a restore of chunks first, first + 1, ... into these slots of all ranks together, the first
        `projected` of them as activations."""
        of: dict[int, list[words.WantedHere]] = {}
        places: dict[int, list[int]] = {}
        kinds: list[BlobKind] = ["x" if i < projected else "k" for i in range(len(found))]
        tiers, per_rank = [], self.cache.pool.per_rank
        for i, (each, slot) in enumerate(zip(found, slots, strict=True)):
            reach = (words.Place(each.x),) if kinds[i] == "x" and each.x is not None else each.places
            tiers.append(max(place.tier for place in reach))
            places.setdefault(each.rank, []).append(i)
            wanted = words.WantedHere(first + i, each.digest, slot % per_rank, reach, kinds[i])
            of.setdefault(each.rank, []).append(wanted)
        report = RestoreReport(kinds, self._tiers.kind(max(set(tiers), key=tiers.count)), places)
        restore = Restore(report, self.peers, {})
        for rank, chunks in of.items():
            restore.numbers[rank] = self.peers.ask(rank, words.BringChunks(0, chunks, prompt), report.add)
        return restore
