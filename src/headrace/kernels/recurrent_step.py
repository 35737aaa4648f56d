"""The recurrence of one engine step as a part of all layers at once (kernels.block), as kernels.cpu_step is attention.

K: inputs of the convolution, C: its channels; Hv: value heads; D: size of queries and keys, V: of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.kernels.extension import check, require
from headrace.kernels.records import LayerStates

if TYPE_CHECKING:
    from headrace.kernels import _cpu as native


class StatesInCpp:
    """The states of all recurrent layers of a model that computes in bf16, checked once. Raises ValueError for those
    that do not fit `spec`."""

    def __init__(self, spec: RecurrentSpec, layers: Sequence[LayerStates]) -> None:
        slots = len(layers[0].matrices)
        for each in layers:
            check_states(spec, each, slots, torch.bfloat16)
        self.layers = layers  # the handle has their addresses
        addresses = [(each.last.data_ptr(), each.matrices.data_ptr()) for each in layers]
        self.handle = require().RecurrentStates(addresses, slots)


class PreparedRecurrence(NamedTuple):
    """segments: int64 [n, 4] as kernels.gated_delta takes them, for every recurrent layer."""

    states: StatesInCpp
    segments: Tensor

    @property
    def arguments(self) -> tuple[native.RecurrentStates, int, int]:
        """The states, the address of the segments and their number. Raises ValueError for other tensors."""
        check("segments", self.segments, torch.int64, (len(self.segments), 4))
        return self.states.handle, self.segments.data_ptr(), len(self.segments)


NO_RECURRENCE = (None, 0, 0)
"""`arguments` where no layer is recurrent."""


def check_states(spec: RecurrentSpec, states: LayerStates, slots: int, dtype: torch.dtype) -> None:
    """last [slots, K - 1, C] of `dtype`, matrices [slots, Hv, D, V] fp32; raises ValueError for others."""
    check("last", states.last, dtype, (slots, spec.kernel - 1, spec.channels))
    check("matrices", states.matrices, torch.float32, (slots, spec.value_heads, spec.key_dim, spec.value_dim))
