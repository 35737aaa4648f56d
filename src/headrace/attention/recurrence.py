"""The recurrent layers of a step: which rows go from which state to which, and running them over the states' memory."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.kernels import dispatch
from headrace.kernels.gated_delta import DeltaWeights, Recur, fits_cpp, gated_delta
from headrace.kernels.recurrent_step import PreparedRecurrence, StatesInCpp
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
        self.prepared = prepared_recurrence(storage, segments)

    def __call__(self, layer: int, mixed: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        storage = self.storage
        return gated_delta(storage.spec, mixed, gates, weights, storage.layers[layer], self.segments)


_known: WeakKeyDictionary[StateStorage, StatesInCpp] = WeakKeyDictionary()


def prepared_recurrence(storage: StateStorage, segments: Tensor) -> PreparedRecurrence | None:
    """The recurrence of a step as C++ runs it among whole layers; None where it does not."""
    if not dispatch.native(storage.layers[0].last) or storage.dtype != torch.bfloat16 or not fits_cpp(storage.spec):
        return None
    states = _known.get(storage)
    if states is None:  # checked once: they stay where they are
        _known[storage] = states = StatesInCpp(storage.spec, storage.layers)
    return PreparedRecurrence(states, segments)


def alone(spec: RecurrentSpec | None, dtype: torch.dtype, rows: int) -> StepRecurrence | None:
    """A step of the first `rows` tokens of one sequence, with a state of its own: for measurements. None: no recurrent
    layers."""
    if spec is None:
        return None
    return StepRecurrence(StateStorage(spec, 1, dtype), segment_rows([(0, 0, [Segment(rows, -1, 0)])]))
