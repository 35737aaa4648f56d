"""What tiers do on streams of a device: every read and every reuse of memory is ordered, and each wait is needed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import arrival, device
from headrace.config import AttentionSpec
from headrace.kv.storage import KVStorage
from headrace.offload import chunk_codec, copy_streams, frame, landing, ticket
from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.copy_streams import CudaStream, CudaTicket, ThreadStream
from headrace.offload.emulated_link import EmulatedLink
from headrace.offload.landing import PinnedLanding
from headrace.offload.ranked import words
from headrace.offload.ranked.agent import Opened, TierAgent
from headrace.offload.tiers import host
from headrace.offload.tiers.base import BlobKind
from headrace.offload.tiers.host import HostTier
from headrace.offload.tiers.pinned import PinnedBuffers
from headrace.offload.tiers.stack import Tiers
from headrace.parallel.coming import wait_for_all
from tests.support.stream_order import StreamOrder, ordered_threads

LAYERS, SLOTS, HIDDEN, HEADS, DIM = 2, 8, 32, 2, 16
DIGESTS = [bytes([number]) * 32 for number in range(1, 5)]
KINDS: tuple[BlobKind, ...] = ("x", "x", "k", "k")


class FarTier(HostTier):
    """One whose blobs are read elsewhere, as from a disk."""

    lend = None  # type: ignore[assignment]


class Engine:
    """A pool on a device, with a tier below it. What steps do to the pool is done by torch, on the current stream."""

    def __init__(self, order: StreamOrder, monkeypatch: pytest.MonkeyPatch, lends: bool) -> None:
        self.order = order
        ordered_threads(order, monkeypatch, (arrival, ticket, copy_streams, landing, chunk_codec))
        _watch_the_host(order, monkeypatch)
        self.spec = spec = AttentionSpec(LAYERS, HEADS, HEADS, DIM, 1.0, (None,) * LAYERS)
        self.storage = KVStorage(spec, SLOTS, torch.float32, HIDDEN, torch.float32)
        assert self.storage.x is not None
        self.x = self.storage.x
        for layer, pool in enumerate(self.storage.pools):
            for name, x in zip(("K", "V", "X"), (*pool.tensors, self.x[layer]), strict=True):
                order.watch(x, f"{name} of layer {layer}")
        codecs = [ChunkCodec(self.storage, spec, bytes(32), torch.float32, "plain", device=order) for _ in range(2)]
        piece = codecs[0].section_bytes("k", "raw")
        monkeypatch.setattr(PinnedLanding, "piece_bytes", piece)
        tier = (HostTier if lends else FarTier)(1 << 22, allocate=PinnedBuffers(order))
        self.tiers = Tiers([tier], 1 << 20, 1.0)
        bringing = CudaStream("restore", order)
        opened = Opened(self.tiers, codecs[0], codecs[1], bringing, ThreadStream("look"), self.project)  # type: ignore[arg-type]
        self.agent = TierAgent(lambda identity: opened)
        self.agent.open(bytes(32))
        self.answers = copy_streams.queue.SimpleQueue[Any]()  # as ordered as the others

    def project(self, layer: int, x: Tensor, chunks: Sequence[int], slots: Sequence[int], prompt_len: int) -> None:
        """K and V that depend on X, as a model's do."""
        pool, where = self.storage.pool(layer), torch.tensor(slots)
        for part, into in enumerate(pool.tensors):
            into[where] = (x.mean((1, 2)) + part)[:, None, None, None].expand(len(slots), *into.shape[1:])

    def write(self, slots: Sequence[int], seed: int) -> None:
        """As a step that computes these chunks."""
        g = torch.Generator().manual_seed(seed)
        for layer in range(LAYERS):
            self.x[layer][slots] = torch.randn(len(slots), 64, HIDDEN, generator=g)
            self.project(layer, self.x[layer][slots], slots, slots, 0)

    def read(self, slots: Sequence[int]) -> list[Tensor]:
        """As a step that attends them, layer after layer, each waited for."""
        found = []
        for layer in range(LAYERS):
            for each in self.agent.pending(slots, layer):
                each.wait()
            found += [x[slots] for x in self.storage.pool(layer).tensors]
        return found

    def replay(self, slots: Sequence[int]) -> list[Tensor]:
        """As a replayed step, between whose layers nothing waits."""
        wait_for_all(self.agent, slots, self.spec)
        return [x[slots] for layer in range(LAYERS) for x in self.storage.pool(layer).tensors]

    def store(self, slots: Sequence[int]) -> None:
        for slot, digest in zip(slots, DIGESTS, strict=True):
            assert self.agent.store(words.ChunkToStore(slot, digest, b"", True, activations=True))

    def bring(self, slots: Sequence[int], kinds: Sequence[BlobKind]) -> None:
        wanted = [
            words.WantedHere(i, DIGESTS[i], slot, (words.Place(0),), kind)
            for i, (slot, kind) in enumerate(zip(slots, kinds, strict=True))
        ]
        self.agent.obey(words.BringChunks(7, wanted, 256), self.answers.put)


