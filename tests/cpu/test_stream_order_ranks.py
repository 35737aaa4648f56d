"""Restores on one of several ranks, on streams of a device: chunks go on to other ranks as they come, and slots are
filled behind the steps that were sent before. Every read and every reuse is ordered, and each wait is needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace import device
from headrace.arrival import Arrival
from headrace.kv.chunk_copies import copy_chunks
from headrace.offload.ranked import words
from headrace.offload.tiers.base import BlobKind
from headrace.parallel import device_transfer
from headrace.parallel.coming import CachedPiece, SideStream
from headrace.parallel.device_transfer import DeviceTransfer
from headrace.parallel.step_fence import StepFence
from headrace.parallel.transport import Traffic
from headrace.parallel.workspace import LayerBuffer
from tests.support.ordered_threads import ordered_threads
from tests.support.pool_on_streams import DIM, HEADS, KINDS, LAYERS, PoolOnStreams
from tests.support.stream_order import StreamOrder

CPU = torch.device("cpu")


class RankOnStreams:
    """A rank whose four cached chunks come into a workspace, where it attends to them and from where they are sent."""

    def __init__(self, order: StreamOrder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order, self.fence = order, StepFence(order)
        ordered_threads(order, monkeypatch, (device_transfer,))
        self.pool = PoolOnStreams(order, monkeypatch, lends=True, fence=self.fence.here)
        self.side, self.out = SideStream(order), order.stream()
        self.buffers = [LayerBuffer((HEADS, DIM), 4, torch.float32, CPU) for _ in range(LAYERS)]
        for number, buffer in enumerate(self.buffers):
            for name, x in zip("KV", buffer.pool.tensors, strict=True):
                order.watch(x, f"{name} of workspace {number}")
        self.sent: list[Tensor] = []
        self.coming: dict[tuple[int, ...], list[list[Arrival]]] = {}

    def expect(self, slots: Sequence[int]) -> None:
        """While none of it can have come: what is over is nobody's to wait for."""
        self.coming[tuple(slots)] = [self.pool.agent.pending(slots, layer) for layer in range(LAYERS)]

    def step(self, slots: Sequence[int]) -> list[Tensor]:
        """As KVExchange: what comes and goes is posted a layer ahead."""
        found, pieces = [], [self.post(0, slots)]
        for layer in range(LAYERS):
            if layer + 1 < LAYERS:
                pieces.append(self.post(layer + 1, slots))
            pieces[layer].wait()
            found += [x.clone() for x in self.buffers[layer].pool.tensors]
        return found

    def post(self, layer: int, slots: Sequence[int]) -> CachedPiece:
        buffer, at = self.buffers[layer], np.arange(4, dtype=np.int32)
        buffer.drain()
        copy = partial(copy_chunks, self.pool.storage.pool(layer), np.array(slots, dtype=np.int32), buffer.pool, at)
        piece = CachedPiece(self.coming[tuple(slots)][layer], copy, self.side)
        piece.then(partial(self.send, buffer))
        return piece

    def send(self, buffer: LayerBuffer) -> None:
        """As a transport of the device's tensors."""
        for x in buffer.pool.tensors:
            transfer = DeviceTransfer(self.order, Traffic(), x)
            with self.order.on(self.out):
                self.out.wait_event(transfer.begun)
                self.sent.append(x.clone())
                transfer.over.record(self.out)
            transfer.hand_over()
            buffer.works.append(transfer)


def run(order: StreamOrder, monkeypatch: pytest.MonkeyPatch, kinds: Sequence[BlobKind]) -> None:
    """Chunks are stored, and come back for two sequences into slots that a step still writes, which was sent before and
    is launched after they were asked for. Both are attended to in the same workspace."""
    with device.use(order), order.recording():
        rank = RankOnStreams(order, monkeypatch)
        pool, each = rank.pool, [[4, 5, 6, 7], [0, 1, 2, 3]]
        pool.write(each[1], seed=1)
        truth = pool.read(each[1])
        pool.store(each[1])
        rank.fence.sent()
        for number, slots in enumerate(each):
            pool.bring(slots, kinds, number)
            rank.expect(slots)
        pool.write(range(8), seed=2)
        rank.fence.computed()
        for slots in each:
            assert all(torch.equal(*pair) for pair in zip(rank.step(slots), truth, strict=True))
            assert all(torch.equal(*pair) for pair in zip(rank.sent[-4:], truth, strict=True))
        assert [pool.answers.get().good for _ in each] == [4, 4]
        for number in range(2):
            pool.agent.obey(words.EndBring(2 + number, number), pool.answers.put)
            pool.answers.get()
        pool.agent.obey(words.CloseTiers(9, 1.0), pool.answers.put)


RANKED = {
    ("wait in begin", "wait_event"), ("_take", "wait_event"), ("follow", "wait_event"), ("send", "wait_event"),
    ("wait in step", "wait_event"), ("wait in drain", "wait_event"),
}  # fmt: skip
"""Functions that wait beside those of one rank."""
REUSED = ("_take", "wait_event")
"""For the workspace's last use, behind which a projection is anyway."""


@pytest.mark.parametrize("kinds", ["kkkk", KINDS, "xxxx"], ids="".join)
def test_all_is_ordered(kinds: Sequence[BlobKind], monkeypatch: pytest.MonkeyPatch) -> None:
    order = StreamOrder()
    run(order, monkeypatch, kinds)
    assert not order.violations
    assert order.seen >= RANKED


@pytest.mark.parametrize("place", sorted(RANKED), ids="-".join)
def test_a_dropped_wait_is_found(place: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    order = StreamOrder(dropped=place)
    run(order, monkeypatch, "kkkk" if place == REUSED else KINDS)
    assert order.violations
