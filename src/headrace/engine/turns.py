"""Turns between tenants, in prompt tokens, and the order of one tenant's prompts. Plain data: no cache, no steps.

Deficit round robin keeps one number for each tenant: the prompt tokens that it has had, divided by its weight. The
tenant whose number is least has the largest deficit and takes the next turn (start-time fair queueing: Goyal, Vin,
Cheng, SIGCOMM 1996, with turns in place of packets):

    served / weight      a |=======|              next: the largest deficit
                         b |==========|
                         c |=============|        the others' turns come when a and b have caught up
                                 ^ front: the least of those with prompts

A tenant that gets prompts begins at the front: what it left unused while it had none is not made up for.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heapreplace
from typing import Any

from headrace.engine.sequence import SequenceState
from headrace.types import CHUNK

TURN = 4 * CHUNK
"""Tokens of a turn of the tenant of the largest weight. Shorter turns would make slices too short to compute well."""
SHORTER = 4
"""A prompt begins before one of its tenant that is half computed if it has at most a 1/SHORTER of its tokens left."""


class Turns:
    """align: slices of prompts end at multiples of so many tokens, so turns have that many at least.

    A tenant with prompts in all of some steps is never further behind its share of the tokens computed in them than one
    turn (TURN), and the least turn (CHUNK, or align) for each other tenant.
    """

    def __init__(self, align: int = 1) -> None:
        self._least = -(-CHUNK // align) * align
        self._served: dict[str, float] = {}
        self._weights: Mapping[str, float] = {}

    def begin(self, weights: Mapping[str, float]) -> None:
        """A step begins: name -> weight of all tenants with prompts to compute."""
        staying = [self._served[name] for name in weights if name in self._weights]
        if not staying:
            self._served.clear()
        front = min(staying, default=0.0)
        for name in weights:
            if name not in self._weights:
                self._served[name] = max(front, self._served.get(name, 0.0))
        if len(self._served) > len(weights):  # of the others, those stay that are ahead of the front
            self._served = {name: has for name, has in self._served.items() if name in weights or has > front}
        self._weights = weights

    def pause(self) -> None:
        """A step begins in which nobody has prompts."""
        if self._weights:
            self.begin({})

    def charge(self, name: str, tokens: int) -> None:
        """So many tokens of a tenant's prompts are computed in this step."""
        self._served[name] += tokens / self._weights[name]

    def order(self) -> list[str]:
        """Tenants with prompts, the largest deficit first."""
        return sorted(self._weights, key=lambda name: (self._served[name], name))

    def grants(self, budget: int, wanted: Mapping[str, int]) -> dict[str, int]:
        """Tokens for each tenant that has a turn in a step of `budget` tokens; wanted: tokens that it could use."""
        waiting = [(self._served[name], name) for name, tokens in wanted.items() if tokens > 0]
        largest = max((self._weights[name] for _, name in waiting), default=1.0)
        granted: dict[str, int] = {}
        heapify(waiting)
        while waiting and budget > 0:
            served, name = waiting[0]
            weight, had = self._weights[name], granted.get(name, 0)
            turn = max(self._least, round(TURN * weight / largest / self._least) * self._least)
            count = min(turn, wanted[name] - had, budget)
            granted[name] = had + count
            budget -= count
            if granted[name] < wanted[name]:
                heapreplace(waiting, (served + count / weight, name))
            else:
                heappop(waiting)
        return granted


def _by_arrival(sequence: SequenceState) -> int:
    return sequence.order


def place_in_line(sequence: SequenceState) -> tuple[Any, ...]:
    """Sorts prompts of one tenant: by priority, those that gave up their place first, then by tokens left."""
    request, preempted = sequence.request, sequence.preemptions > 0
    return request.priority, not preempted, 0 if preempted else sequence.remaining, sequence.order