def _watch_the_host(order: StreamOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host itself reads and writes pinned memory: checksums, and what a tier gives."""
    checksum, copy, fill = frame.checksum, host.copy, host.fill

    def read(data: Any) -> int:
        order.host(data, writes=False)
        return checksum(data)

    def given(buffer: Any, wanted: Any) -> bool:
        order.host(wanted.into, writes=True)
        return copy(buffer, wanted)

    def stored(buffer: Any, parts: Any) -> None:
        order.host(buffer, writes=True)
        fill(buffer, parts)

    monkeypatch.setattr(frame, "checksum", read)
    monkeypatch.setattr(host, "fill", stored)
    monkeypatch.setattr(host, "copy", given)


def run(order: StreamOrder, monkeypatch: pytest.MonkeyPatch, lends: bool, replayed: bool = False) -> None:
    """Chunks are computed, stored and overwritten; they come back twice into slots that were in use before, and are
    attended while they come. What comes a third time nobody attends: its slots are written to when it is there."""
    with device.use(order), order.recording():
        engine = Engine(order, monkeypatch, lends)
        first, second = [0, 1, 2, 3], [4, 5, 6, 7]
        engine.write(first, seed=1)
        truth = engine.read(first)
        engine.store(first)
        engine.write(first, seed=2)
        for slots in (second, first):
            engine.read(slots)  # a step is still at them
            engine.bring(slots, KINDS)
            attended = engine.replay(slots) if replayed else engine.read(slots)
            assert all(torch.equal(*pair) for pair in zip(attended, truth, strict=True))
            assert engine.answers.get().good == len(slots)
            engine.agent.obey(words.EndBring(8, 7), engine.answers.put)
            engine.answers.get()
        engine.bring(second, "kkkk")
        engine.answers.get()
        engine.write(second, seed=3)
        engine.agent.obey(words.CloseTiers(9, 1.0), engine.answers.put)


NEEDED = {
    ("_carry", "wait_event"), ("wait in read", "wait_event"), ("wait in wait", "wait_event"), ("filled", "wait_event"),
    ("filled", "synchronize"), ("finish", "synchronize"),
}  # fmt: skip
"""Functions that wait, and how."""
LANDING = ("take", "synchronize")
"""What is read elsewhere passes through memory that is used again."""
TIMES = {("seconds", "synchronize")}
"""Waits that order nothing: for times."""


@pytest.mark.parametrize("lends", [True, False], ids=["lent", "read"])
def test_all_is_ordered(lends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    order = StreamOrder()
    run(order, monkeypatch, lends)
    assert not order.violations
    assert order.seen == NEEDED | TIMES | (set() if lends else {LANDING})


@pytest.mark.parametrize("place", sorted(NEEDED | {LANDING}), ids="-".join)
def test_a_dropped_wait_is_found(place: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    order = StreamOrder(dropped=place)
    run(order, monkeypatch, lends=place != LANDING)
    assert order.violations


@pytest.mark.parametrize("dropped", [None, ("wait in wait_for_all", "wait_event")], ids=["ordered", "dropped"])
def test_a_replayed_step_waits_for_all_layers(dropped: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no copy is known to have ended before it is attended: else a thread that knows would order it."""
    order, attended = StreamOrder(dropped), threading.Event()
    finish, bring, replay = CudaTicket.finish, Engine.bring, Engine.replay

    def finished(self: CudaTicket, link: EmulatedLink) -> None:
        attended.wait(9)
        finish(self, link)

    def brought(self: Engine, slots: Sequence[int], kinds: Sequence[BlobKind]) -> None:
        if kinds is KINDS:  # they are attended
            attended.clear()
        bring(self, slots, kinds)

    def replayed(self: Engine, slots: Sequence[int]) -> list[Tensor]:
        found = replay(self, slots)
        attended.set()
        return found

    attended.set()
    monkeypatch.setattr(CudaTicket, "finish", finished)
    monkeypatch.setattr(Engine, "bring", brought)
    monkeypatch.setattr(Engine, "replay", replayed)
    run(order, monkeypatch, lends=True, replayed=True)
    assert bool(order.violations) == (dropped is not None)


@pytest.mark.parametrize(
    ("row", "behind", "ordered"),
    [(1, "late", True), (1, "early", False), (1, "", False), (2, "", True)],
    ids=["behind-the-write", "behind-an-event-of-before", "behind-nothing", "elsewhere"],
)
def test_what_counts_as_ordered(row: int, behind: str, ordered: bool) -> None:
    order = StreamOrder()
    with order.recording():
        x, other, events = order.watch(torch.zeros(4, 8), "x"), order.stream(), {}
        events["early"] = order.current_stream().record_event()
        x[1] = 1
        events["late"] = order.current_stream().record_event()
        with order.on(other):
            if behind:
                other.wait_event(events[behind])
            x[row].clone()
        x[3] = 1
    assert not order.violations if ordered else "bytes 32..63" in order.violations[0]


def test_reads_need_no_order() -> None:
    order = StreamOrder()
    with order.recording():
        x = order.watch(torch.zeros(4, 8), "x")
        x.clone()
        with order.on(order.stream()):
            x.clone()
            assert not order.violations
            x[1] = 1
    assert order.violations, "but what is read is not written to meanwhile"


def test_a_thread_knows_what_it_waited_for() -> None:
    for waits in (True, False):
        order = StreamOrder()
        with order.recording():
            x, there = order.pinned((64,), torch.uint8), order.watch(torch.ones(64, dtype=torch.uint8), "there")
            x.copy_(there)
            event = order.current_stream().record_event()
            if waits:
                event.synchronize()
        order.host(x.numpy(), writes=False)
        assert bool(order.violations) != waits
