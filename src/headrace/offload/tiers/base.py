"""What a tier is: a store of named blobs below the pool, which may lose any of them at any time.

A blob is one chunk's keys and values ("k") or its activations ("x"), of all layers (frame). Its name is the chunk's
digest, which the model, the types, the tenant's salt and all tokens up to the chunk's end went into, and the kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from headrace.config import OffloadFormat as BlobFormat
from headrace.stats import TierStats

__all__ = ["BlobFormat", "BlobKind", "BlobParts", "Read", "ReadGuess", "Tier", "TierStats", "flat", "name_of"]

BlobKind = Literal["k", "x"]

BlobParts = Sequence[bytes | bytearray | memoryview]


def name_of(digest: bytes, kind: BlobKind) -> bytes:
    """33 bytes."""
    return digest + kind.encode()


def flat(part: bytes | bytearray | memoryview) -> memoryview:
    """The bytes of something contiguous."""
    view = memoryview(part)
    return view.cast("B") if view.nbytes else memoryview(b"")


class Read(NamedTuple):
    """len(into) bytes of a blob from `offset` on are wanted in `into`, a writable flat memoryview of bytes."""

    name: bytes
    offset: int
    into: memoryview


class ReadGuess(NamedTuple):
    """Seconds of a byte and of a call, before a tier was ever read from."""

    byte_s: float
    call_s: float


class Tier(Protocol):
    """Safe to call from several threads. No method raises for what the world does to the store (full, gone, slow,
    damaged, changed by another process): it is logged once per kind, counted, and the answer is "not there". No call
    takes longer than the tier's time-out by much.
    """

    @property
    def kind(self) -> str:
        """What metrics and logs call it; of the tiers of an engine no two are alike."""

    @property
    def format(self) -> BlobFormat: ...

    @property
    def in_memory(self) -> bool:
        """Whether its calls are copies in this process: no queue is needed before `put`, and no probe."""

    @property
    def read_guess(self) -> ReadGuess: ...

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """Whether each blob is there, as far as is known. Those that are count as used now, the first of them last:
        name a run's chunks from its start, so that it loses its end first (no use without what comes before it)."""

    def put(self, name: bytes, tenant: bytes, parts: BlobParts) -> bool:
        """Stores a blob (the parts joined), all of it or nothing; whether it is there now. A blob of that name is
        left as it is, whoever put it, and counts as used now. Where there is no room others go (offload.tiers.index,
        docs/offload.md, tenants), the least recently used first: store a run's chunks from its end. False too while
        another thread or process is writing that blob. The parts may be changed once the call has returned."""

    def read(self, reads: Sequence[Read]) -> list[bool]:
        """Fills what it can; whether each was read whole (if not, `into` holds anything). Bytes are as stored: whoever
        reads checks them (offload.frame). Reads of one blob that follow each other, in place and in order, cost one."""

    def drop(self, names: Sequence[bytes]) -> None:
        """Forgets blobs, which turned out to be bad, and counts them so."""

    def stats(self) -> TierStats:
        """A copy."""

    def close(self) -> None:
        """Ends threads and connections. May be called again."""
