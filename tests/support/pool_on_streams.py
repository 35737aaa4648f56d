"""A pool on a device that only keeps a record (tests.support.stream_order), with a tier below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import arrival
from headrace.config import AttentionSpec
from headrace.kv.storage import KVStorage
from headrace.offload import chunk_codec, copy_streams, frame, landing, ticket
from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.copy_streams import CudaStream, ThreadStream
from headrace.offload.landing import PinnedLanding
from headrace.offload.ranked import words
from headrace.offload.ranked.agent import Fence, Opened, TierAgent, at_once
from headrace.offload.tiers import host, pinned
from headrace.offload.tiers.base import BlobKind
from headrace.offload.tiers.host import HostTier
from headrace.offload.tiers.pinned import PinnedBuffers
from headrace.offload.tiers.stack import Tiers
from headrace.parallel.coming import wait_for_all
from tests.support.ordered_threads import ordered_threads
from tests.support.stream_order import StreamOrder

LAYERS, SLOTS, HIDDEN, HEADS, DIM = 2, 8, 32, 2, 16
DIGESTS = [bytes([number]) * 32 for number in range(1, 5)]
KINDS: tuple[BlobKind, ...] = ("x", "x", "k", "k")


class FarTier(HostTier):
    """One whose blobs are read elsewhere, as from a disk."""

    lend = None  # type: ignore[assignment]


class PoolOnStreams:
    """A pool on a device, with a tier below it. What steps do to the pool is done by torch, on the current stream."""

    def __init__(
        self, order: StreamOrder, monkeypatch: pytest.MonkeyPatch, lends: bool, fence: Fence = at_once
    ) -> None:
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
        for module, size in ((pinned, "SLAB"), (copy_streams, "PINNED_BYTES")):
            monkeypatch.setattr(module, size, 1 << 16)  # zeroing more would take half of the time
        tier = (HostTier if lends else FarTier)(1 << 22, allocate=PinnedBuffers(order))
        self.tiers = Tiers([tier], 1 << 20, 1.0)
        bringing = CudaStream("restore", order)
        opened = Opened(self.tiers, codecs[0], codecs[1], bringing, ThreadStream("look"), self.project)  # type: ignore[arg-type]
        self.agent = TierAgent(lambda identity: opened, fence=fence)
        self.agent.open(bytes(32))
        self.answers = copy_streams.queue.SimpleQueue[Any]()  # as ordered as the others

    def project(self, chunks: Sequence[int], slots: Sequence[int], prompt_len: int) -> Callable[[int], None]:
        """K and V that depend on X, as a model's do."""
        where = torch.tensor(slots)

        def projected(layer: int) -> None:
            x = self.x[layer][where]
            for part, into in enumerate(self.storage.pool(layer).tensors):
                into[where] = (x.mean((1, 2)) + part)[:, None, None, None].expand(len(slots), *into.shape[1:])

        return projected

    def write(self, slots: Sequence[int], seed: int) -> None:
        """As a step that computes these chunks."""
        g = torch.Generator().manual_seed(seed)
        for layer in range(LAYERS):
            self.x[layer][slots] = torch.randn(len(slots), 64, HIDDEN, generator=g)
            self.project(slots, slots, 0)(layer)

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

    def bring(self, slots: Sequence[int], kinds: Sequence[BlobKind], number: int = 7) -> None:
        wanted = [
            words.WantedHere(i, DIGESTS[i], slot, (words.Place(0),), kind)
            for i, (slot, kind) in enumerate(zip(slots, kinds, strict=True))
        ]
        self.agent.obey(words.BringChunks(number, wanted, words.Prompt(256)), self.answers.put)


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
