"""Weights that rows are multiplied by, packed for the kernels as they are loaded. Shapes: [outputs, inputs]."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from headrace.config import Quantization
from headrace.kernels import dispatch, ops
from headrace.kernels.formats import Coded
from headrace.kernels.triton import weights as gpu_weights
from headrace.models.layers import Layer, Matrices, Weights
from headrace.models.sizes import HEAD, LOOKED_UP
from headrace.models.slots import expert_of, in_feed_forward, is_exact, is_mixing
from headrace.models.weights import OnProgress, StoredMatrix
from headrace.stats import ExpertStats

log = logging.getLogger(__name__)


class ExpertsPlace(Protocol):
    """Memory outside the fast one for experts."""

    def place(self, name: str, weight: ops.Weight) -> ops.Weight:
        """The matrix `name` of an expert, moved there: of each expert up, then down."""

    def settle(self) -> dict[str, Tensor]:
        """All are placed. Of each layer's experts the table that steps count in (kernels.experts.OutsideColumn), by our
        names."""

    def serve(self, layers: Sequence[Layer], place: torch.device) -> None:
        """Layers are made of what was placed; `place` is where they compute. Raises ValueError for too little room."""

    def stats(self) -> ExpertStats: ...


def multiplied(weights: Weights) -> list[str]:
    """Names of those that rows are multiplied by."""
    return [name for name, w in weights.items() if w.dim() == 2 and name not in LOOKED_UP and not is_mixing(name)]


Leave = Callable[[str, ops.Weight], ops.Weight]
"""Moves the matrix of that name, once packed on a device, to where it stays. Maybe nowhere."""


def pack_all(
    weights: Weights,
    quantization: Quantization,
    gated: bool,
    packed: OnProgress | None,
    device: torch.device,
    leave: Leave | None = None,
    outputs: Mapping[str, int] = MappingProxyType({}),
    apart: Set[str] = frozenset(),
) -> Matrices:
    """All weights that rows are multiplied by, on the device. What is packed leaves `weights`: memory never holds all
    twice. outputs: of whole matrices by name, where weights are a tensor rank's share. apart: see with_both."""
    names = multiplied(weights)
    matrices: Matrices = {}
    done, total = 0, sum(weights[name].nbytes for name in names)
    for name in names:
        weight = weights[name]
        gates = gated and name.endswith(".up.weight") and layer_of(name) not in apart
        matrices[name] = _packed(name, weight.to(device), _rounding(name, quantization), gates, outputs.get(name))
        if matrices[name] is not weight:
            del weights[name]
        if leave is not None:
            matrices[name] = leave(name, matrices[name])
        done += weight.nbytes
        if packed is not None:
            packed(done, total)
    return matrices


def _rounding(name: str, asked: Quantization) -> Quantization:
    """How the numbers of a matrix are kept. With w8a8 the head's weights are int8 and its rows are not rounded: a step
    has few of them, and logits feel it most. FP8 is for feed-forward layers alone."""
    if is_exact(name) or (asked == "fp8_rowwise" and not in_feed_forward(name)):
        return "none"
    return "int8" if asked == "w8a8" and name == HEAD else asked


