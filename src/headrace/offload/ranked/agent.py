"""The tiers of one rank: does what rank 0 asks (words), and knows which chunks of its pool are still on their way."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from headrace.arrival import Arrival
from headrace.logs import shown
from headrace.models.x_turns import XTurns
from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.copy_streams import CopyStream
from headrace.offload.parked import Parked
from headrace.offload.ranked import words
from headrace.offload.ranked.forms import StoredForm, find, forms_of
from headrace.offload.restore.projector import Projector
from headrace.offload.restore.transfer import RestoreTransfer
from headrace.offload.tiers.base import BlobKind, BlobParts, HeadShare, name_of
from headrace.offload.tiers.stack import Tiers

log = logging.getLogger(__name__)

ALL = HeadShare()
ALONE = XTurns()

Fence = Callable[[], Callable[[], None]]
"""What waits until the steps that the rank was sent so far are computed: parallel.step_fence."""


def at_once() -> Callable[[], None]:
    """The fence of a rank that computes in the thread that asks."""
    return lambda: None


Say = Callable[[words.Answer], None]
"""Tells rank 0; from any thread."""


class Opened(NamedTuple):
    """What an agent works with. storing: a codec of its own for chunks that are stored by the thread that computes."""

    tiers: Tiers
    codec: ChunkCodec
    storing: ChunkCodec
    bringing: CopyStream
    looking: CopyStream
    project: Projector


@dataclass(slots=True, eq=False)
class _Bringing:
    """brought: the copy stream is done with it. ended: nobody wants it any more."""

    number: int
    transfer: RestoreTransfer
    chunks: list[words.WantedHere]
    brought: bool = False
    ended: bool = False

    @property
    def slots(self) -> list[int]:
        return [each.slot for each in self.chunks]

    @property
    def good(self) -> int:
        """Chunks before the first one that was lost."""
        return sum(each.chunk < self.transfer.end for each in self.chunks)


class TierAgent:
    """opener(identity): opens the rank's tiers; raises ValueError. turns: its place among the tensor ranks of its
    context rank; share: the KV heads that it has. fence: only behind it are chunks of the pool stored, and slots of it
    filled. spoilt: may be set; whether what is in the pool may be wrong by now, and is not stored any more.

    A restore begins, and its slots are known to be coming, before `obey` returns. Opening, storing and closing are done
    when it does: an AgentThread does them elsewhere.
    """

    def __init__(
        self,
        opener: Callable[[bytes], Opened],
        turns: XTurns = ALONE,
        share: HeadShare = ALL,
        fence: Fence = at_once,
    ) -> None:
        self._opener, self._turns, self._share, self._fence = opener, turns, share, fence
        self.spoilt: Callable[[], bool] = lambda: False
        self._opened: Opened | None = None
        self._forms: list[StoredForm] = []
        self._of: dict[int, _Bringing] = {}
        self._restores: dict[int, _Bringing] = {}
        self._lock, self._storing = threading.Lock(), threading.Lock()

    def open(self, identity: bytes) -> Opened:
        """Raises ValueError."""
        self._opened = self._opener(identity)
        self._forms = forms_of(self._opened.codec, self._share)
        return self._opened

    @property
    def opened(self) -> Opened:
        """Raises ValueError before `open`, and after one that was refused."""
        if self._opened is None:
            raise ValueError("the tiers are not open")
        return self._opened

    # -- for steps (parallel.coming.Coming)

    def __bool__(self) -> bool:
        return bool(self._of)

    def pending(self, slots: Iterable[int], layer: int) -> list[Arrival]:
        if not self._of:
            return []
        with self._lock:
            restores = {id(found): found for slot in slots if (found := self._of.get(slot)) is not None}
        return [arrival for found in restores.values() for arrival in found.transfer.layers[layer]]

    # -- for rank 0

    def obey(self, command: words.Command, say: Say) -> None:
        """Raises ValueError for what cannot be done in this state."""
        match command:
            case words.OpenTiers():
                say(self._open(command))
            case words.FindChunks():
                self._find(command, say)
            case words.BringChunks():
                self._bring(command, say)
            case words.CancelBring():
                self._cancel(command.number)
            case words.EndBring():
                self._end(command, say)
            case words.StoreChunks():
                try:
                    for chunk in command.chunks:
                        with self._storing:  # of tensor ranks two threads of rank 0 ask, and the codec has one scratch
                            self.store(chunk)
                finally:
                    say(words.ChunksStored(command.number))
            case words.TellTiers():
                say(self.told(command.number))
            case words.CloseTiers():
                self._close(command.timeout_s)
                say(self.told(command.number))

    def _open(self, command: words.OpenTiers) -> words.TiersOpen:
        try:
            self.open(command.identity)
        except ValueError as error:
            return words.TiersOpen(command.number, shown(error))
        except Exception as error:  # rank 0 waits for an answer
            log.exception("the tiers of this rank could not be opened")
            return words.TiersOpen(command.number, shown(f"{type(error).__name__}: {error}"))
        return words.TiersOpen(command.number, None)

    def _find(self, command: words.FindChunks, say: Say) -> None:
        opened, digests = self.opened, command.digests
        kv: list[words.Reach | None] = [None] * len(digests)
        x: list[int | None] = []

        def look() -> None:
            places = find(opened.tiers, self._forms, digests)
            kv[:] = [None if place is None else (place,) for place in places]
            if opened.codec.keeps_activations:
                count = places.index(None) if None in places else len(places)
                mine = [i for i in range(count) if self._turns.mine(command.first + i)]
                x[:] = [None] * count
                for i, tier in zip(mine, opened.tiers.find([name_of(digests[i], "x") for i in mine]), strict=True):
                    x[i] = tier

        ticket = opened.looking.submit(look, 0, "look")
        ticket.then(lambda: say(words.ChunksFound(command.number, kv, x)))

    def _bring(self, command: words.BringChunks, say: Say) -> None:
        opened = self.opened
        places = [self._place_of(each) for each in command.chunks]
        form = self._forms[next((place.form for place in reversed(places) if place is not None), 0)]
        wanted = [
            part
            for each, place in zip(command.chunks, places, strict=True)
            if place is not None
            for part in form.wanted(each.chunk, each.digest, each.slot, place.tier, each.kind)
        ]
        projected = {each.chunk: each.slot for each in command.chunks if each.kind == "x"}
        transfer = RestoreTransfer(form.codec, opened.tiers, wanted, command.prompt, opened.project, projected)
        restore = _Bringing(command.number, transfer, command.chunks)
        with self._lock:
            transfer.start(opened.bringing, self._fence())
            self._restores[command.number] = restore
            self._of |= dict.fromkeys(restore.slots, restore)
        transfer.last.then(lambda: self._brought(restore, say))

    def _place_of(self, wanted: words.WantedHere) -> words.Place | None:
        """Where this rank gets the chunk; None for activations that are another tensor rank's to bring."""
        if wanted.kind == "k":
            return wanted.places[self._turns.rank]
        return wanted.places[0] if self._turns.mine(wanted.chunk) else None

    def _brought(self, restore: _Bringing, say: Say) -> None:
        """On the copy stream, before the last layer's ticket ends: those who wait for it still find it."""
        transfer = restore.transfer
        with self._lock:
            restore.brought = True
            over = not transfer.projects or restore.ended
        if over:
            self._forget(restore)
        layers = [] if transfer.cancelled or transfer.good < len(transfer.chunks) else transfer.layer_transfers
        say(words.ChunksBrought(restore.number, restore.good, transfer.reason, transfer.link_s, transfer.cpu_s, layers))

    def _forget(self, restore: _Bringing) -> None:
        """No step has to wait for its slots any more."""
        with self._lock:
            for slot in restore.slots:
                if self._of.get(slot) is restore:
                    del self._of[slot]

    def _cancel(self, number: int) -> None:
        restore = self._restores.pop(number, None)
        if restore is None:
            return
        restore.transfer.cancel()
        with self._lock:  # else `_brought`, at the same moment, would leave it to us and we to it
            restore.ended, over = True, restore.brought
        if over:
            self._forget(restore)

    def _end(self, command: words.EndBring, say: Say) -> None:
        restore = self._restores.pop(command.bring)
        transfer = restore.transfer

        def tell() -> None:
            say(words.BringEnded(command.number, transfer.waited_s, transfer.projections))

        def ended() -> None:
            self._forget(restore)
            if transfer.codec.device is None:
                tell()
            else:  # the device has only been told to project: neither steps nor pings wait for its times
                self.opened.looking.submit(tell, 0, "times")

        if transfer.projects:
            transfer.layers[-1][0].then(ended)
        else:
            ended()

    def store(self, chunk: words.ChunkToStore, parked: Parked | None = None) -> bool:
        """Offers a chunk to the tiers that lack it; afterwards its slot may be written again. Nobody waits for an
        answer from disk or network.

        parked: by a thread beside the one that computes; False, with nothing read any more, once it is revoked.
        """
        self._fence()()
        opened = self.opened
        codec, tiers = opened.storing if parked is None else opened.codec, opened.tiers
        tiers.set_quota(chunk.tenant, chunk.quota)
        named: dict[BlobKind, bytes] = {"k": self._share.of(chunk.digest)}
        if codec.keeps_activations and chunk.activations and self._turns.mine(chunk.chunk):
            named["x"] = chunk.digest
        for kind, own in named.items():
            name = name_of(own, kind)
            lacking = tiers.lacking(name) if chunk.sure else tiers.doubtful(name)
            if chunk.in_memory:
                lacking = [tier for tier in lacking if not tiers.queues(tier)]
            for form in sorted({tiers.format(tier) for tier in lacking}):
                with contextlib.nullcontext() if parked is None else parked.lock:
                    if parked is not None and parked.revoked:
                        return False
                    parts = codec.encode(chunk.slot, own, kind, form)
                if self.spoilt():
                    return False
                offer(tiers, [tier for tier in lacking if tiers.format(tier) == form], name, chunk.tenant, parts)
        return True

    def told(self, number: int = 0) -> words.TiersTold:
        tiers = self.opened.tiers
        return words.TiersTold(number, {kind: asdict(each) for kind, each in tiers.stats().items()}, tiers.queued_blobs)

    def _close(self, timeout_s: float) -> None:
        """After what the copy streams were given."""
        opened = self.opened
        opened.bringing.close()
        opened.looking.close()
        opened.tiers.close(timeout_s)


