"""What one of several ranks streams on a device: every read and reuse of memory is ordered, and each wait is needed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace import arrival, device
from headrace.config import AttentionSpec
from headrace.kernels import reference
from headrace.kv.chunk_copies import copy_chunks
from headrace.kv.own_chunks import OwnChunks
from headrace.models.x_turns import XTurns
from headrace.offload import copy_streams, ticket
from headrace.offload.copy_streams import CudaTicket, open_copy_streams
from headrace.offload.emulated_link import EmulatedLink
from headrace.offload.streaming.staged_store import BUFFERS, StagedChunks, StagedStore
from headrace.offload.streaming.staged_x import StagedX
from headrace.offload.streaming.store import OutsideStore
from headrace.parallel.coming import CachedPiece, SideStream
from headrace.parallel.workspace import LayerBuffer
from headrace.types import CHUNK
from tests.support.ordered_threads import ordered_threads
from tests.support.stream_order import StreamOrder

LAYERS, SLOTS, HIDDEN, HEADS, DIM = 3, 6, 4, 1, 4
CPU = torch.device("cpu")
STEPS: list[list[tuple[list[int], list[int]]]] = [
    [([], [0, 1, 2, 3])],
    [([0, 1, 2], [4]), ([3, 4], [5])],
    [([0, 1, 2, 3], [5]), ([2, 4], [5])],
]
"""(slots that are cached, slots that are written), by group, by step. A group attends to what the one before wrote."""


def late_ends(store: StagedStore, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No copy of a step is known to have ended before the step is computed: else a thread that knows would order it."""
    ends, finish, settle = threading.Event(), CudaTicket.finish, store.settle

    def finished(self: CudaTicket, link: EmulatedLink) -> None:
        ends.wait(9)
        finish(self, link)

    def settled() -> None:
        ends.set()
        settle()
        ends.clear()

    monkeypatch.setattr(CudaTicket, "finish", finished)
    monkeypatch.setattr(store, "settle", settled)
    return ends


class StreamingRank:
    """Groups in turn attend in a workspace, from which chunks go to other ranks, and where their chunks lie. What is
    written to a chunk of a layer is one number, `self.model`, plus that of the layer."""

    def __init__(self, order: StreamOrder, monkeypatch: pytest.MonkeyPatch, share: float, resident: bool) -> None:
        ordered_threads(order, monkeypatch, (arrival, ticket, copy_streams))
        self.order, self.side = order, SideStream(order)
        spec = AttentionSpec(LAYERS, HEADS, HEADS, DIM, 1.0, (None,) * LAYERS)
        on_device = (lambda shape, dtype: torch.zeros(*shape, dtype=dtype)) if resident else None
        outside = OutsideStore(spec, SLOTS, torch.float32, torch.float32, HIDDEN, order.pinned, on_device)
        decoder: Any = SimpleNamespace(turns=XTurns(), rope=None, layers=SimpleNamespace(project=self.project))
        decoder.config = SimpleNamespace(rope_depends_on_length=False)
        backend: Any = SimpleNamespace(append=reference.append)
        x = StagedX(decoder, backend, outside, SLOTS, BUFFERS, resident, device=order)
        x.share = share
        self.store = StagedStore(spec, outside, SLOTS, open_copy_streams(order), x, order)
        self.workspace = [LayerBuffer((HEADS, DIM), SLOTS, torch.float32, CPU) for _ in range(LAYERS)]
        watched = {f"staging {at}": pool.tensors for at, pool in enumerate(self.store.buffers)}
        watched |= {f"staging of X {at}": (each,) for at, each in enumerate(x.buffers)}
        watched |= {f"workspace {at}": each.pool.tensors for at, each in enumerate(self.workspace)}
        watched |= {f"X of layer {at}": (each,) for at, each in enumerate(outside.x if resident else [])}
        for name, tensors in watched.items():
            for each in tensors:
                order.watch(each, name)
        self.model = [0.0] * SLOTS
        self.ends = late_ends(self.store, monkeypatch)

    def project(self, layer: int, x: Tensor, cos_sin: None) -> tuple[Tensor, Tensor]:
        k = (x + layer)[:, None]
        return k, -k

    def step(self, groups: Sequence[tuple[list[int], list[int]]], number: int) -> None:
        own = [self.own(*group) for group in groups]
        for index, (each, staged) in enumerate(zip(own, self.store.stage(own), strict=True)):
            for slot in each.slots[each.written].tolist():
                self.model[slot] = 100.0 * number + 10 * index + slot
            self.compute(each, staged, exchanged=index % 2 == 0)
        self.store.computed()

    def own(self, cached: list[int], written: list[int]) -> OwnChunks:
        slots = np.array(sorted({*cached, *written}), dtype=np.int32)
        seen, new = (
            np.searchsorted(slots, np.array(some, dtype=np.int32)).astype(np.int32) for some in (cached, written)
        )
        return OwnChunks(slots, {None: seen}, new, CHUNK * len(new), slots, slots, new, new[:0])

    def compute(self, own: OwnChunks, staged: StagedChunks, exchanged: bool) -> None:
        rows = np.repeat(own.written, CHUNK), np.tile(np.arange(CHUNK, dtype=np.int32), len(own.written))
        watch = staged.keep(*rows)
        assert watch is not None
        numbers = torch.tensor([self.model[slot] for slot in own.slots[rows[0]]])
        x = numbers[:, None].expand(-1, HIDDEN).contiguous()
        seen = torch.tensor([self.model[slot] for slot in own.slots[own.cached[None]]])
        pieces = [self.post(0, own, staged)] if exchanged else []
        for layer in range(LAYERS):
            if exchanged and layer + 1 < LAYERS:
                pieces.append(self.post(layer + 1, own, staged))
            watch(layer, x)
            reference.append(staged.pool(layer), *self.project(layer, x, None), *map(torch.from_numpy, rows))
            for each in pieces[layer : layer + 1] if exchanged else staged.pending([], layer):
                if each is not None:
                    each.wait()
            pool = self.workspace[layer].pool if exchanged else staged.pool(layer)
            assert torch.equal(pool.k[own.cached[None], 0, 0, 0], seen + layer)
            assert torch.equal(pool.v[own.cached[None], 0, 0, 0], -seen - layer)
            staged.finish(layer)

    def post(self, layer: int, own: OwnChunks, staged: StagedChunks) -> CachedPiece | None:
        """As KVExchange, a layer ahead."""
        cached, pool, into = own.cached[None], staged.pool(layer), self.workspace[layer].pool
        parts = staged.pending([], layer)
        if parts:
            return CachedPiece(parts, lambda: copy_chunks(pool, cached, into, cached), self.side)
        copy_chunks(pool, cached, into, cached)
        return None


