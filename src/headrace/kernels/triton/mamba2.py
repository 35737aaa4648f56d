"""Mamba-2 layers on a GPU: three launches a layer, whatever segments a step has. Without a norm their output is of
the type computed in, not fp32 as on a CPU.

T: rows; C: channels of the convolution; Hk: groups of heads that share keys and queries, Hv: heads; D: size of keys
and queries, V: of a head's x.
"""

from __future__ import annotations

from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.kernels.records import LayerStates, MambaWeights, RecurrentWeights
from headrace.kernels.triton import mamba2_kernels
from headrace.kernels.triton.launching import direct
from headrace.kernels.triton.recurrent_step import COLUMNS, RecurrentMemory, RecurrentStep, rounded

BLOCK = 1024
"""Channels of a row that one program convolves."""
WIDE = 2048
"""Of the heads of a group: so many and more are normed by 8 warps."""


class MambaStep(RecurrentStep):
    """See RecurrentStep."""

    def __init__(self, spec: RecurrentSpec, memory: RecurrentMemory, rows: int, groups: int) -> None:
        super().__init__(spec, memory, rows, groups)
        self._heads = {"VALUE_HEADS": spec.value_heads, "VALUES": spec.values, "CHANNELS": spec.channels}

    def _run(self, mixed: Tensor, gates: Tensor | None, weights: RecurrentWeights, states: LayerStates) -> Tensor:
        if gates is None or not isinstance(weights, MambaWeights):
            raise ValueError("these are not the weights and gates of a Mamba-2 layer")
        made, scalars, out = self._buffers(mixed, 2 * self.spec.value_heads)
        if self.rows:
            self._convolve(mixed, gates, weights, states, made, scalars)
            self._recur(made, scalars, mixed, weights, states)
            self._gate(made, mixed, weights, out)
        return out

    def _convolve(
        self, mixed: Tensor, gates: Tensor, weights: MambaWeights, states: LayerStates, made: Tensor, scalars: Tensor
    ) -> None:
        spec, bias = self.spec, weights.conv_bias
        block = min(BLOCK, rounded(spec.channels))
        direct(mamba2_kernels.convolve)[(self.rows, -(-spec.channels // block) + 1)](
            mixed, states.last, self.memory.taps, weights.conv, weights.conv if bias is None else bias, gates,
            weights.rate, weights.dt_bias, made, scalars, self.rows, mixed.stride(0), **self._heads, K=spec.kernel,
            BIASED=bias is not None, BLOCK=block, HEADS=rounded(spec.value_heads), num_warps=4,
        )  # fmt: skip

    def _recur(self, made: Tensor, scalars: Tensor, mixed: Tensor, weights: MambaWeights, states: LayerStates) -> None:
        spec, memory = self.spec, self.memory
        parts = spec.value_heads * -(-spec.value_dim // COLUMNS)
        direct(mamba2_kernels.recur)[(self.groups, parts)](
            made, scalars, mixed, states.last, states.matrices, weights.skip, memory.segments, memory.groups,
            mixed.stride(0), KEY_HEADS=spec.key_heads, **self._heads, D=spec.key_dim, V=spec.value_dim, K=spec.kernel,
            P=rounded(spec.key_dim), COLUMNS=COLUMNS, PART=rounded(-(-spec.channels // parts)), num_warps=1,
        )  # fmt: skip

    def _gate(self, made: Tensor, mixed: Tensor, weights: MambaWeights, out: Tensor) -> None:
        spec = self.spec
        together = spec.values // spec.key_heads
        direct(mamba2_kernels.gate)[(self.rows, spec.key_heads)](
            made, mixed, weights.rate if weights.norm is None else weights.norm, out, mixed.stride(0), weights.eps,
            VALUES=spec.values, CHANNELS=spec.channels, TOGETHER=together, P=rounded(together),
            NORMED=weights.norm is not None, num_warps=8 if together >= WIDE else 4,
        )  # fmt: skip
