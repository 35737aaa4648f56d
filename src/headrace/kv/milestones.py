"""States within long prompts: where they are kept, and in which order they make room.

A long document whose prompts part somewhere within has states at its prompts' ends only; a milestone is a state further
in front, from which another prompt can begin that shares the first part alone:

    tokens   0     4,096   8,192  12,288  16,384  20,480      where there are free states: all of them
    weight            0       1       0       2       0       where there are few: those of the greatest weight

The weight of a milestone is how often 2 divides its number. So however many are kept, they lie at even distances, and
since places are absolute, all prompts of a document agree on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from headrace.types import CHUNK

INTERVAL = 4096
"""Tokens between two milestones, whole chunks, unless states are small."""

NO_MILESTONE = 64
"""More than any weight."""


class Milestones:
    """Slots of states that are kept at milestones. interval: tokens between these, whole chunks."""

    def __init__(self, interval: int = INTERVAL) -> None:
        self.interval = interval
        self._weights: dict[int, tuple[int, object]] = {}
        """Weight by slot, and who kept it; in the order in which they were kept."""

    def __iter__(self) -> Iterator[int]:
        return iter(self._weights)

    def __contains__(self, slot: int) -> bool:
        return slot in self._weights

    def passed(self, start: int, end: int) -> Sequence[int]:
        """Milestones behind `start`, up to `end`."""
        return range((start // self.interval + 1) * self.interval, end + 1, self.interval)

    def weight(self, mark: int) -> int:
        """Of the milestone behind so many tokens."""
        number = mark // self.interval
        return (number & -number).bit_length() - 1

    def add(self, slot: int, mark: int, owner: object) -> None:
        """The slot has the state behind `mark` tokens of `owner`."""
        assert mark % self.interval == 0 and mark % CHUNK == 0
        self._weights[slot] = (self.weight(mark), owner)

    def discard(self, slot: int) -> None:
        """The slot is no milestone's any more, if it was."""
        self._weights.pop(slot, None)

    def worth(self, slot: int) -> int:
        """The weight of the slot's milestone; NO_MILESTONE, which is more, for any other slot."""
        return self._weights[slot][0] if slot in self._weights else NO_MILESTONE

    def lesser(self, mark: int, owner: object, idle: Iterable[int]) -> list[int]:
        """The slots among `idle` that make room for another milestone: those of less weight, and those of the same
        weight and another owner, so that what is not used any more does not stay for ever."""
        weight = self.weight(mark)
        return [
            slot
            for slot in self.first(idle)
            if self.worth(slot) < weight or (self.worth(slot) == weight and self._weights[slot][1] is not owner)
        ]

    def first(self, idle: Iterable[int]) -> list[int]:
        """The idle slots in the order in which they make room: milestones by weight, the oldest first, then the
        others as they come."""
        return sorted(idle, key=self.worth)  # which keeps the order of equals
