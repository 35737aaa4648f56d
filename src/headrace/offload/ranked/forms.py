"""The ways in which the heads of a chunk may be stored, by how many tensor ranks, and how one rank reads each.

Hkv = 8    stored by 1:  |01234567|            a blob holds more heads than a rank of 2 has: it takes its own
           by 2:         |0123|4567|           its own form
           by 4:         |01|23|45|67|         it needs two blobs of a chunk
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.ranked.words import Place
from headrace.offload.restore.pieces import WantedChunk
from headrace.offload.tiers.base import BlobKind, HeadShare, name_of
from headrace.offload.tiers.stack import Tiers


@dataclass(frozen=True, slots=True)
class StoredForm:
    """shares: the blobs of a chunk that hold heads of this rank, in their order. codec: puts each into a slot of its
    own, of which a slot of the rank's pool has as many as there are shares."""

    codec: ChunkCodec
    shares: tuple[HeadShare, ...]

    def names(self, digest: bytes) -> list[bytes]:
        return [name_of(share.of(digest), "k") for share in self.shares]

    def wanted(self, chunk: int, digest: bytes, slot: int, tier: int, kind: BlobKind = "k") -> list[WantedChunk]:
        """What is to be read of a chunk. Activations ("x") are stored whole, and go into a slot of the rank's pool."""
        if kind == "x":
            return [WantedChunk(chunk, digest, slot, kind, tier)]
        first = slot * len(self.shares)
        return [WantedChunk(chunk, share.of(digest), first + i, kind, tier) for i, share in enumerate(self.shares)]


def forms_of(codec: ChunkCodec, mine: HeadShare) -> list[StoredForm]:
    """All forms that the rank which has the heads `mine` can read; the first is its own. codec: of its pool.

    Layers that differ in their heads are shared out each in its own way: of such a model a rank reads its own form.
    """
    if codec.spec.shapes:
        return [StoredForm(codec, (mine,))]
    total = codec.spec.kv_heads * mine.parts
    others = [parts for parts in range(1, total + 1) if total % parts == 0 and parts != mine.parts]
    readable = [parts for parts in others if parts % mine.parts == 0 or mine.parts % parts == 0]
    return [StoredForm(codec, (mine,)), *(_form(codec, mine, parts) for parts in readable)]


def _form(codec: ChunkCodec, mine: HeadShare, parts: int) -> StoredForm:
    heads = codec.spec.kv_heads
    if parts > mine.parts:
        several = parts // mine.parts
        first = mine.part * several
        spec = replace(codec.spec, kv_heads=heads // several)
        own = ChunkCodec(
            codec.storage.split(several), spec, codec.identity, codec.dtype, codec.layout, device=codec.device
        )
        return StoredForm(own, tuple(HeadShare(first + i, parts) for i in range(several)))
    several = mine.parts // parts
    first = mine.part % several * heads
    spec = replace(codec.spec, kv_heads=heads * several)
    own = ChunkCodec(
        codec.storage, spec, codec.identity, codec.dtype, codec.layout, range(first, first + heads), codec.device
    )
    return StoredForm(own, (HeadShare(mine.part // several, parts),))


def find(tiers: Tiers, forms: Sequence[StoredForm], digests: Sequence[bytes]) -> list[Place | None]:
    """Where each chunk is. All are of one form, that of the first: a restore has one codec. Another form than the
    rank's own is looked for where that lacks the first chunk."""
    number, found = 0, _tiers_of(tiers, [(forms[0], digest) for digest in digests])
    if found[:1] == [None]:
        first = _tiers_of(tiers, [(form, digests[0]) for form in forms[1:]])
        number = next((i for i, tier in enumerate(first, 1) if tier is not None), 0)
        if number:
            found = _tiers_of(tiers, [(forms[number], digest) for digest in digests])
    return [None if tier is None else Place(tier, number) for tier in found]


def _tiers_of(tiers: Tiers, chunks: Sequence[tuple[StoredForm, bytes]]) -> list[int | None]:
    """The tier that has all of a chunk's blobs, asked for in one go."""
    found = iter(tiers.find([name for form, digest in chunks for name in form.names(digest)]))
    of_each = [{next(found) for _ in form.shares} for form, _ in chunks]
    return [next(iter(each)) if len(each) == 1 else None for each in of_each]
