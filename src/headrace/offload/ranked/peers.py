"""Rank 0's end of the tiers of all ranks: asks, and waits for answers or hears of them. One rank is a group of one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec

from headrace.offload.ranked import words
from headrace.offload.ranked.agent import TierAgent

A = TypeVar("A", bound=words.Answer)

OnAnswer = Callable[[int, Any], None]
"""(rank, answer)"""

LOOK_S = 0.05
"""Between two looks whether the rank that is waited for is lost."""


class TierPeers:
    """agents[rank] of those in this process (rank 0, or all of them in tests), which are called; send(rank, command):
    to any other. check(): raises RankLost if a rank is gone."""

    def __init__(
        self,
        ranks: int,
        agents: dict[int, TierAgent],
        send: Callable[[int, bytes], None] = lambda rank, body: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.ranks, self.agents = ranks, agents
        self.closed = False
        self._send, self._check = send, check
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[int, OnAnswer]] = {}

    def tell(self, rank: int, command: words.Command) -> None:
        if rank in self.agents:
            self.agents[rank].obey(command, self.heard)
        else:
            self._send(rank, words.encode(command))

    def ask(self, rank: int, command: words.Command, then: OnAnswer) -> int:
        """Asks without waiting: `then` gets the answer, on any thread. The command gets the number that is returned."""
        number = next(self._numbers)
        self._waiting[number] = (rank, then)
        self.tell(rank, msgspec.structs.replace(command, number=number))
        return number

    def call(self, rank: int, command: words.Command, kind: type[A]) -> A:
        """The answer. Raises RankLost."""
        return self.call_all({rank: command}, kind)[rank]

    def call_all(
        self, commands: dict[int, words.Command], kind: type[A], timeout_s: float | None = None
    ) -> dict[int, A]:
        """As `call`, of several ranks at the same time; those that have answered in time."""
        found: dict[int, A] = {}
        there = threading.Event()

        def note(rank: int, answer: words.Answer) -> None:
            found[rank] = cast(A, answer)
            if len(found) == len(commands):
                there.set()

        for rank in sorted(commands, key=self.agents.__contains__):  # who is called here is asked last
            self.ask(rank, commands[rank], note)
        self.wait(there, timeout_s)
        assert all(isinstance(each, kind) for each in found.values())
        return dict(found)

    def wait(self, there: threading.Event, timeout_s: float | None = None) -> bool:
        """Whether it came in time. Raises RankLost."""
        left = float("inf") if timeout_s is None else timeout_s
        while not there.wait(min(LOOK_S, left)):
            self._check()
            left -= LOOK_S
            if left <= 0:
                return False
        return True

    def heard(self, answer: words.Answer) -> None:
        """Takes in an answer, on any thread. One that nobody waits for is of a call that was given up."""
        rank, then = self._waiting.pop(answer.number, (0, None))
        if then is not None:
            then(rank, answer)

    def received(self, rank: int, body: bytes) -> None:
        """`heard`, as it came over a link. Raises ValueError for anything else."""
        self.heard(words.answer(body))


def open_everywhere(peers: TierPeers, identity: bytes) -> None:
    """Opens the tiers of all ranks. Raises ValueError as a rank's own would, RankLost."""
    for agent in peers.agents.values():
        agent.open(identity)
    others = {rank: words.OpenTiers(0, identity) for rank in range(peers.ranks) if rank not in peers.agents}
    found = peers.call_all(dict(others), words.TiersOpen) if others else {}
    for rank, opened in sorted(found.items()):
        if opened.refused is not None:
            raise ValueError(f"rank {rank}: {opened.refused}")
