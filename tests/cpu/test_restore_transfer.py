"""One rank's part of a restore: until when its chunks are on their way, who projects, and how long a layer took."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.arrival import Arrival
from headrace.config import AttentionSpec
from headrace.kernels.backend import backend_of
from headrace.kv.storage import KVStorage
from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.copy_streams import ThreadStream
from headrace.offload.ranked import words
from headrace.offload.ranked.agent import Fence, Opened, TierAgent, at_once
from headrace.offload.restore.transfer import LayerTransfer, RestoreTransfer
from headrace.offload.ticket import Ticket
from headrace.offload.tiers.base import BlobKind
from headrace.offload.tiers.host import HostTier
from headrace.offload.tiers.stack import Tiers
from headrace.parallel.coming import CachedPiece
from headrace.parallel.step_fence import StepFence

LAYERS, SLOTS, HIDDEN = 2, 6, 64
DIGESTS = [bytes([number]) * 32 for number in range(1, 4)]


class Rank:
    """An agent whose chunks 0 and 1 have activations; projections are noted, the link waits for `go`."""

    def __init__(self, fence: Fence = at_once) -> None:
        spec = AttentionSpec(layers=LAYERS, heads=2, kv_heads=2, head_dim=32, scale=1.0, windows=(None,) * LAYERS)
        self.storage = KVStorage(spec, SLOTS, torch.bfloat16, HIDDEN, torch.bfloat16)
        layout = backend_of("cpu").layout(torch.bfloat16, 32)
        codecs = [ChunkCodec(self.storage, spec, bytes(32), torch.bfloat16, layout) for _ in range(2)]
        tiers = Tiers([HostTier(1 << 22)], 1 << 20, 1.0)
        self.projected: list[tuple[int, list[int], list[int]]] = []
        project: Any = lambda chunks, slots, prompt_len: lambda layer: self.projected.append((layer, chunks, slots))  # noqa: E731
        opened = Opened(tiers, codecs[0], codecs[1], ThreadStream("restore"), ThreadStream("look"), project)
        self.agent, self.told = TierAgent(lambda identity: opened, fence=fence), queue.SimpleQueue[words.Answer]()
        self.agent.open(bytes(32))
        for slot, digest in enumerate(DIGESTS):
            assert self.agent.store(words.ChunkToStore(slot, digest, b"", True, activations=slot < 2))

    def bring(self, *kinds: BlobKind) -> None:
        wanted = [words.WantedHere(i, DIGESTS[i], 3 + i, (words.Place(0),), kind) for i, kind in enumerate(kinds)]
        self.obey(words.BringChunks(7, wanted, words.Prompt(192)))

    def obey(self, command: words.Command) -> None:
        self.agent.obey(command, self.told.put)

    def answer(self) -> Any:
        return self.told.get(timeout=20)


def test_stored_activations_are_found() -> None:
    rank = Rank()
    rank.obey(words.FindChunks(1, [*DIGESTS, bytes(32)]))
    assert rank.answer() == words.ChunksFound(
        1, [(words.Place(0),), (words.Place(0),), (words.Place(0),), None], [0, 0, None]
    )


def test_chunks_to_be_projected_are_on_their_way_until_the_step_has_projected_them() -> None:
    rank = Rank()
    rank.bring("x", "x", "k")
    assert rank.answer().good == 3 and rank.agent, "nobody has projected them"
    rank.obey(words.EndBring(8, 7))
    assert rank.told.empty()
    for layer in range(LAYERS):
        for each in rank.agent.pending([4], layer):
            each.wait()
        assert not rank.agent.pending([2], layer), "another slot"
    ended = rank.answer()
    assert rank.projected == [(layer, [0, 1], [3, 4]) for layer in range(LAYERS)]
    assert ended.number == 8 and [each.tokens for each in ended.projections] == [128] * LAYERS
    assert not rank.agent and not rank.agent.pending([4], 0)


def test_loaded_chunks_have_come_when_they_are_there() -> None:
    rank = Rank()
    rank.bring("k", "k")
    assert rank.answer().good == 2 and not rank.agent
    rank.obey(words.EndBring(8, 7))
    assert rank.answer().projections == [] and not rank.projected


@pytest.mark.parametrize("soon", [True, False])
def test_nobody_waits_for_what_is_cancelled(soon: bool) -> None:
    rank = Rank()
    rank.bring("x", "k")
    if not soon:
        rank.answer()
    rank.obey(words.CancelBring(7))
    if soon:
        rank.answer()
    end = time.monotonic() + 20
    while rank.agent and time.monotonic() < end:
        time.sleep(0.001)
    assert not rank.agent


def test_nobody_waits_for_what_is_cancelled_as_it_has_just_come() -> None:
    """Its slots are others' from then on: who waited would project into them."""
    rank, cancelled = Rank(), threading.Event()

    def say(answer: words.Answer) -> None:
        if isinstance(answer, words.ChunksBrought):
            rank.obey(words.CancelBring(7))
            cancelled.set()

    wanted = [words.WantedHere(0, DIGESTS[0], 3, (words.Place(0),), "x")]
    rank.agent.obey(words.BringChunks(7, wanted, words.Prompt(192)), say)
    assert cancelled.wait(20) and not rank.agent.pending([3], 0)


