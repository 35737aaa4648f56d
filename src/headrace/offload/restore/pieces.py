"""Pieces of a restore: one layer's sections of some chunks, read and checked in host memory before they go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headrace.offload import frame
from headrace.offload.landing import Landing
from headrace.offload.tiers.base import BlobKind, Lender, Part, Read, name_of
from headrace.offload.tiers.stack import Tiers


@dataclass(slots=True)
class WantedChunk:
    """A chunk of the run: its number in the sequence, its name, its slot, and the tier that has what is to come.

    header: what its blob's header says, once that was read.
    """

    chunk: int
    digest: bytes
    slot: int
    kind: BlobKind
    tier: int
    header: frame.BlobHeader | None = None

    @property
    def name(self) -> bytes:
        return name_of(self.digest, self.kind)


class Sections(NamedTuple):
    """A layer's sections of a blob: their numbers, bytes of each, and where the first begins."""

    own: range
    size: int
    offset: int

    @property
    def bytes(self) -> int:
        return len(self.own) * self.size


class Piece(Protocol):
    """Chunks whose sections come together."""

    def arrive(self, part: range) -> list[str]:
        """Reads and checks some of its chunks: what is wrong with each; empty for nothing. Some parts at once."""

    def rows(self, count: int) -> Tensor | Sequence[Tensor]:
        """The sections of its first chunks, uint8 [n, bytes] or each by itself."""

    def left(self) -> None:
        """The current stream was given what copies them."""


class ReadPiece(Piece):
    """Read from tiers into landing memory."""

    def __init__(self, chunks: Sequence[WantedChunk], sections: Sections, tiers: Tiers, landing: Landing) -> None:
        self._chunks, self._sections, self._tiers, self._landing = chunks, sections, tiers, landing
        self._data = landing.take(len(chunks) * sections.bytes).view(len(chunks), sections.bytes)

    def arrive(self, part: range) -> list[str]:
        chunks = [self._chunks[i] for i in part]
        views = [self._data[i].numpy().data for i in part]
        there = read(self._tiers, chunks, self._sections.offset, views)
        return [
            damage(*each, self._sections) if ok else "is gone"
            for ok, each in zip(there, zip(chunks, views, strict=True), strict=True)
        ]

    def rows(self, count: int) -> Tensor:
        return self._data[:count]

    def left(self) -> None:
        self._landing.left(self._data)


class LentPiece(Piece):
    """Checked and copied from where a tier has them. They are to be given back when they have been copied."""

    def __init__(self, chunks: Sequence[WantedChunk], sections: Sections, lender: Lender) -> None:
        self._chunks, self._sections, self._lender = chunks, sections, lender
        self._views = lender.lend([Part(each.name, sections.offset, sections.bytes) for each in chunks])

    def arrive(self, part: range) -> list[str]:
        return [
            "is gone" if (view := self._views[i]) is None else damage(self._chunks[i], view, self._sections)
            for i in part
        ]

    def rows(self, count: int) -> list[Tensor]:
        return [torch.frombuffer(view, dtype=torch.uint8) for view in self._views[:count] if view is not None]

    def left(self) -> None:
        pass

    def give_back(self) -> None:
        lent = zip(self._chunks, self._views, strict=True)
        self._lender.give_back([each.name for each, view in lent if view is not None])
        self._views = []


def read(tiers: Tiers, chunks: Sequence[WantedChunk], offset: int, views: Sequence[memoryview]) -> list[bool]:
    """Whether each was read; by tier, in few calls."""
    found = [False] * len(chunks)
    for tier in {w.tier for w in chunks}:
        mine = [i for i, w in enumerate(chunks) if w.tier == tier]
        there = tiers.read(tier, [Read(chunks[i].name, offset, views[i]) for i in mine])
        for i, each in zip(mine, there, strict=True):
            found[i] = each
    return found


def damage(wanted: WantedChunk, data: memoryview, sections: Sections) -> str:
    """What is wrong with a chunk's sections in `data`; empty for nothing."""
    assert wanted.header is not None
    size = sections.size
    try:
        for place, section in enumerate(sections.own):
            wanted.header.check(section, data[place * size : (place + 1) * size])
    except frame.DamagedBlob as error:
        return str(error)
    return ""
