"""A restore: a run of stored chunks on its way back into the pool, layer by layer, beside the computation.

    chunks of the run:  | recomputed from tokens | projected from X |   loaded as K and V   |  then the new tokens
                        0                        t                  t + x                   n
                          prefill, on the engine    X over the link,   over the link
                                                    then the engine

The copy stream carries the X of a layer before its K and V, and one layer after the other (KVPR, section 3.2), so that
the engine may compute a layer of the new tokens while later ones are still on their way. What a tier gives is checked
before it is used; from the first chunk that is not right on, the run is not restored (RestoreTransfer.good).
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch

from headrace.arrival import Arrival
from headrace.device import Event
from headrace.offload import frame
from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.copy_streams import CopyStream
from headrace.offload.ranked.words import Prompt
from headrace.offload.restore.pieces import LentPiece, Piece, ReadPiece, Sections, WantedChunk, read
from headrace.offload.restore.projector import Projector
from headrace.offload.restore.report import LayerProjection
from headrace.offload.stopwatch import Stopwatch
from headrace.offload.ticket import Ticket
from headrace.offload.tiers.base import BlobFormat, BlobKind, Lender
from headrace.offload.tiers.stack import Tiers
from headrace.types import CHUNK

log = logging.getLogger(__name__)


class LayerTransfer(NamedTuple):
    """One layer's activations ("x") or keys and values ("k") on their way; layer -1: the headers of all blobs."""

    ticket: Ticket
    kind: BlobKind
    layer: int


