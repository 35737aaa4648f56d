"""The recurrent layers of a step: which rows go from which state to which, and running them over the states' memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.kernels.gated_delta import DeltaWeights, Recur, gated_delta
from headrace.kv.storage import StateStorage
from headrace.kv.table_state import Segment

Part = tuple[int, int, Sequence[Segment]]
"""(first row, first token, segments) of a slice: kv.states."""


def segment_rows(parts: Sequence[Part]) -> Tensor:
    """int64 [n, 4] as kernels.gated_delta takes them, in the order of the parts."""
    rows = []
    for row, token, segments in parts:
        for end, source, target in segments:
            rows.append((row, row + end - token, source, target))
            row, token = row + end - token, end
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4)


class StepRecurrence(Recur):
    """Recur for one step over a storage of states."""

    def __init__(self, storage: StateStorage, segments: Tensor) -> None:
        self.storage, self.segments = storage, segments

    def __call__(self, layer: int, mixed: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        storage = self.storage
        return gated_delta(storage.spec, mixed, gates, weights, storage.layers[layer], self.segments)


def alone(spec: RecurrentSpec | None, dtype: torch.dtype, rows: int) -> StepRecurrence | None:
    """A step of the first `rows` tokens of one sequence, with a state of its own: for measurements. None: no recurrent
    layers."""
    if spec is None:
        return None
    return StepRecurrence(StateStorage(spec, 1, dtype), segment_rows([(0, 0, [Segment(rows, -1, 0)])]))
