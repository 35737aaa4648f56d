"""Which experts stay in memory: those that steps met most. No torch, no files."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FADE = 0.75
"""What earlier uses count for at each turn: use decays, so that the choice follows what is asked."""
MARGIN = 1.25
"""A newcomer is used so many times as often as what it takes the place of: two alike would change places for ever."""


class MostUsed:
    """Uses of N experts, fading, and which of them are kept: at most `fit`."""

    def __init__(self, count: int, fit: int) -> None:
        self.fit = min(fit, count)
        self.uses = np.zeros(count)
        self.kept = np.zeros(count, bool)

    def begin(self) -> list[int]:
        """What to keep before anything is known: every n-th, so that all layers have some."""
        first = [index * len(self.kept) // self.fit for index in range(self.fit)]
        self.kept[first] = True
        return first

    def turn(self, met: NDArray[np.int64], most: int) -> list[tuple[int, int]]:
        """Counts the uses since the last turn, and changes who is kept: at most `most` pairs (given up, kept instead),
        the clearest first."""
        self.uses = FADE * self.uses + met
        kept, others = np.flatnonzero(self.kept), np.flatnonzero(~self.kept)
        leaving = kept[np.argsort(self.uses[kept], kind="stable")][:most]
        coming = others[np.argsort(-self.uses[others], kind="stable")][:most]
        pairs = [
            (int(old), int(new))
            for old, new in zip(leaving, coming, strict=False)
            if self.uses[new] > MARGIN * self.uses[old]
        ]
        for old, new in pairs:
            self.kept[old], self.kept[new] = False, True
        return pairs