def offer(tiers: Tiers, lacking: Sequence[int], name: bytes, tenant: bytes, parts: BlobParts) -> None:
    """What a tier does not take is counted there."""
    if any(tiers.queues(tier) for tier in lacking):
        parts = (b"".join(parts),)  # the queue keeps it while the next chunk is encoded
    for tier in lacking:
        tiers.offer(tier, name, tenant, parts, sum(len(part) for part in parts))


class AgentThread:
    """The agent of a rank in another process than rank 0: it opens, stores and closes on a thread, in the order asked
    for, so that the link is read meanwhile."""

    SLOW = (words.OpenTiers, words.StoreChunks, words.CloseTiers)

    def __init__(self, agent: TierAgent) -> None:
        self.agent = agent
        self._work: queue.SimpleQueue[tuple[words.Command, Say]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="headrace-tiers", daemon=True).start()

    def obey(self, body: bytes, answer: Callable[[bytes], None]) -> None:
        """TierAgent.obey, over a link. Raises ValueError as that does, and for what is no command."""
        command = words.command(body)

        def say(word: words.Answer) -> None:
            answer(words.encode(word))

        if isinstance(command, self.SLOW):
            self._work.put((command, say))
        else:
            self.agent.obey(command, say)

    def _run(self) -> None:
        closed = False
        while not closed:
            command, say = self._work.get()
            closed = isinstance(command, words.CloseTiers)
            try:
                self.agent.obey(command, say)
            except Exception:
                log.exception("the tiers of this rank could not do what was asked")