@contextmanager
def streaming(
    order: StreamOrder, monkeypatch: pytest.MonkeyPatch, share: float, resident: bool = False
) -> Iterator[StreamingRank]:
    with device.use(order), order.recording():
        rank = StreamingRank(order, monkeypatch, share, resident)
        for number, groups in enumerate(STEPS):
            rank.step(groups, number)
        rank.store.settle()
        yield rank
        rank.ends.set()
        rank.store.close()


NEEDED = {
    ("_carry", "wait_event"), ("wait in run", "wait_event"), ("wait in pool", "wait_event"), ("follow", "wait_event"),
    ("wait in _await", "wait_event"), ("wait in compute", "wait_event"), ("finish", "synchronize"),
}  # fmt: skip
"""Functions that wait, and how."""
OTHERS = {("seconds", "synchronize"), ("_take", "wait_event")}
"""For times; and for the workspace's last use, behind which these chunks are loaded anyway."""


@pytest.mark.parametrize(("share", "resident"), [(0.0, False), (0.5, False), (1.0, True)])
def test_all_is_ordered(share: float, resident: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    order = StreamOrder()
    with streaming(order, monkeypatch, share, resident) as rank:
        totals, stored = rank.store.totals, rank.store.store
        assert totals.loaded and bool(totals.projected) == (share > 0) and totals.seconds > 0
        for layer, pool in enumerate(stored.pools):
            assert torch.equal(pool.k[:, 0, 0, 0], torch.tensor(rank.model) + layer)
    assert not order.violations
    assert order.seen == NEEDED | OTHERS


def test_the_only_layer_of_a_group_is_loaded_behind_what_the_group_before_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LAYERS", 1)
    order = StreamOrder()
    with streaming(order, monkeypatch, 0.0) as rank:
        assert rank.store.totals.loaded
    assert not order.violations


@pytest.mark.parametrize(
    ("place", "share"),
    [*((place, 0.5) for place in sorted(NEEDED)), (("follow", "wait_event"), 1.0)],
    ids=lambda given: str(given) if isinstance(given, float) else "-".join(given),
)
def test_a_dropped_wait_is_found(place: tuple[str, str], share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    order = StreamOrder(dropped=place)
    with streaming(order, monkeypatch, share):
        pass
    assert order.violations
