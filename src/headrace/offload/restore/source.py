"""The chunks that the tiers hold, as prompts want them back: looked up on one copy stream, brought by another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.kv.chunk_table import ChunkTable
from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.copy_streams import CopyStream
from headrace.offload.restore.solver import StoredRun
from headrace.offload.restore.transfer import RestoreTransfer, WantedChunk
from headrace.offload.ticket import Ticket
from headrace.offload.tiers.base import BlobKind, name_of
from headrace.offload.tiers.stack import Tiers


class FoundChunk(NamedTuple):
    """A stored chunk: its name and the tiers that have its K and V, and its activations.

    Of several ranks: on[rank] says whence each can load it (offload.ranked.words), `rank` which one shall.
    """

    digest: bytes
    kv: int
    x: int | None
    on: tuple[Any, ...] = ()
    rank: int = 0


@dataclass(slots=True, eq=False)
class Lookup:
    """A question to the tiers. found: the chunks up to the first one that none has, once it is `done`."""

    ticket: Ticket
    found: list[FoundChunk] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.ticket.done

    def wait_briefly(self, seconds: float) -> None:
        """Until it is done, at most so long."""
        self.ticket.wait_briefly(seconds)


class StoredChunks:
    """bringing, looking: copy streams of their own, so that no lookup waits for a restore."""

    def __init__(self, tiers: Tiers, codec: ChunkCodec, bringing: CopyStream, looking: CopyStream) -> None:
        self.tiers, self.codec = tiers, codec
        self._bringing, self._looking = bringing, looking

    def look(self, digests: Sequence[bytes]) -> Lookup:
        """Asks the tiers, in the background."""
        found: list[FoundChunk] = []
        return Lookup(self._looking.submit(lambda: found.extend(self._find(digests)), 0, "look"), found)

    def _find(self, digests: Sequence[bytes]) -> list[FoundChunk]:
        kv = self.tiers.find([name_of(digest, "k") for digest in digests])
        count = next((i for i, tier in enumerate(kv) if tier is None), len(kv))
        x: Sequence[int | None] = [None] * count
        if self.codec.keeps_activations:
            x = self.tiers.find([name_of(digest, "x") for digest in digests[:count]])
        return [FoundChunk(digest, tier, other) for digest, tier, other in zip(digests, kv, x, strict=False)
                if tier is not None]  # fmt: skip

    def ways(self, table: ChunkTable, first: int, found: Sequence[FoundChunk]) -> list[list[FoundChunk]]:
        """Ways in which chunks first, first + 1, ... of a table can come, each as far as it goes: here there is one."""
        return [list(found)]

    def as_run(self, found: Sequence[FoundChunk], first: int, suffix: int) -> StoredRun:
        """What the solver is asked: the found chunks behind `first` resident ones, and `suffix` new tokens."""
        form = self.tiers.format(found[0].kv)
        has_x = all(each.x is not None for each in found)
        return StoredRun(
            first=first,
            chunks=len(found),
            suffix=suffix,
            kv_bytes=self.codec.blob_bytes("k", form),
            x_bytes=self.codec.blob_bytes("x", form) if has_x else None,
            layers=self.codec.spec.layers,
            tiers=tuple(self.tiers.kind(each.kv) for each in found),
        )

    def bring(
        self, found: Sequence[FoundChunk], first: int, slots: Sequence[int], projected: int, prompt_len: int
    ) -> RestoreTransfer:
        """Starts a restore of chunks first, first + 1, ... into these slots, the first `projected` of them as X."""
        wanted = []
        for i, (each, slot) in enumerate(zip(found, slots, strict=True)):
            kind: BlobKind = "x" if i < projected else "k"
            tier = each.x if kind == "x" and each.x is not None else each.kv
            wanted.append(WantedChunk(first + i, each.digest, slot, kind, tier))
        transfer = RestoreTransfer(self.codec, self.tiers, wanted, prompt_len)
        transfer.start(self._bringing)
        return transfer

    def close(self) -> None:
        """Ends the copy streams after what was submitted. May be called again."""
        self._bringing.close()
        self._looking.close()
