"""Which sequences fit one group of a step: where each rank stages its chunks of a group, so many, and none that goes
on from a recurrent state which another of them leaves on another rank."""

from __future__ import annotations

from collections import Counter

from headrace.parallel.messages import StepPart

IN_PLACE = ("single", "ring-q")
"""Strategies by which keys and values stay where they are. By others all ranks' chunks pass each rank's workspace."""


class GroupRoom:
    """The group under way. most: chunks that a rank can have of it at a time; None: any number."""

    def __init__(self, most: int | None, slots_per_rank: int) -> None:
        self.most, self.slots_per_rank = most, slots_per_rank
        self._slots: set[int] = set()
        self._left: set[int] = set()

    def begin(self, part: StepPart) -> None:
        """A group of this sequence alone, which fits whatever it is (offload.streaming.open.sizes)."""
        self._slots = set(part.slots) if self.most is not None else set()
        self._left = {run.target for run in part.states}

    def takes(self, part: StepPart, strategy: str) -> bool:
        """Whether the sequence fits beside those that the group has. Then it is one of them."""
        if any(run.source in self._left and run.origin != run.rank for run in part.states):
            return False
        if self.most is not None:
            both = self._slots | set(part.slots)
            if self._largest(both, strategy) > self.most:
                return False
            self._slots = both
        self._left |= {run.target for run in part.states}
        return True

    def _largest(self, slots: set[int], strategy: str) -> int:
        """Chunks of the rank that has most of them at a time."""
        if strategy not in IN_PLACE:
            return len(slots)
        return max(Counter(slot // self.slots_per_rank for slot in slots).values(), default=0)