class TenantLine:
    """Sequences of one tenant: those that wait, in the order in which they begin, their tokens, and how many run.

    patience: tokens of later prompts of the tenant that may be computed before its oldest one. Then that is first.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.weight = 1.0
        self.running = 0
        self.tokens = 0
        self.waiting: list[SequenceState] = []
        self._arrivals: dict[int, list[SequenceState]] = {}
        """Those that wait by their priority, oldest first."""
        self._oldest: SequenceState | None = None
        self._overtaken = 0

    @property
    def empty(self) -> bool:
        return not (self.waiting or self.running)

    def add(self, sequence: SequenceState) -> None:
        """It waits. Its weight is the tenant's from now on."""
        self.weight = sequence.request.weight
        self.tokens += sequence.remaining
        insort(self.waiting, sequence, key=place_in_line)
        insort(self._arrivals.setdefault(sequence.request.priority, []), sequence, key=_by_arrival)

    def leave(self, sequence: SequenceState) -> None:
        """It waits no more. Called while it is as it was when it was added, without a table."""
        self.tokens -= sequence.remaining
        del self.waiting[bisect_left(self.waiting, place_in_line(sequence), key=place_in_line)]
        alike = self._arrivals[sequence.request.priority]
        del alike[bisect_left(alike, sequence.order, key=_by_arrival)]
        if not alike:
            del self._arrivals[sequence.request.priority]

    def look(self, started: Iterable[SequenceState]) -> None:
        """A step begins; started: prompts that are half computed."""
        heads = [alike[0] for alike in self._arrivals.values()]
        oldest = min([*started, *heads], key=_by_arrival, default=None)
        if oldest is not self._oldest:
            self._oldest, self._overtaken = oldest, 0

    def end(self, sequence: SequenceState) -> None:
        """It has ended, wherever it was."""
        if sequence is self._oldest:
            self._oldest = None

    def note(self, sequence: SequenceState, tokens: int) -> None:
        """So many tokens of this prompt are computed in this step."""
        if sequence is not self._oldest:
            self._overtaken += tokens

    @property
    def due(self) -> SequenceState | None:
        """The oldest prompt, if it has been overtaken by as much as may be."""
        return self._oldest if self._overtaken >= self.patience else None

    @property
    def first(self) -> SequenceState | None:
        """Which waiting sequence begins next. Of those that nothing else tells apart the oldest, unless another is much
        shorter: prompts that come together often begin alike, and would else be parted by their lengths, and what they
        share evicted between them."""
        due = self.due
        if due is not None and due.table is None:
            return due
        if not self.waiting or self.waiting[0].preemptions:
            return self.waiting[0] if self.waiting else None
        shortest = self.waiting[0]
        oldest = self._arrivals[shortest.request.priority][0]
        return shortest if shortest.remaining * SHORTER <= oldest.remaining else oldest

    def in_order(self, started: Iterable[SequenceState]) -> list[SequenceState]:
        """Half computed prompts, as they go on."""
        due = self.due
        return sorted(started, key=lambda each: (each is not due, place_in_line(each)))

    def overtakes(self, waiting: SequenceState, started: SequenceState) -> bool:
        """Whether a waiting sequence begins before one that is half computed goes on."""
        due = self.due
        if waiting is due or started is due:
            return waiting is due
        one, other = waiting.request.priority, started.request.priority
        return one < other or (one == other and waiting.remaining * SHORTER <= started.remaining)

    def check(self, waiting: list[SequenceState]) -> None:
        """Raises AssertionError unless just these wait, in order. For tests."""
        assert self.waiting == sorted(waiting, key=place_in_line), "a line is out of order"
        assert self.tokens == sum(each.remaining for each in waiting), "tokens are miscounted"
        arrivals = [each for alike in self._arrivals.values() for each in alike]
        assert sorted(arrivals, key=_by_arrival) == sorted(waiting, key=_by_arrival), "a line has lost an arrival"
        for priority, alike in self._arrivals.items():
            assert alike == sorted(alike, key=_by_arrival), "a line is out of order of arrival"
            assert {each.request.priority for each in alike} == {priority}, "a line has two priorities in one"
