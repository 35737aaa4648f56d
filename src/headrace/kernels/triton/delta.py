"""Gated delta nets on a GPU: three launches a layer, whatever segments a step has.

The recurrence goes token by token in registers, so a row has the same bits however its sequence is cut. T: rows; K:
inputs of the convolution, C: its channels; Hk, Hv: key and value heads, D, V: their sizes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.device import current
from headrace.kernels.records import DeltaWeights, LayerStates
from headrace.kernels.step_copies import Sending
from headrace.kernels.triton import delta_kernels
from headrace.kernels.triton.delta_schedule import NOTHING, Arranged
from headrace.kernels.triton.launching import direct

LARGEST_KEY = 256
"""D: a program holds its columns of a state in registers."""
COLUMNS = 8
"""Of a state, for each program: 4 registers of a thread for each 16 of D."""
ELEMENTS = 1024
"""Of the heads of a row that one program takes together."""
ALIGN = 32
"""Numbers between whose multiples parts of the index data begin."""


class DeltaMemory:
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


class DeltaStep:
    """The recurrent layers of a step of T = `rows` rows and at most so many groups. memory: of its index data."""

    def __init__(self, spec: RecurrentSpec, memory: DeltaMemory, rows: int, groups: int) -> None:
        self.spec, self.memory, self.rows, self.groups = spec, memory, rows, groups
        self._widest = _rounded(max(spec.key_dim, spec.value_dim))
        self._together = max(1, ELEMENTS // self._widest)
        heads = {"KEY_HEADS": spec.key_heads, "VALUE_HEADS": spec.value_heads}
        self._heads = heads | {"D": spec.key_dim, "V": spec.value_dim, "K": spec.kernel}

    @classmethod
    def of(cls, spec: RecurrentSpec, segments: Tensor, rows: int, slots: int, place: torch.device) -> DeltaStep:
        """One step alone. Raises ValueError for segments that do not fit its rows and states in `slots` slots, and for
        keys that are too long."""
        check_size(spec)
        arranged = arrange(spec, segments, rows, slots)
        groups = len(arranged.groups) - 1
        memory = DeltaMemory(spec.kernel - 1, rows, len(arranged.segments), groups, place, pinned=False)
        memory.fill(arranged)
        memory.send()
        return cls(spec, memory, rows, groups)

    def __call__(self, mixed: Tensor, gates: Tensor, weights: DeltaWeights, states: LayerStates) -> Tensor:
        """See kernels.gated_delta."""
        spec = self.spec
        _check(spec, self.rows, mixed, gates, states)
        made = torch.empty(self.rows, spec.channels, device=mixed.device)
        scalars = torch.empty(self.rows, 2 * spec.value_heads + spec.key_heads, device=mixed.device)
        out = torch.empty(self.rows, spec.value_heads, spec.value_dim, dtype=mixed.dtype, device=mixed.device)
        if self.rows:
            if mixed.data_ptr() % 16:  # how loads lie decides how a norm adds up
                mixed = mixed.clone(memory_format=torch.contiguous_format)
            self._convolve(mixed, gates, weights, states, made, scalars)
            self._recur(made, scalars, mixed, states)
            self._gate(made, mixed, weights, out)
        return out

    def _convolve(
        self, mixed: Tensor, gates: Tensor, weights: DeltaWeights, states: LayerStates, made: Tensor, scalars: Tensor
    ) -> None:
        spec, together = self.spec, self._together
        programs = sum(-(-self.rows * count // together) for count in (spec.key_heads, spec.value_heads))
        direct(delta_kernels.convolve)[(programs,)](
            mixed, states.last, self.memory.taps, weights.conv, gates, weights.rate, weights.dt_bias, made, scalars,
            self.rows, mixed.stride(0), spec.key_dim**-0.5, **self._heads, P=self._widest, TOGETHER=together,
            num_warps=4,
        )  # fmt: skip

    def _recur(self, made: Tensor, scalars: Tensor, mixed: Tensor, states: LayerStates) -> None:
        spec, memory = self.spec, self.memory
        parts = spec.value_heads * -(-spec.value_dim // COLUMNS)
        direct(delta_kernels.recur)[(self.groups, parts)](
            made, scalars, mixed, states.last, states.matrices, memory.segments, memory.groups, mixed.stride(0),
            **self._heads, P=_rounded(spec.key_dim), COLUMNS=COLUMNS, CHANNELS=_rounded(-(-spec.channels // parts)),
            num_warps=1,
        )  # fmt: skip

    def _gate(self, made: Tensor, mixed: Tensor, weights: DeltaWeights, out: Tensor) -> None:
        spec, together = self.spec, self._together
        direct(delta_kernels.gate)[(-(-self.rows * spec.value_heads // together),)](
            made, mixed, weights.norm, out, self.rows, mixed.stride(0), weights.eps, VALUE_HEADS=spec.value_heads,
            KEYS=spec.keys, V=spec.value_dim, P=self._widest, TOGETHER=together, num_warps=4,
        )  # fmt: skip


def check_size(spec: RecurrentSpec) -> None:
    """Raises ValueError for nets that the kernels do not take."""
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


def _check(spec: RecurrentSpec, rows: int, mixed: Tensor, gates: Tensor, states: LayerStates) -> None:
    if mixed.shape != (rows, spec.channels + spec.values) or mixed.stride(-1) != 1:
        raise ValueError(f"mixed must be [{rows}, {spec.channels + spec.values}], each row contiguous")
    if gates.shape != (rows, 2 * spec.value_heads) or gates.dtype != torch.float32 or not gates.is_contiguous():
        raise ValueError(f"gates must be contiguous fp32 [{rows}, {2 * spec.value_heads}]")
    slots = len(states.matrices)
    last, matrices = (slots, spec.kernel - 1, spec.channels), (slots, spec.value_heads, spec.key_dim, spec.value_dim)
    if states.last.shape != last or states.last.dtype != mixed.dtype:
        raise ValueError(f"last must be {list(last)} of {mixed.dtype}, got {list(states.last.shape)}")
    if states.matrices.shape != matrices or states.matrices.dtype != torch.float32:
        raise ValueError(f"matrices must be {list(matrices)} of fp32, got {list(states.matrices.shape)}")


def _rounded(count: int) -> int:
    """The power of 2 at or above it."""
    return 1 << (count - 1).bit_length()
