"""Recurrent layers of a step on a GPU, of any kind: their index data, and what all kinds of layers have in common.

A recurrence goes token by token in registers, so a row has the same bits however its sequence is cut. T: rows; K:
inputs of the convolution, C: its channels; Hv: value heads, D, V: sizes of keys and values.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.device import current
from headrace.kernels.records import LayerStates, RecurrentWeights
from headrace.kernels.step_copies import Sending
from headrace.kernels.triton.recurrent_schedule import NOTHING, Arranged

LARGEST_KEY = 256
"""D: a program holds its columns of a state in registers."""
COLUMNS = 8
"""Of a state, for each program: 4 registers of a thread for each 16 of D."""
ALIGN = 32
"""Numbers between whose multiples parts of the index data begin."""


class RecurrentMemory:
    """A step's index data on the device: one block of int32, carried over by one copy. rows, groups: room for so many;
    pinned: it is written again and again, for steps that replay what was recorded."""

    def __init__(self, kept: int, rows: int, segments: int, groups: int, place: torch.device, pinned: bool) -> None:
        sizes = (groups + 1, segments * 4, rows * kept)
        ends = np.cumsum([0, *(-(-size // ALIGN) * ALIGN for size in sizes)]).tolist()
        self._host = torch.zeros(ends[-1], dtype=torch.int32)
        self._there = torch.zeros(ends[-1], dtype=torch.int32, device=place)
        self._sending = Sending((ends[-1],), torch.int32, current()) if pinned else None
        numbers = self._host.numpy()
        self._groups, self._segments, self._taps = (
            numbers[begin : begin + size] for begin, size in zip(ends, sizes, strict=False)
        )
        self.groups, self.segments, self.taps = (self._there[begin:] for begin in ends[:3])

    def fill(self, arranged: Arranged) -> bool:
        """Takes a step. False, with nothing changed: there is no room for it."""
        taps, segments, groups = (each.ravel() for each in arranged)
        if len(taps) > len(self._taps) or len(segments) > len(self._segments) or len(groups) > len(self._groups):
            return False
        self._taps[: len(taps)], self._taps[len(taps) :] = taps, NOTHING
        self._segments[: len(segments)] = segments
        self._groups[: len(groups)], self._groups[len(groups) :] = groups, groups[-1]  # the others are empty
        return True

    def send(self) -> None:
        """Carries it to the device, in the order of the current stream."""
        if self._sending is None:
            self._there.copy_(self._host, non_blocking=True)
        else:
            self._sending.send(self._host, self._there)

    def clear(self) -> None:
        """A step of no segments, on the device alone: no state is read or written."""
        self.groups.zero_()


class RecurrentStep:
    """The recurrent layers of a step of T = `rows` rows and at most so many groups. memory: of its index data."""

    def __init__(self, spec: RecurrentSpec, memory: RecurrentMemory, rows: int, groups: int) -> None:
        self.spec, self.memory, self.rows, self.groups = spec, memory, rows, groups

    def __call__(self, mixed: Tensor, gates: Tensor | None, weights: RecurrentWeights, states: LayerStates) -> Tensor:
        """See kernels.recurrent.recur_rows. Raises ValueError for tensors that do not fit."""
        check_rows(self.spec, self.rows, mixed, gates, states)
        if mixed.data_ptr() % 16:  # how loads lie decides how a norm adds up
            mixed = mixed.clone(memory_format=torch.contiguous_format)
        return self._run(mixed, gates, weights, states)

    def _run(self, mixed: Tensor, gates: Tensor | None, weights: RecurrentWeights, states: LayerStates) -> Tensor:
        """What each kind of layer does, for tensors that fit. Raises ValueError for weights of another kind."""
        raise NotImplementedError

    def _buffers(self, mixed: Tensor, scalars: int) -> tuple[Tensor, Tensor, Tensor]:
        """What launches of a layer with matrices hand on: fp32 [T, C] and [T, scalars]; and its output [T, Hv, V]."""
        spec, rows, place = self.spec, self.rows, mixed.device
        out = torch.empty(rows, spec.value_heads, spec.value_dim, dtype=mixed.dtype, device=place)
        return torch.empty(rows, spec.channels, device=place), torch.empty(rows, scalars, device=place), out


def check_size(spec: RecurrentSpec) -> None:
    """Raises ValueError for layers that the kernels do not take."""
    if spec.key_dim > LARGEST_KEY:
        raise ValueError(f"the Triton kernels take keys of up to {LARGEST_KEY} in recurrent layers, got {spec.key_dim}")


def arrange(spec: RecurrentSpec, segments: Tensor, rows: int, slots: int) -> Arranged:
    """Segments int64 [n, 4] of a step, on the CPU. Raises ValueError for one that does not fit the rows and slots."""
    listed = segments.tolist()
    for number, (begin, end, source, target) in enumerate(listed):
        if not (0 <= begin < end <= rows and -1 <= source < slots and 0 <= target < slots):
            told = (begin, end, source, target)
            raise ValueError(f"segments[{number}] {told} does not fit {slots} slots and {rows} rows")
    return Arranged.of(listed, rows, spec.kernel)


def check_rows(spec: RecurrentSpec, rows: int, mixed: Tensor, gates: Tensor | None, states: LayerStates) -> None:
    """Raises ValueError for tensors of a layer that do not fit it or each other."""
    width = spec.width
    if mixed.shape != (rows, width) or mixed.stride(-1) != 1:
        raise ValueError(f"mixed must be [{rows}, {width}], each row contiguous")
    if gates is None:
        fits = not spec.gates
    else:
        fits = gates.shape == (rows, spec.gates) and gates.dtype == torch.float32 and gates.is_contiguous()
    if not fits:
        raise ValueError(f"gates must be contiguous fp32 [{rows}, {spec.gates}]")
    slots = len(states.matrices)
    last, matrices = (slots, spec.kernel - 1, spec.channels), (slots, spec.value_heads, spec.key_dim, spec.value_dim)
    if states.last.shape != last or states.last.dtype != mixed.dtype:
        raise ValueError(f"last must be {list(last)} of {mixed.dtype}, got {list(states.last.shape)}")
    if states.matrices.shape != matrices or states.matrices.dtype != torch.float32:
        raise ValueError(f"matrices must be {list(matrices)} of fp32, got {list(states.matrices.shape)}")


def rounded(count: int) -> int:
    """The power of 2 at or above it."""
    return 1 << (count - 1).bit_length()
