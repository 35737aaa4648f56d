"""Whatever happens to the tiers of a rank, rank 0 gets an answer: it waits for one."""

from __future__ import annotations

import queue

import pytest

from headrace.offload.ranked import words
from headrace.offload.ranked.agent import Opened, TierAgent

pytestmark = pytest.mark.unit


def answered(agent: TierAgent, command: words.Command) -> words.Answer:
    told: queue.SimpleQueue[words.Answer] = queue.SimpleQueue()
    agent.obey(command, told.put)
    return told.get(timeout=20)


@pytest.mark.parametrize("error", [ValueError("no directory"), RuntimeError("no directory")], ids=["told", "a fault"])
def test_tiers_that_cannot_be_opened(error: Exception) -> None:
    def opener(identity: bytes) -> Opened:
        raise error

    answer = answered(TierAgent(opener), words.OpenTiers(7, b"model"))
    assert isinstance(answer, words.TiersOpen) and answer.number == 7
    assert answer.refused is not None and "no directory" in answer.refused


def test_a_chunk_that_cannot_be_stored() -> None:
    def opener(identity: bytes) -> Opened:
        raise AssertionError

    answer = answered(TierAgent(opener), words.StoreChunk(3, 0, bytes(32), b"", sure=True))
    assert answer == words.ChunkStored(3)


def test_words_survive_the_link() -> None:
    command = words.BringChunks(1, [words.WantedHere(2, bytes(32), 5, (words.Place(0), words.Place(1, 3)))], 640)
    assert words.command(words.encode(command)) == command
    answer = words.ChunksBrought(1, 0, "chunk 2 is gone", 0.5, 0.1, [(64, 0.5)])
    assert words.answer(words.encode(answer)) == answer
    for body in (b"", b"\xc1", words.encode(answer)):
        with pytest.raises(ValueError):
            words.command(body)
