"""Activations X of chunks that the tensor ranks of a group keep in turn: each its own chunks', whole rows of them.

    chunk          0      1      2      3      4          2 tensor ranks
    kept by rank   0      1      0      1      0          each keeps, moves and loads half of X

Before K and V are projected, each rank gives the others what it has: all need whole rows, of which each makes its own
heads. n: chunks, H: hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.models.shards import ShardGroup
from headrace.types import CHUNK


@dataclass(frozen=True, slots=True)
class XTurns:
    """group: the tensor ranks; None for a rank that has no others, which keeps all. A chunk's turn goes by a number
    that all ranks know."""

    group: ShardGroup | None = None

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank

    def mine(self, number: int) -> bool:
        return number % self.ranks == self.rank

    def gathered(self, x: Tensor, numbers: Sequence[int]) -> Tensor:
        """X [n, 64, H] of these chunks, in their order. x: of those of them that are this rank's, in that order.

        All ranks call it with the same numbers. Raises RankLost.
        """
        if self.group is None or self.ranks == 1:
            return x
        turns = torch.tensor(numbers) % self.ranks
        counts = torch.bincount(turns, minlength=self.ranks)
        most, size = int(counts.max()), CHUNK * x.shape[-1]
        own = x.new_zeros(most, *x.shape[1:])  # all ranks give equally many: nothing empty is sent
        own[: len(x)] = x
        given = self.group.gather(own.view(1, most * size), [most * size] * self.ranks)
        place = turns * most
        for rank in range(self.ranks):
            place[turns == rank] += torch.arange(int(counts[rank]))
        return given.view(self.ranks * most, *x.shape[1:]).index_select(0, place.to(x.device, non_blocking=True))
