"""Recurrent layers on a GPU: gated delta nets, Mamba-2 layers, short convolutions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.kernels.triton.delta import DeltaStep
from headrace.kernels.triton.mamba2 import MambaStep
from headrace.kernels.triton.recurrent_step import RecurrentMemory, RecurrentStep, arrange, check_size
from headrace.kernels.triton.short_conv import ConvStep

KINDS: Mapping[str, type[RecurrentStep]] = {
    "delta": DeltaStep, "kda": DeltaStep, "mamba2": MambaStep, "conv": ConvStep,
}  # fmt: skip


def step_alone(spec: RecurrentSpec, segments: Tensor, rows: int, slots: int, place: torch.device) -> RecurrentStep:
    """One step alone. Raises ValueError for segments that do not fit its rows and states in `slots` slots, and for
    keys that are too long."""
    check_size(spec)
    arranged = arrange(spec, segments, rows, slots)
    groups = len(arranged.groups) - 1
    memory = RecurrentMemory(spec.kernel - 1, rows, len(arranged.segments), groups, place, pinned=False)
    memory.fill(arranged)
    memory.send()
    return KINDS[spec.kind](spec, memory, rows, groups)
