"""How many threads a rank computes with: its share of the cores, or all of them while no other rank computes.

The kernels give the same bits with any number of threads. torch's own products do not, so without the C++ kernels
a rank keeps its share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels import dispatch
from headrace.parallel.messages import RankStep


@dataclass(frozen=True, slots=True)
class RankThreads:
    """share: threads while other ranks of this host compute too. whole: threads of a step that one rank computes by
    itself, `share` where it may not use the others' cores. crowding: threads of all ranks of this host for each of its
    cores, at least 1."""

    share: int
    whole: int
    crowding: float = 1.0

    @classmethod
    def of(cls, share: int, whole: int, crowding: float = 1.0) -> RankThreads:
        """With the kernels that are in use here."""
        return cls(share, max(share, whole) if dispatch.in_cpp() else share, crowding)

    @property
    def widens(self) -> bool:
        return self.whole > self.share

    def use(self, whole: bool) -> None:
        """Sets the threads of the calling thread's next operations."""
        count = self.whole if whole else self.share
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)


def one_rank_computes(step: RankStep) -> bool:
    """Whether one rank computes all rows of a step; others at most send it cached chunks."""
    parts = [part for group in step.groups for part in group.parts]
    if any(group.strategy != "single" for group in step.groups):
        return False
    return len({rank for part in parts for rank in part.ranks}) == 1