@dataclass(slots=True, eq=False)
class RestoreTransfer:
    """What the copy stream does for one restore, and what steps wait for.

    chunks: those to be projected (kind "x"), then those to be loaded, in order. prompt: of the sequence.
    project: may be None where no chunk comes as activations.
    projected: slot by number of all chunks that do, to this rank or to another tensor rank.

    layers: of each layer, what a step that reads it waits for, in this order. good: chunks up to the first one that was
    lost; reason: why it was. cpu_s: what the copy stream took from the cores, where these compute.
    """

    codec: ChunkCodec
    tiers: Tiers
    chunks: list[WantedChunk]
    prompt: Prompt
    project: Projector | None = None
    projected: Mapping[int, int] = field(default_factory=dict)
    layers: list[list[Arrival]] = field(default_factory=list)
    good: int = field(init=False)
    cancelled: bool = False
    reason: str = ""
    cpu_s: float = 0.0
    transfers: list[LayerTransfer] = field(default_factory=list)
    _projected: list[_Projected] = field(default_factory=list)
    _project: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self.good = len(self.chunks)

    def start(self, stream: CopyStream, after: Callable[[], None] = lambda: None) -> None:
        """Submits everything. after: waits until the slots are free to be written to."""

        def begin() -> None:
            after()
            self._read_headers()

        self._submit(stream, begin, len(self.chunks) * self.codec.header_bytes, "k", -1)
        kinds: tuple[BlobKind, ...] = ("x", "k")
        for layer in range(self.codec.layers):
            self.layers.append([])
            for kind in kinds:
                there: Ticket | None = None
                if some := [w for w in self.chunks if w.kind == kind]:
                    each, lent = len(self.codec.sections(kind)[layer]), list[LentPiece]()
                    size = sum(each * self.codec.section_bytes(kind, self.tiers.format(w.tier)) for w in some)
                    there = self._submit(stream, partial(self._carry, layer, kind, some, lent), size, kind, layer)
                    there.then(partial(_give_back, lent))
                if kind == "x" and self.projected:
                    self.layers[layer].append(Projection(self, layer, there))
                elif there is not None:
                    self.layers[layer].append(there)

    def _submit(self, stream: CopyStream, run: Callable[[], None], size: int, kind: BlobKind, layer: int) -> Ticket:
        ticket = stream.submit(partial(self._guarded, run), size, "kv" if kind == "k" else "x")
        self.transfers.append(LayerTransfer(ticket, kind, layer))
        return ticket

    def cancel(self) -> None:
        """Lets the copy stream skip what is left; the slots may be used again when it is `done`."""
        self.cancelled = True

    @property
    def last(self) -> Ticket:
        """The last thing that the copy stream does for it."""
        return self.transfers[-1].ticket

    @property
    def done(self) -> bool:
        """Whether the copy stream has nothing more to do for it."""
        return self.last.done

    @property
    def projects(self) -> bool:
        """Whether whoever waits has a part in it."""
        return bool(self.projected)

    @property
    def projections(self) -> list[LayerProjection]:
        """What projecting took, of layers during all or none of which the copy stream was at work; on a device, which
        computes beside it, of all."""
        return [LayerProjection(each.tokens, each.watch.seconds(), each.beside_copies) for each in self._projected]

    @property
    def waited_s(self) -> float:
        """How long steps waited for the copy stream."""
        return sum(each.ticket.waited_s for each in self.transfers)

    @property
    def link_s(self) -> float:
        """Time that its transfers took on the copy stream, which has ended the last of them."""
        return sum(each.ticket.ended_s - each.ticket.began_s for each in self.transfers)

    @property
    def layer_transfers(self) -> list[tuple[int, float]]:
        """Bytes and seconds of one layer's activations and of its keys and values: the median layer's."""
        found = []
        for kind in dict.fromkeys(each.kind for each in self.transfers):
            tickets = [each.ticket for each in self.transfers if each.kind == kind and each.layer >= 0]
            if tickets:
                found.append((tickets[0].size, statistics.median(each.ended_s - each.began_s for each in tickets)))
        return found

    # -- on the copy stream

    def _guarded(self, run: Callable[[], None]) -> None:
        """Whatever goes wrong costs the restore, not the engine."""
        began = time.thread_time()
        try:
            run()
        except Exception as error:
            log.exception("stored chunks could not be brought back; they are computed again")
            self.good, self.reason = 0, f"{type(error).__name__}: {error}"
        if self.codec.device is None:
            self.cpu_s += time.thread_time() - began

    def _read_headers(self) -> None:
        size = self.codec.header_bytes
        data = torch.empty(len(self.chunks), size, dtype=torch.uint8)
        views = [memoryview(row.numpy()) for row in data]
        for wanted, view, there in zip(self.chunks, views, read(self.tiers, self.chunks, 0, views), strict=True):
            try:
                if not there:
                    raise frame.DamagedBlob("is gone")
                wanted.header = self.codec.header(view, wanted.digest, wanted.kind)
            except frame.DamagedBlob as error:
                self._lost(wanted, str(error))
                return

    def _carry(self, layer: int, kind: BlobKind, chunks: list[WantedChunk], lent: list[LentPiece]) -> None:
        """Brings one layer of some chunks. lent: what of them tiers have lent until they have come."""
        known = [(w, w.header) for w in chunks if w.header is not None]
        for (form, _), alike in groupby(known, lambda pair: (pair[1].format, self._lender(pair[0].tier))):
            left = [w for w, _ in alike]
            size, sections = self.codec.section_bytes(kind, form), self.codec.sections(kind)
            own = Sections(sections[layer], size, frame.section_at(sections[-1].stop, size, sections[layer].start))
            most = max(1, self.codec.landing.piece_bytes // own.bytes)
            pieces = [left[first : first + most] for first in range(0, len(left), most)]
            if not self._bring_all(layer, kind, form, pieces, own, lent):
                return

    def _bring_all(
        self,
        layer: int,
        kind: BlobKind,
        form: BlobFormat,
        pieces: list[list[WantedChunk]],
        sections: Sections,
        lent: list[LentPiece],
    ) -> bool:
        """Piece after piece, the next ones being read and checked meanwhile; whether all came."""
        started: deque[tuple[list[WantedChunk], Piece, Iterator[str]]] = deque()
        landing = self.codec.landing
        try:
            for chunks in [*pieces, *([] for _ in range(landing.ahead))]:
                if chunks := [] if self.cancelled else [w for w in chunks if w.chunk < self.end]:
                    piece = self._piece(chunks, sections, lent)
                    started.append((chunks, piece, landing.read(len(chunks), piece.arrive)))
                behind = len(started) > (landing.ahead if chunks else 0)
                if behind and not self._bring(layer, kind, form, *started.popleft()):
                    return False
            return not self.cancelled
        finally:
            for _, _, found in started:
                deque(found, maxlen=0)  # nobody reads into memory that is used again

    def _lender(self, tier: int) -> Lender | None:
        """A tier that a device's copies can run from."""
        return None if self.codec.device is None else self.tiers.lender(tier)

    def _piece(self, chunks: list[WantedChunk], sections: Sections, lent: list[LentPiece]) -> Piece:
        """From where a tier has them, if that lends, and a device copies; else through landing memory."""
        lender = self._lender(chunks[0].tier)
        if lender is None:
            return ReadPiece(chunks, sections, self.tiers, self.codec.landing)
        lent.append(LentPiece(chunks, sections, lender))
        return lent[-1]

    def _bring(
        self,
        layer: int,
        kind: BlobKind,
        form: BlobFormat,
        chunks: list[WantedChunk],
        piece: Piece,
        found: Iterator[str],
    ) -> bool:
        """Puts a piece into the pool as far as it came; whether all of it did. found: what is wrong with each chunk."""
        whole = 0
        for wanted, wrong in zip(chunks, found, strict=True):
            if wrong:
                self._lost(wanted, wrong)
                deque(found, maxlen=0)
                break
            whole += 1
        if whole:
            self.codec.load(layer, kind, form, piece.rows(whole), [w.slot for w in chunks[:whole]])
            piece.left()
        return whole == len(chunks)

    @property
    def end(self) -> float:
        """Number of the first chunk that is not to come any more; infinity if all are."""
        good = self.good
        return self.chunks[good].chunk if good < len(self.chunks) else math.inf

    def _lost(self, wanted: WantedChunk, why: str) -> None:
        index = self.chunks.index(wanted)
        if index < self.good:
            self.good, self.reason = index, f"chunk {wanted.chunk} {why}"
        self.tiers.drop([wanted.name])

    # -- for the thread that waits

    def project_layer(self, layer: int) -> None:
        """K and V of the chunks whose activations have come. Those of lost ones, too, whose rows are void: tensor ranks
        must project alike, and another may have lost others."""
        if self.project is None:
            return
        if self._project is None:
            self._project = self.project(list(self.projected), list(self.projected.values()), self.prompt)
        busy, device = not self.done, self.codec.device
        watch = Stopwatch(device)
        self._project(layer)
        watch.stop()
        if device is not None or busy == (not self.done):
            self._projected.append(_Projected(len(self.projected) * CHUNK, watch, busy and device is None))


class _Projected(NamedTuple):
    """A layer's projection, under way on a device."""

    tokens: int
    watch: Stopwatch
    beside_copies: bool


def _give_back(lent: list[LentPiece]) -> None:
    for piece in lent:
        piece.give_back()


class Projection(Arrival):
    """One layer's K and V of the chunks of a restore that come as activations: projected by the one thread that waits
    for it, which has the cores. x: None where another tensor rank brings all of them."""

    __slots__ = ("_layer", "_over", "_transfer", "_x")

    def __init__(self, transfer: RestoreTransfer, layer: int, x: Ticket | None) -> None:
        super().__init__()
        self._transfer, self._layer, self._x = transfer, layer, x
        self._over: Event | None = None

    def wait(self) -> None:
        if not self.done:
            if self._x is not None:
                self._x.wait()
            self._transfer.project_layer(self._layer)
            if (device := self._transfer.codec.device) is not None:
                self._over = device.current_stream().record_event()
            self.end()

    def follow(self) -> None:
        if (device := self._transfer.codec.device) is not None and self._over is not None:
            device.current_stream().wait_event(self._over)
