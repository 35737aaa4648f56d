"""The interface of a tier: a store of named blobs below the pool, which may lose any of them at any time.

A blob is one chunk's keys and values ("k"), its activations ("x") or the recurrent state behind it ("s"), of all layers
(frame). Its name is the chunk's
digest, which the model, the types, the tenant's salt and all tokens up to the chunk's end went into, and the kind. Of
several tensor ranks each stores the keys and values of its own heads, under the digest with the share behind it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from headrace.config import OffloadFormat as BlobFormat
from headrace.planner.machine import PieceRate
from headrace.stats import TierStats
from headrace.types import CHUNK

__all__ = [
    "BlobFormat", "BlobKind", "BlobParts", "HeadShare", "Lender", "OwnQuotas", "Part", "Read", "Tier", "TierStats",
    "flat", "name_of", "tokens_of",
]  # fmt: skip

BlobKind = Literal["k", "x", "s"]

BlobParts = Sequence[bytes | bytearray | memoryview]


DIGEST = 32
"""Bytes of a chunk's digest."""
_SHARE = struct.Struct("<HH")


@dataclass(frozen=True, slots=True)
class HeadShare:
    """One of `parts` equal parts of a model's KV heads. The default is all of them."""

    part: int = 0
    parts: int = 1

    def of(self, digest: bytes) -> bytes:
        """What names this share of a chunk: the chunk's digest, with the share behind it unless that is all."""
        return digest if self.parts == 1 else digest + _SHARE.pack(self.part, self.parts)


def name_of(digest: bytes, kind: BlobKind) -> bytes:
    """33 bytes; 37 of a share (HeadShare.of)."""
    return digest + kind.encode()


def tokens_of(name: bytes) -> int:
    """Tokens that a blob counts for: those of its chunk, once: not again for activations or further shares."""
    share = name[DIGEST:-1]
    return CHUNK if name.endswith(b"k") and not any(share[:2]) else 0


def flat(part: bytes | bytearray | memoryview) -> memoryview:
    """The bytes of something contiguous."""
    view = memoryview(part)
    return view.cast("B") if view.nbytes else memoryview(b"")


class Read(NamedTuple):
    """len(into) bytes of a blob from `offset` on are wanted in `into`, a writable flat memoryview of bytes."""

    name: bytes
    offset: int
    into: memoryview


class Part(NamedTuple):
    """`size` bytes of a blob from `offset` on."""

    name: bytes
    offset: int
    size: int


@runtime_checkable
class Lender(Protocol):
    """A tier in memory that others may read where it lies."""

    def lend(self, parts: Sequence[Part]) -> list[memoryview | None]:
        """Each part, or None where it is not there. What is lent stays as it is until `give_back`."""

    def give_back(self, names: Sequence[bytes]) -> None:
        """Nobody reads any more what was lent of these, each as often as a part of it was."""


@runtime_checkable
class OwnQuotas(Protocol):
    """A tier in which a tenant may have another quota than the common one."""

    def set_quota(self, tenant: bytes, share: float | None) -> None:
        """Of the budget, 0 to 1, from the next `put` on; None: the common quota."""


class Tier(Protocol):
    """Safe to call from several threads. No method raises if the store is full, gone, slow, damaged or changed by
    another process: the failure is logged once per kind and counted, and the answer is "not there". No call takes much
    longer than the tier's time-out.
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
    def read_guess(self) -> PieceRate:
        """Of bytes, before it was ever read from."""

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """Whether each blob is there, as far as is known. Those that are count as used now, the first one last. Name a
        run's chunks from its start: the run then loses its end first, which is of no use without its start."""

    def put(self, name: bytes, tenant: bytes, parts: BlobParts) -> bool:
        """Stores a blob (the parts joined), all of it or nothing; returns whether it is there now. An existing blob of
        that name is left as it is and counts as used now. If there is no room, other blobs are evicted, the least
        recently used first (offload.tiers.index; docs/offload.md, tenants): store a run's chunks from its end.
        Returns False too while another thread or process is writing that blob. The parts may be changed afterwards."""

    def read(self, reads: Sequence[Read]) -> list[bool]:
        """Fills what it can; returns whether each was read whole (if not, `into` holds anything). The caller checks the
        bytes (offload.frame). Adjacent reads of one blob, in order, cost one call."""

    def drop(self, names: Sequence[bytes]) -> None:
        """Removes blobs that turned out to be damaged, and counts them in `bad`."""

    def stats(self) -> TierStats:
        """A copy."""

    def close(self) -> None:
        """Ends threads and connections. May be called again."""
