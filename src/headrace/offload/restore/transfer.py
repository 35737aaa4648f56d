"""A restore: a run of stored chunks on its way back into the pool, layer by layer, beside the computation.

    chunks of the run:  | recomputed from tokens | projected from X |   loaded as K and V   |  then the new tokens
                        0                        t                  t + x                   n
                          prefill, on the engine    X over the link,   over the link
                                                    then the engine

The copy stream carries the X of a layer before its K and V, and one layer after the other (KVPR, section 3.2), so that
the engine may compute a layer of the new tokens while later ones are still on their way. What a tier gives is checked
before it is used; from the first chunk that is not right on, the run is not restored (RestoreReport.good).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from headrace.kernels.backend import Attend
from headrace.offload import frame
from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.copy_streams import CopyStream
from headrace.offload.restore.report import LayerProjection, LayerTransfer, RestoreReport
from headrace.offload.tiers.base import BlobFormat, BlobKind, Read, name_of
from headrace.offload.tiers.stack import Tiers
from headrace.types import CHUNK

log = logging.getLogger(__name__)

PIECE_BYTES = 2 << 20
"""Read, checked and moved on together: little enough to stay in the processor's cache."""

Project = Callable[[int, Tensor, Sequence[int], Sequence[int], int], None]
"""(layer, activations [n, 64, H], chunk numbers, slots, prompt length): stores K and V of these chunks in the pool."""


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


