"""Short convolutions on a GPU: two launches a layer, whatever segments a step has. T: rows; H: channels."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.records import ConvWeights, LayerStates, RecurrentWeights
from headrace.kernels.triton import short_conv_kernels
from headrace.kernels.triton.launching import direct
from headrace.kernels.triton.recurrent_step import RecurrentStep, rounded

BLOCK = 1024
"""Channels of a row that one program takes."""


class ConvStep(RecurrentStep):
    """See RecurrentStep."""

    def _run(self, mixed: Tensor, gates: Tensor | None, weights: RecurrentWeights, states: LayerStates) -> Tensor:
        if not isinstance(weights, ConvWeights):
            raise ValueError("these are not the weights of a short convolution")
        spec, memory = self.spec, self.memory
        out = torch.empty(self.rows, spec.channels, dtype=mixed.dtype, device=mixed.device)
        if not self.rows:
            return out
        block = min(BLOCK, rounded(spec.channels))
        sizes = {"CHANNELS": spec.channels, "K": spec.kernel, "BLOCK": block, "num_warps": 4}
        parts = -(-spec.channels // block)
        direct(short_conv_kernels.convolve)[(self.rows, parts)](
            mixed, states.last, memory.taps, weights.conv, out, self.rows, mixed.stride(0), **sizes
        )
        direct(short_conv_kernels.keep)[(self.groups, parts)](
            mixed, states.last, memory.segments, memory.groups, mixed.stride(0), **sizes
        )
        return out
