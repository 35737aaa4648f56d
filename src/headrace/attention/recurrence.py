"""The recurrent layers of a step: which rows go from which state to which, and running them over the states' memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.kernels import dispatch
from headrace.kernels.records import RecurrentWeights
from headrace.kernels.recurrent import Recur, fits_cpp, recur_rows
from headrace.kernels.recurrent_step import PreparedRecurrence, StatesInCpp
from headrace.kv.storage import StateStorage
from headrace.kv.table_state import Segment

if TYPE_CHECKING:  # it imports Triton
    from headrace.kernels.triton.recurrent_step import RecurrentMemory, RecurrentStep

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
        self._on_gpu: RecurrentStep | None = None

    def __call__(self, layer: int, mixed: Tensor, gates: Tensor | None, weights: RecurrentWeights) -> Tensor:
        storage = self.storage
        if dispatch.on_gpu(mixed):
            if self._on_gpu is None:
                from headrace.kernels.triton.recurrent import step_alone

                self._on_gpu = step_alone(storage.spec, self.segments, len(mixed), storage.slots, mixed.device)
            return self._on_gpu(mixed, gates, weights, storage.layers[layer])
        return recur_rows(storage.spec, mixed, gates, weights, storage.layers[layer], self.segments)


class ReplayedRecurrence:
    """The recurrent layers of recorded steps on a GPU, of up to `rows` rows and `groups` groups of segments: their
    index data lies in memory of a fixed size, which is filled anew for each step."""

    def __init__(self, storage: StateStorage, rows: int, groups: int) -> None:
        from headrace.kernels.triton.recurrent_step import RecurrentMemory

        self.storage, self.rows, self.groups = storage, rows, groups
        place, kept = storage.layers[0].last.device, storage.spec.kernel - 1
        self.memory: RecurrentMemory = RecurrentMemory(kept, rows, rows, groups, place, pinned=True)

    def fill(self, segments: Tensor, rows: int) -> bool:
        """Takes a step of so many rows. False: there is no room for it."""
        from headrace.kernels.triton.recurrent_step import arrange

        return self.memory.fill(arrange(self.storage.spec, segments, rows, self.storage.slots))

    def layers(self, rows: int) -> Recur:
        """What is recorded, for so many rows. Those behind the step's are finite, and change no state."""
        return _ReplayedLayers(self, rows)


class _ReplayedLayers(Recur):
    def __init__(self, recurrence: ReplayedRecurrence, rows: int) -> None:
        from headrace.kernels.triton.recurrent import KINDS

        self.storage, groups = recurrence.storage, min(rows, recurrence.groups)
        self.step: RecurrentStep = KINDS[self.storage.spec.kind](self.storage.spec, recurrence.memory, rows, groups)

    def __call__(self, layer: int, mixed: Tensor, gates: Tensor | None, weights: RecurrentWeights) -> Tensor:
        return self.step(mixed, gates, weights, self.storage.layers[layer])


_known: WeakKeyDictionary[StateStorage, StatesInCpp] = WeakKeyDictionary()


def prepared_recurrence(storage: StateStorage, segments: Tensor) -> PreparedRecurrence | None:
    """The recurrence of a step as C++ runs it among whole layers; None where it does not."""
    if not dispatch.native(storage.layers[0].last) or storage.dtype != torch.bfloat16 or not fits_cpp(storage.spec):
        return None
    states = _known.get(storage)
    if states is None:  # checked once: they stay where they are
        _known[storage] = states = StatesInCpp(storage.spec, storage.layers)
    return PreparedRecurrence(states, segments)


def alone(
    spec: RecurrentSpec | None, dtype: torch.dtype, rows: int, device: torch.device | None = None
) -> StepRecurrence | None:
    """A step of the first `rows` tokens of one sequence, with a state of its own: for measurements. None: no recurrent
    layers."""
    if spec is None:
        return None
    return StepRecurrence(StateStorage(spec, 1, dtype, device), segment_rows([(0, 0, [Segment(rows, -1, 0)])]))
