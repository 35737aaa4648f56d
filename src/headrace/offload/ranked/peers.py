"""Rank 0's end of the tiers of all ranks: asks, and waits for answers or hears of them. One rank is a group of one.

A rank here is a context rank. All of its tensor ranks are asked, and their answers heard as one (joining).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import msgspec

from headrace.offload.ranked import words
from headrace.offload.ranked.agent import TierAgent
from headrace.offload.ranked.joining import joined

A = TypeVar("A", bound=words.Answer)

OnAnswer = Callable[[int, Any], None]
"""(rank, answer)"""

LOOK_S = 0.05
"""Between two looks whether the rank that is waited for is lost."""


@dataclass(slots=True, eq=False)
class _Question:
    """To a context rank; then: what hears the answer. told: by tensor rank."""

    rank: int
    then: OnAnswer
    told: dict[int, words.Answer] = field(default_factory=dict)


class TierPeers:
    """ranks: context ranks, each of `tensor` tensor ranks. agents: by world rank (parallel.group), of those in this
    process (rank 0, or all of them in tests), which are called; send(world rank, command): to any other. check():
    raises RankLost if a rank is gone."""

    def __init__(
        self,
        ranks: int,
        agents: dict[int, TierAgent],
        send: Callable[[int, bytes], None] = lambda rank, body: None,
        check: Callable[[], None] = lambda: None,
        tensor: int = 1,
    ) -> None:
        self.ranks, self.agents = ranks, agents
        self.closed = False
        self._send, self._check, self.tensor = send, check, tensor
        self._numbers = itertools.count()
        self._waiting: dict[int, _Question] = {}

    def tell(self, rank: int, command: words.Command) -> None:
        for world in range(rank * self.tensor, (rank + 1) * self.tensor):
            if world in self.agents:
                self.agents[world].obey(command, partial(self._heard, world))
            else:
                self._send(world, words.encode(command))

    def here(self, rank: int) -> TierAgent | None:
        """The agent of a rank that is in this process as a whole: it may be called."""
        return self.agents.get(rank) if self.tensor == 1 else None

    @property
    def elsewhere(self) -> list[int]:
        """Ranks that are not: they are asked."""
        return [rank for rank in range(self.ranks) if self.here(rank) is None]

    def ask(self, rank: int, command: words.Command, then: OnAnswer) -> int:
        """Asks without waiting: `then` gets the answer, on any thread. The command gets the number that is returned."""
        number = next(self._numbers)
        self._waiting[number] = _Question(rank, then)
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

    def received(self, world: int, body: bytes) -> None:
        """Takes in an answer from a link, on any thread. Raises ValueError for anything else."""
        self._heard(world, words.answer(body))

    def _heard(self, world: int, answer: words.Answer) -> None:
        """One that nobody waits for is of a call that was given up."""
        question = self._waiting.get(answer.number)
        if question is None:
            return
        question.told[world % self.tensor] = answer
        if len(question.told) == self.tensor and self._waiting.pop(answer.number, None) is not None:
            question.then(question.rank, joined([question.told[rank] for rank in range(self.tensor)]))


def open_everywhere(peers: TierPeers, identity: bytes) -> None:
    """Opens the tiers of all ranks. Raises ValueError as a rank's own would, RankLost."""
    for rank in range(peers.ranks):
        if (agent := peers.here(rank)) is not None:
            agent.open(identity)
    others = {rank: words.OpenTiers(0, identity) for rank in peers.elsewhere}
    found = peers.call_all(dict(others), words.TiersOpen) if others else {}
    for rank, opened in sorted(found.items()):
        if opened.refused is not None:
            raise ValueError(f"rank {rank}: {opened.refused}")
