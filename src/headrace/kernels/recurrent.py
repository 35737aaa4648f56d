"""Recurrent layers of any kind over states that live elsewhere: gated delta nets, Mamba-2 layers, short convolutions;
on a CPU, or on a GPU by Triton.

T: rows; H: hidden size; C: channels; Hv, V: value heads and their size (kernels.gated_delta, kernels.mamba2).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.kernels import dispatch, gated_delta, mamba2, short_conv
from headrace.kernels.records import ConvWeights, LayerStates, MambaWeights, RecurrentWeights
from headrace.kernels.recurrent_step import PreparedRecurrence

KINDS = {"delta": gated_delta, "kda": gated_delta, "mamba2": mamba2, "conv": short_conv}


class Recur(Protocol):
    """The recurrent layers of one step, as a model calls them: see `recur_rows`. layer: their number among themselves.

    Whoever supplies it keeps the states, and knows which rows belong to which.

    prepared: the same as C++ can run it without calling this, where that is possible.
    """

    prepared: PreparedRecurrence | None = None

    def __call__(self, layer: int, mixed: Tensor, gates: Tensor | None, weights: RecurrentWeights) -> Tensor: ...


def recur_rows(
    spec: RecurrentSpec,
    mixed: Tensor,
    gates: Tensor | None,
    weights: RecurrentWeights,
    states: LayerStates,
    segments: Tensor,
) -> Tensor:
    """kernels.gated_delta.gated_delta or kernels.mamba2.mamba2 -> [T, Hv, V]; without gates
    kernels.short_conv.short_conv -> [T, H].

    On a GPU the segments, which stay on the CPU, are prepared anew at each call: a step of many layers does that once
    (attention.recurrence).
    """
    if dispatch.on_gpu(mixed):
        from headrace.kernels.triton.recurrent import step_alone

        step = step_alone(spec, segments, len(mixed), len(states.last), mixed.device)
        return step(mixed, gates, weights, states)
    if isinstance(weights, ConvWeights):
        return short_conv.short_conv(spec, mixed, weights, states, segments)
    if isinstance(weights, MambaWeights) and gates is not None:
        return mamba2.mamba2(spec, mixed, gates, weights, states, segments)
    return gated_delta.gated_delta(spec, mixed, *gated_delta.of_net(gates, weights), states, segments)


def fits_cpp(spec: RecurrentSpec) -> bool:
    """Whether the C++ kernels take layers of these sizes."""
    return bool(KINDS[spec.kind].fits_cpp(spec))


def check_weights(spec: RecurrentSpec, weights: RecurrentWeights) -> None:
    """Raises ValueError for vectors that do not fit."""
    KINDS[spec.kind].check_weights(spec, weights)


def gates_behind(spec: RecurrentSpec, mixed: Tensor, rows: int, at: int) -> Tensor | None:
    """The fp32 gates of rows, `spec.gates` each, that lie behind `mixed`, bf16 and flat, from its element `at` on;
    None: none."""
    if not spec.gates:
        return None
    return mixed[at : at + 2 * rows * spec.gates].view(torch.float32).view(rows, spec.gates)
