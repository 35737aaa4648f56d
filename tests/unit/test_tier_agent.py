"""Whatever happens to the tiers of a rank, rank 0 gets an answer: it waits for one."""

from __future__ import annotations

import queue
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.offload.ranked import words
from headrace.offload.ranked.agent import AgentThread, Opened, TierAgent
from headrace.offload.ranked.peers import TierPeers, open_everywhere
from headrace.offload.tiers.base import BlobParts

pytestmark = pytest.mark.unit


def answered(agent: AgentThread, command: words.Command) -> words.Answer:
    told: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    agent.obey(words.encode(command), told.put)
    return words.answer(told.get(timeout=20))


def refused(error: Exception) -> AgentThread:
    def opener(identity: bytes) -> Opened:
        raise error

    return AgentThread(TierAgent(opener))


@pytest.mark.parametrize("error", [ValueError("no directory"), RuntimeError("no directory")], ids=["told", "a fault"])
def test_tiers_that_cannot_be_opened(error: Exception) -> None:
    answer = answered(refused(error), words.OpenTiers(7, b"model"))
    assert isinstance(answer, words.TiersOpen) and answer.number == 7
    assert answer.refused is not None and "no directory" in answer.refused


def test_chunks_that_cannot_be_stored() -> None:
    agent = refused(AssertionError())
    chunks = [words.ChunkToStore(slot, bytes(32), b"", sure=True) for slot in range(2)]
    for number in (3, 4):
        assert answered(agent, words.StoreChunks(number, chunks)) == words.ChunksStored(number)


class SlowTier:
    """Codec and tiers at once: every blob is made in one scratch, as ChunkCodec makes them, and kept a moment later."""

    keeps_activations, spec = False, SimpleNamespace(shapes=True)

    def __init__(self) -> None:
        self.scratch, self.kept = bytearray(1), dict[bytes, bytes]()

    def encode(self, slot: int, *what: object) -> BlobParts:
        self.scratch[:] = bytes([slot])
        time.sleep(0.002)
        return (memoryview(self.scratch),)

    def set_quota(self, *quota: object) -> None: ...

    def lacking(self, name: bytes) -> list[int]:
        return [0]

    def format(self, tier: int) -> str:
        return "raw"

    def queues(self, tier: int) -> bool:
        return False

    def offer(self, tier: int, name: bytes, tenant: bytes, parts: BlobParts, size: int) -> None:
        self.kept[name[:1]] = bytes(parts[0])


def test_two_threads_of_rank_0_may_store_at_once() -> None:
    """Of tensor ranks all are asked: the first by the thread that asks, be it the engine's or the writeback's."""
    tier = cast(Any, SlowTier())
    agent = TierAgent(lambda identity: Opened(tier, tier, tier, *cast(Any, (None, None, None))))
    peers = TierPeers(1, {0: agent}, tensor=2, send=lambda world, body: peers.received(world, stored(body)))
    agent.open(b"model")

    def store(slot: int) -> None:
        chunk = words.ChunkToStore(slot, bytes([slot]) * 32, b"", sure=True)
        peers.call(0, words.StoreChunks(0, [chunk]), words.ChunksStored)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(store, range(16)))
    assert tier.kept == {bytes([slot]): bytes([slot]) for slot in range(16)}


def stored(body: bytes) -> bytes:
    """What a rank over a link answers."""
    return words.encode(words.ChunksStored(words.command(body).number))


def test_the_only_rank_says_itself_why_its_tiers_cannot_be_opened() -> None:
    with pytest.raises(ValueError, match=r"^no directory$"):
        open_everywhere(TierPeers(1, {0: refused(ValueError("no directory")).agent}), b"model")


def test_words_survive_the_link() -> None:
    places = (words.Place(0), words.Place(1, 3))
    command = words.BringChunks(1, [words.WantedHere(2, bytes(32), 5, places, "x")], words.Prompt(640, 1, 70))
    assert words.command(words.encode(command)) == command
    answer = words.ChunksBrought(1, 0, "chunk 2 is gone", 0.5, 0.1, [(64, 0.5)])
    assert words.answer(words.encode(answer)) == answer
    for body in (b"", b"\xc1", words.encode(answer)):
        with pytest.raises(ValueError):
            words.command(body)