@dataclass(slots=True, eq=False)
class RestoreTransfer:
    """What the copy stream does for one restore, and where the engine waits for it; `report` tells what came of it.

    chunks: those to be projected (kind "x"), then those to be loaded, in order. prompt_len: tokens of the sequence's
    prompt, which length-dependent rotary scaling needs.
    """

    codec: ChunkCodec
    tiers: Tiers
    chunks: list[WantedChunk]
    prompt_len: int
    report: RestoreReport = field(init=False)
    _staging: Tensor = field(default_factory=lambda: torch.empty(PIECE_BYTES, dtype=torch.uint8))

    def __post_init__(self) -> None:
        of = [w.tier for w in self.chunks]
        most = self.tiers.kind(max(set(of), key=of.count))
        self.report = RestoreReport([w.kind for w in self.chunks], most)

    def start(self, stream: CopyStream) -> None:
        """Submits everything."""
        self._submit(stream, self._read_headers, len(self.chunks) * self.codec.header_bytes, "k", -1)
        kinds: tuple[BlobKind, ...] = ("x", "k")
        for layer in range(self.codec.spec.layers):
            for kind in kinds:
                if some := [w for w in self.chunks if w.kind == kind]:
                    size = sum(self.codec.section_bytes(kind, self.tiers.format(w.tier)) for w in some)
                    self._submit(stream, partial(self._carry, layer, kind, some), size, kind, layer)

    def _submit(self, stream: CopyStream, run: Callable[[], None], size: int, kind: BlobKind, layer: int) -> None:
        ticket = stream.submit(partial(self._guarded, run), size, "kv" if kind == "k" else "x")
        self.report.transfers.append(LayerTransfer(ticket, kind, layer))

    # -- on the copy stream

    def _guarded(self, run: Callable[[], None]) -> None:
        """Whatever goes wrong costs the restore, not the engine."""
        began = time.thread_time()
        try:
            run()
        except Exception as error:
            log.exception("stored chunks could not be brought back; they are computed again")
            self.report.good, self.report.reason = 0, f"{type(error).__name__}: {error}"
        self.report.cpu_s += time.thread_time() - began

    def _read_headers(self) -> None:
        size = self.codec.header_bytes
        data = torch.empty(len(self.chunks), size, dtype=torch.uint8)
        views = [memoryview(row.numpy()) for row in data]
        for wanted, view, there in zip(self.chunks, views, self._read(self.chunks, 0, views), strict=True):
            try:
                if not there:
                    raise frame.DamagedBlob("is gone")
                wanted.header = self.codec.header(view, wanted.digest, wanted.kind)
            except frame.DamagedBlob as error:
                self._lost(wanted, str(error))
                return

    def _carry(self, layer: int, kind: BlobKind, chunks: list[WantedChunk]) -> None:
        """Brings one layer of some chunks."""
        known = [(w, w.header) for w in chunks if w.header is not None]
        for form, alike in groupby(known, lambda pair: pair[1].format):
            left = [w for w, _ in alike]
            size = self.codec.section_bytes(kind, form)
            most = max(1, PIECE_BYTES // size)
            for first in range(0, len(left), most):
                if self.report.cancelled or not self._piece(layer, kind, form, size, left[first : first + most]):
                    return

    def _piece(self, layer: int, kind: BlobKind, form: BlobFormat, size: int, piece: list[WantedChunk]) -> bool:
        """Whether all of it came."""
        piece = [w for w in piece if w.chunk < self._end]
        if len(self._staging) < len(piece) * size:
            self._staging = torch.empty(len(piece) * size, dtype=torch.uint8)
        data = self._staging[: len(piece) * size].view(len(piece), size)
        views = [memoryview(row.numpy()) for row in data]
        offset = frame.section_at(self.codec.spec.layers, size, layer)
        whole = 0
        for wanted, view, there in zip(piece, views, self._read(piece, offset, views), strict=True):
            try:
                if not there:
                    raise frame.DamagedBlob("is gone")
                assert wanted.header is not None
                wanted.header.check(layer, view)
            except frame.DamagedBlob as error:
                self._lost(wanted, str(error))
                break
            whole += 1
        if whole:
            self.codec.load(layer, kind, form, data[:whole], [w.slot for w in piece[:whole]])
        return whole == len(piece)

    def _read(self, chunks: list[WantedChunk], offset: int, views: list[memoryview]) -> list[bool]:
        """Whether each was read; by tier, in few calls."""
        found = [False] * len(chunks)
        for tier in {w.tier for w in chunks}:
            mine = [i for i, w in enumerate(chunks) if w.tier == tier]
            there = self.tiers.read(tier, [Read(chunks[i].name, offset, views[i]) for i in mine])
            for i, each in zip(mine, there, strict=True):
                found[i] = each
        return found

    @property
    def _end(self) -> int:
        """Number of the first chunk that is not to come any more."""
        good = self.report.good
        return self.chunks[good].chunk if good < len(self.chunks) else self.chunks[-1].chunk + 1

    def _lost(self, wanted: WantedChunk, why: str) -> None:
        self.report.lose(self.chunks.index(wanted), f"chunk {wanted.chunk} {why}")
        self.tiers.drop([wanted.name])

    # -- on the engine

    def cancel(self) -> None:
        """Lets the copy stream skip what is left; the slots may be used again when the report is `done`."""
        self.report.cancelled = True

    @property
    def here(self) -> list[RestoreTransfer]:
        """What the step of this process has to wait for by itself."""
        return [self]

    def finish(self) -> None:
        """Before the report is looked at after a step, which has waited for all layers."""

    def ready(self, layer: int, project: Project) -> None:
        """Waits for a layer and projects what comes as activations; afterwards its K and V are in the pool, but for
        chunks that were lost."""
        for ticket, kind, at in self.report.transfers:
            if at not in (-1, layer):
                continue
            began = time.perf_counter()
            ticket.wait()
            self.report.waited_s += time.perf_counter() - began
            if kind == "x" and at == layer:
                self._project(layer, project)

    def _project(self, layer: int, project: Project) -> None:
        chunks = [w for w in self.chunks[: self.report.good] if w.kind == "x"]
        if not chunks:
            return
        slots, busy, began = [w.slot for w in chunks], not self.report.done, time.perf_counter()
        project(layer, self.codec.activations(layer)[slots], [w.chunk for w in chunks], slots, self.prompt_len)
        if busy == (not self.report.done):
            projection = LayerProjection(len(chunks) * CHUNK, time.perf_counter() - began, busy)
            self.report.projections.append(projection)


class RestoringAttend(Attend):
    """Attention of a step for which chunks are still on their way."""

    def __init__(self, attend: Attend, restores: Sequence[RestoreTransfer], project: Project) -> None:
        self.attend, self.restores, self.project = attend, restores, project

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        for restore in self.restores:
            restore.ready(layer, self.project)
        return self.attend(layer, q, k, v, rows)


def positions_of(chunks: Sequence[int]) -> Tensor:
    """Absolute positions of the tokens of these chunks, int64 [64 n]."""
    return (torch.tensor(chunks, dtype=torch.int64)[:, None] * CHUNK + torch.arange(CHUNK)).view(-1)
