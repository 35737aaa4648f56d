"""A step of engine.overlap, from its plan to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.engine.programs import Launched
from headrace.engine.sequence import SequenceState, Slice

if TYPE_CHECKING:  # it imports Triton
    from headrace.engine.launched_draws import Drawn


@dataclass(slots=True, eq=False)
class Flight:
    """slices: in the order in which they were planned; unseen: those of one token that the step before chooses.

    launched: None as long as it is only planned. rows: of the sequences that tokens are drawn for; drawn: these tokens,
    where some are not just the most likely ones. lasts: how many more steps none of these sequences reaches its
    greatest length.

    void: sequences whose rows count no more; ended: those of them whose tables are closed when the step has ended."""

    slices: list[Slice]
    unseen: list[Slice] = field(default_factory=list)
    lasts: int = 0
    launched: Launched | None = None
    rows: dict[SequenceState, int] = field(default_factory=dict)
    drawn: Drawn | None = None
    void: set[SequenceState] = field(default_factory=set)
    ended: list[SequenceState] = field(default_factory=list)

    @property
    def living(self) -> list[Slice]:
        return [part for part in self.slices if part.sequence not in self.void] if self.void else self.slices

    @property
    def sampling(self) -> list[Slice]:
        """Of `living`, those that tokens are drawn from."""
        living = self.living
        return living if len(self.rows) == len(self.slices) else [part for part in living if part.sequence in self.rows]

    def drop(self, sequence: SequenceState) -> bool:
        """Takes a sequence out; whether the step is under way with it, so that its row is computed in vain."""
        if self.launched is None:
            self.slices = [part for part in self.slices if part.sequence is not sequence]
            self.unseen = [part for part in self.unseen if part.sequence is not sequence]
        elif sequence not in self.void and any(part.sequence is sequence for part in self.slices):
            self.void.add(sequence)
            return True
        return False
