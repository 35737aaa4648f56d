"""The tiers of one rank: does what rank 0 asks (words), and knows which chunks of its pool are still on their way."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import NamedTuple

from headrace.logs import shown
from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.copy_streams import CopyStream
from headrace.offload.ranked import words
from headrace.offload.ranked.forms import StoredForm, find, forms_of
from headrace.offload.restore.transfer import RestoreTransfer
from headrace.offload.ticket import Ticket
from headrace.offload.tiers.base import HeadShare, name_of
from headrace.offload.tiers.stack import Tiers

log = logging.getLogger(__name__)

ALL = HeadShare()

Say = Callable[[words.Answer], None]
"""Tells rank 0; from any thread."""


class Opened(NamedTuple):
    """What an agent works with. storing: a codec of its own for chunks that are stored."""

    tiers: Tiers
    codec: ChunkCodec
    storing: ChunkCodec
    bringing: CopyStream
    looking: CopyStream


@dataclass(slots=True, eq=False)
class _Bringing:
    """parts: blobs of each chunk."""

    number: int
    transfer: RestoreTransfer
    parts: int
    layers: dict[int, Ticket]


class TierAgent:
    """opener(identity): opens the rank's tiers; raises ValueError. place: among the tensor ranks of its context rank;
    share: the KV heads that it has.

    Chunks are stored, and tiers opened and closed, by a thread, in the order asked for. A restore begins, and its slots
    are known to be coming, before `obey` returns.
    """

    def __init__(self, opener: Callable[[bytes], Opened], place: int = 0, share: HeadShare = ALL) -> None:
        self._opener, self._place, self._share = opener, place, share
        self._opened: Opened | None = None
        self._forms: list[StoredForm] = []
        self._of: dict[int, _Bringing] = {}
        self._restores: dict[int, _Bringing] = {}
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="headrace-tiers", daemon=True).start()

    @property
    def opened(self) -> Opened:
        """Raises ValueError before OpenTiers, and after one that was refused."""
        if self._opened is None:
            raise ValueError("the tiers are not open")
        return self._opened

    # -- for steps

    def pending(self, slots: Iterable[int], layer: int) -> list[Ticket]:
        """parallel.coming.Coming."""
        if not self._of:
            return []
        with self._lock:
            restores = {id(found): found for slot in slots if (found := self._of.get(slot)) is not None}
        return [found.layers[layer] for found in restores.values()]

    # -- for rank 0

    def obey(self, command: words.Command, say: Say) -> None:
        """Raises ValueError for what cannot be done in this state."""
        match command:
            case words.OpenTiers():
                self._work.put(lambda: say(self._open(command)))
            case words.FindChunks():
                self._find(command, say)
            case words.BringChunks():
                self._bring(command, say)
            case words.CancelBring():
                with self._lock:
                    restore = self._restores.get(command.number)
                if restore is not None:
                    restore.transfer.cancel()
            case words.StoreChunk():
                self._work.put(lambda: self._store(command, say))
            case words.TellTiers():
                say(self._told(command.number))
            case words.CloseTiers():
                self._work.put(lambda: say(self._close(command)))
                self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("the tiers of this rank could not do what was asked")

    def _open(self, command: words.OpenTiers) -> words.TiersOpen:
        try:
            self._opened = self._opener(command.identity)
            self._forms = forms_of(self._opened.codec, self._share)
        except ValueError as error:
            return words.TiersOpen(command.number, shown(error), [])
        except Exception as error:  # rank 0 waits for an answer
            log.exception("the tiers of this rank could not be opened")
            return words.TiersOpen(command.number, shown(f"{type(error).__name__}: {error}"), [])
        return words.TiersOpen(command.number, None, [tier.kind for tier in self._opened.tiers.tiers])

    def _find(self, command: words.FindChunks, say: Say) -> None:
        found: list[words.Reach | None] = [None] * len(command.digests)
        opened = self.opened

        def look() -> None:
            places = find(opened.tiers, self._forms, command.digests)
            found[:] = [None if place is None else (place,) for place in places]

        ticket = opened.looking.submit(look, 0, "look")
        ticket.then(lambda: say(words.ChunksFound(command.number, found)))

    def _bring(self, command: words.BringChunks, say: Say) -> None:
        opened = self.opened
        places = [each.places[self._place] for each in command.chunks]
        form = self._forms[places[0].form]
        wanted = [
            part
            for each, place in zip(command.chunks, places, strict=True)
            for part in form.wanted(each.chunk, each.digest, each.slot, place.tier)
        ]
        transfer = RestoreTransfer(form.codec, opened.tiers, wanted, command.prompt_len)
        restore = _Bringing(command.number, transfer, len(form.shares), {})
        with self._lock:
            transfer.start(opened.bringing)
            restore.layers |= {each.layer: each.ticket for each in transfer.report.transfers}
            self._restores[command.number] = restore
            self._of |= {each.slot: restore for each in command.chunks}
        transfer.report.transfers[-1].ticket.then(lambda: self._brought(restore, say))

    def _brought(self, restore: _Bringing, say: Say) -> None:
        """On the copy stream, before the last layer's ticket ends: those who wait for it still find it."""
        report, last = restore.transfer.report, restore.transfer.report.transfers[-1].ticket
        with self._lock:
            del self._restores[restore.number]
            self._of = {slot: other for slot, other in self._of.items() if other is not restore}
        link_s = report.link_s + (last.ended_s - last.began_s)
        layers = [] if report.failed else report.layer_transfers
        good = report.good // restore.parts
        say(words.ChunksBrought(restore.number, good, report.reason, link_s, report.cpu_s, layers))

    def _store(self, command: words.StoreChunk, say: Say) -> None:
        ready = []
        try:
            opened, own = self.opened, self._share.of(command.digest)
            name = name_of(own, "k")
            lacking = opened.tiers.lacking(name) if command.sure else opened.tiers.doubtful(name)
            if command.in_memory:
                lacking = [tier for tier in lacking if not opened.tiers.queues(tier)]
            for form in sorted({opened.tiers.format(tier) for tier in lacking}):
                parts = (b"".join(opened.storing.encode(command.slot, own, "k", form)),)
                ready += [(tier, parts) for tier in lacking if opened.tiers.format(tier) == form]
        finally:
            say(words.ChunkStored(command.number))
        for tier, parts in ready:
            opened.tiers.offer(tier, name, command.tenant, parts, len(parts[0]))

    def _told(self, number: int) -> words.TiersTold:
        tiers = self.opened.tiers
        stats = {kind: asdict(each) for kind, each in tiers.stats().items()}
        return words.TiersTold(number, stats, tiers.queued_blobs + self._work.qsize())

    def _close(self, command: words.CloseTiers) -> words.TiersTold:
        opened, told = self._opened, words.TiersTold(command.number, {}, 0)
        if opened is not None:
            opened.bringing.close()
            opened.looking.close()
            opened.tiers.close(command.timeout_s)
            told = self._told(command.number)
        return told
