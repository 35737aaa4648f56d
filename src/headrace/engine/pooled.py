"""Pools the hidden states of a prompt as its slices are computed.

Sums are taken in float64, token by token in their order, so that slices and batches change no bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.engine.sequence import SequenceState, Slice
from headrace.pooling import Pooling
from headrace.types import Delta


class Pooled:
    """What is pooled of one prompt, as slices of it are computed. classify: from hidden states [n, E] to what a
    classifier's head makes of them [n, labels], if the model has one."""

    def __init__(self, pooling: Pooling, classify: Callable[[Tensor], Tensor]) -> None:
        self._kind = pooling.kind
        self._classify = classify if pooling.labels else None
        self._count = 0
        self._sum: npt.NDArray[np.float64] = np.zeros(0)

    def prepare(self, sequence: SequenceState) -> None:
        """Says which of its rows are wanted. The first token's state depends on no other; the last token's needs the
        others' keys alone, which may come from the cache."""
        if self._kind == "mean":
            sequence.reports_from = 0
        elif self._kind == "cls":
            del sequence.tokens[1:]

    def note(self, part: Slice, hidden: Tensor) -> None:
        """Takes in the hidden states [n, E] of the last n rows of a slice."""
        if self._classify is not None:
            hidden = self._classify(hidden)
        rows = hidden.to(device="cpu", dtype=torch.float64).numpy()
        if self._kind != "mean" or part.start == 0:  # from the beginning, maybe again after a preemption
            self._count, self._sum = 0, np.zeros(rows.shape[1])
        for row in rows:
            self._sum += row
        self._count += len(rows)

    @property
    def broken(self) -> bool:
        """Whether the state is no number."""
        return not bool(np.isfinite(self._sum).all())

    def hand(self, delta: Delta) -> None:
        """Hands over what was found."""
        delta.embedding = (self._sum / self._count).astype("<f4").tobytes()