def test_slots_are_filled_and_chunks_stored_behind_the_step_under_way() -> None:
    """It may still write in them: rank 0 has what it wants of a step before every rank is done with it."""
    fence = StepFence()
    rank = Rank(fence.here)
    rank.storage.pools[0].k.fill_(7)
    fence.sent()
    rank.bring("k")
    storing = threading.Thread(
        target=rank.agent.store, args=(words.ChunkToStore(4, bytes([9]) * 32, b"", True),), daemon=True
    )
    storing.start()
    storing.join(0.05)
    assert storing.is_alive() and rank.told.empty()
    assert bool((rank.storage.pools[0].k[3] == 7).all())
    fence.computed()
    storing.join(20)
    assert not storing.is_alive() and rank.answer().good == 1
    assert not bool((rank.storage.pools[0].k[3] == 7).all())


def test_a_piece_goes_on_once_all_of_it_is_projected_and_loaded() -> None:
    rank, done = Rank(), list[str]()
    rank.bring("x", "x", "k")
    rank.answer()
    piece = CachedPiece(rank.agent.pending([3, 5], 0), lambda: done.append("copied"))
    piece.then(lambda: done.append("sent"))
    assert not piece.done and not done
    piece.wait()
    assert done == ["copied", "sent"] and rank.projected == [(0, [0, 1], [3, 4])]


def test_a_piece_that_cannot_come_goes_to_nobody() -> None:
    part, done = Arrival(), list[str]()
    piece = CachedPiece([part], lambda: done.append("copied"))
    piece.then(lambda: done.append("sent"))
    part.end(OSError("the disk is gone"))
    piece.then(lambda: done.append("sent later"))
    for look in (piece.wait, lambda: piece.done):
        with pytest.raises(OSError, match="the disk is gone"):
            look()
    assert not done


def test_times_are_those_of_the_median_layer() -> None:
    nothing: Any = SimpleNamespace()
    transfer = RestoreTransfer(nothing, nothing, [], 0)
    transfer.transfers.append(LayerTransfer(ended(64, 1.0), "k", -1))
    for layer, slow in enumerate((1.0, 9.0, 1.0)):
        kinds: tuple[BlobKind, ...] = ("x", "k")
        transfer.transfers += [
            LayerTransfer(ended(100 * (1 + at), slow * (1 + at)), kind, layer) for at, kind in enumerate(kinds)
        ]
    assert transfer.done and transfer.layer_transfers == [(200, 2.0), (100, 1.0)]
    assert transfer.link_s == 1.0 + 3.0 * (1 + 9 + 1)


def ended(size: int, seconds: float) -> Ticket:
    ticket = Ticket(size, "kv")
    ticket.end()
    ticket.began_s, ticket.ended_s = 0.0, seconds
    return ticket