@dataclass(frozen=True, slots=True)
class StoredPacking:
    """Packs matrices that are read when they are wanted, one after another: codes as they are, or what they stand for
    where there are no kernels for codes; numbers as all others. Experts go to `outside`. Tables are left alone. layers:
    see with_both."""

    dtype: torch.dtype
    device: torch.device
    gated: bool
    quantization: Quantization
    outside: ExpertsPlace | None
    leave: Leave | None = None
    layers: Set[str] = frozenset()

    def all_of(self, stored: Mapping[str, StoredMatrix], packed: OnProgress | None) -> Matrices:
        stored = {name: matrix for name, matrix in stored.items() if name not in LOOKED_UP}
        matrices: Matrices = {}
        widened: dict[str, int] = {}
        done, total = 0, sum(self._size(matrix) for matrix in stored.values())
        on_cpu = self.device.type == "cpu" and not dispatch.on_gpu(torch.empty(0))
        # What lies in the file is not packed again: where experts are codes, their formats may differ in a layer.
        apart = self.outside is not None and any(each.coded for name, each in stored.items() if expert_of(name))
        for name, matrix in stored.items():
            if on_cpu:
                alone = (apart or layer_of(name) in self.layers) and expert_of(name) is not None
                matrices[name] = self._one(name, matrix, self.gated and not alone)
            else:
                matrices[name] = self._on_gpu(name, matrix, widened)
                if self.leave is not None:
                    matrices[name] = self.leave(name, matrices[name])
            done += self._size(matrix)
            if packed is not None:
                packed(done, total)
        for name in _gated_beside_others(matrices):
            matrices[name] = self._weight(name, stored[name].read(), gated=False)
        for reason, size in widened.items():
            log.warning("%s: widened to %s on the GPU, %.1f MiB", reason, self.dtype, size / 2**20)
        return matrices

    def _size(self, matrix: StoredMatrix) -> int:
        return math.prod(matrix.shape) * self.dtype.itemsize

    def _one(self, name: str, matrix: StoredMatrix, gated: bool) -> ops.Weight:
        parts = matrix.read()
        weight = self._weight(name, parts, gated and name.endswith(".up.weight"))
        if self.outside is None or expert_of(name) is None or weight is parts[0]:
            return weight  # in memory, or the checkpoint's own, which is mapped
        return self.outside.place(name, weight)

    def _on_gpu(self, name: str, matrix: StoredMatrix, widened: dict[str, int]) -> ops.Weight:
        """Codes as they are; in `widened` bytes of those that there is no product for, by what they are."""
        parts = matrix.read()
        reason = gpu_weights.obstacle(parts, expert_of(name) is not None)
        if reason is None:
            made = gpu_weights.pack_parts(parts, self.dtype, self.device, matrix.outputs)
        else:
            widened[reason] = widened.get(reason, 0) + self._size(matrix)
            made = matrix.numbers(self.dtype).to(self.device)
        weight: ops.Weight = made
        if isinstance(made, Tensor):
            weight = _packed(name, made, _rounding(name, self.quantization), False, matrix.outputs)
        return weight if self.outside is None or expert_of(name) is None else self.outside.place(name, weight)

    def _weight(self, name: str, parts: Sequence[Tensor | Coded], gated: bool) -> ops.Weight:
        if len(parts) == 1 and isinstance(parts[0], Tensor):
            return _packed(name, parts[0], _rounding(name, self.quantization), gated)
        return ops.pack_stored(parts, self.dtype, gated)


def layer_of(name: str) -> str:
    """What the names of a layer's experts begin with; of other weights the whole name."""
    return name.partition(".experts.")[0]


def with_both(weights: Mapping[str, Tensor], stored: Mapping[str, StoredMatrix]) -> frozenset[str]:
    """Layers that have experts of numbers and experts of codes. Their gates and ups lie one behind the other: those of
    codes may differ in format, and one product takes all of a layer."""
    ours, theirs = (
        {layer_of(name) for name in each if expert_of(name) is not None and name.endswith(".up.weight")}
        for each in (weights, stored)
    )
    return frozenset(ours & theirs)


def _gated_beside_others(matrices: Matrices) -> list[str]:
    """Experts' gated matrices in layers where another one's gates and ups differ in format or order: one product takes
    all of a layer, gated or not."""
    layers: dict[str, dict[str, bool]] = {}
    for name, weight in matrices.items():
        layer, of_expert, _ = name.partition(".experts.")
        if of_expert and name.endswith(".up.weight"):
            layers.setdefault(layer, {})[name] = not isinstance(weight, Tensor) and weight.gated
    mixed = [each for each in layers.values() if not all(each.values())]
    return [name for each in mixed for name, gated in each.items() if gated]


def _packed(
    name: str, weight: Tensor, quantization: Quantization, gated: bool, outputs: int | None = None
) -> ops.Weight:
    try:
        return ops.pack(weight, quantization, gated, outputs)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
