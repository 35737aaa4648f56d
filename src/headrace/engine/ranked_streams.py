"""What each of several ranks has streamed, as rank 0 tells it: its own now, that of other processes as last heard."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import msgspec

from headrace.offload.streaming.staged_store import StagedStore
from headrace.stats import StreamStats

ASK_S = 0.2
"""Between two questions to the other ranks."""


class RankedStreams:
    """here: stores of this process by world rank; elsewhere: ranks of others, which send(rank, command) asks."""

    def __init__(
        self,
        here: Mapping[int, StagedStore],
        elsewhere: Sequence[int] = (),
        send: Callable[[int, bytes], None] = lambda rank, command: None,
    ) -> None:
        self.here, self.elsewhere, self._send = here, elsewhere, send
        self._heard = {rank: StreamStats() for rank in elsewhere}
        self._next_s = 0.0

    def told(self) -> dict[str, StreamStats]:
        """By rank. Asks the others too, whose answers later calls tell. Raises RankLost."""
        if (now := time.monotonic()) >= self._next_s:
            self._next_s = now + ASK_S
            for rank in self.elsewhere:
                self._send(rank, b"")
        told = self._heard | {rank: store.told() for rank, store in self.here.items()}
        return {str(rank): told[rank] for rank in sorted(told)}

    def heard(self, rank: int, answer: bytes) -> None:
        """Takes an answer of `answering`; on any thread. Raises ValueError for anything else."""
        self._heard[rank] = msgspec.msgpack.decode(answer, type=StreamStats)


def answering(store: StagedStore) -> Callable[[bytes, Callable[[bytes], None]], None]:
    """A rank's side (Rank.tiers): whatever it is asked, it tells what its store has streamed."""
    return lambda command, answer: answer(msgspec.msgpack.encode(asdict(store.told())))
