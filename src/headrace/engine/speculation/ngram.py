"""Prompt lookup: the longest end of a sequence that stood in it before, and what followed there.

Source: A. Saxena, Prompt Lookup Decoding (2023); the idea is LLMA's, arXiv 2304.04487.
"""

from __future__ import annotations

import numpy as np

LEAST, MOST = 3, 16
"""Tokens that have to agree, and as many as are compared."""


class NgramMatcher:
    """Looks through prompt and answer at each draft: a comparison of all tokens at once takes 10 us for 16,384, and
    nothing has to be built or kept in step with them."""

    def __init__(self) -> None:
        self._known = np.empty(1024, np.int64)
        self._count = 0

    def propose(self, tokens: list[int], most: int) -> list[int]:
        """At most so many tokens that may follow `tokens`, which have only grown since the last call."""
        self._catch_up(tokens)
        end = self._count
        if end <= LEAST:
            return []
        known = self._known[:end]
        found = np.flatnonzero(known[: end - 1] == known[end - 1])
        length = 1
        while len(found) and length < MOST:
            further = found[found >= length]
            further = further[known[further - length] == known[end - 1 - length]]
            if not len(further):
                break
            found, length = further, length + 1
        return following(tokens, int(found[-1]) + 1, most) if len(found) and length >= LEAST else []

    def _catch_up(self, tokens: list[int]) -> None:
        while len(self._known) < len(tokens):
            self._known = np.concatenate([self._known, np.empty_like(self._known)])
        self._known[self._count : len(tokens)] = tokens[self._count :]
        self._count = len(tokens)


def following(tokens: list[int], start: int, most: int) -> list[int]:
    """Tokens from `start` on; beyond the end, where what followed is being repeated, the repetition goes on."""
    found = tokens[start : start + most]
    period = len(tokens) - start
    while found and len(found) < most:
        found.append(found[len(found) - period])
    return found
