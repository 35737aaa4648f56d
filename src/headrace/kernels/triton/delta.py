"""Gated delta nets on a GPU: three launches a layer, whatever segments a step has.

T: rows; C: channels of the convolution; Hk, Hv: key and value heads, D, V: their sizes.
"""

from __future__ import annotations

from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.kernels.gated_delta import by_channel, of_net
from headrace.kernels.records import DeltaWeights, LayerStates, RecurrentWeights
from headrace.kernels.triton import delta_kernels
from headrace.kernels.triton.launching import direct
from headrace.kernels.triton.recurrent_step import COLUMNS, RecurrentMemory, RecurrentStep, rounded

ELEMENTS = 1024
"""Of the heads of a row that one program takes together."""


class DeltaStep(RecurrentStep):
    """See RecurrentStep."""

    def __init__(self, spec: RecurrentSpec, memory: RecurrentMemory, rows: int, groups: int) -> None:
        super().__init__(spec, memory, rows, groups)
        self._widest = rounded(max(spec.key_dim, spec.value_dim))
        self._together = max(1, ELEMENTS // self._widest)
        heads = {"KEY_HEADS": spec.key_heads, "VALUE_HEADS": spec.value_heads}
        self._heads = heads | {"D": spec.key_dim, "V": spec.value_dim, "K": spec.kernel}

    def _run(self, mixed: Tensor, gates: Tensor | None, weights: RecurrentWeights, states: LayerStates) -> Tensor:
        spec, (gates, weights) = self.spec, of_net(gates, weights)
        if spec.bound:
            raise ValueError("decays with a bound are computed on a CPU alone")
        made, scalars, out = self._buffers(mixed, 2 * spec.value_heads + spec.key_heads)
        decays = made if not by_channel(spec) else made.new_empty(self.rows, spec.keys)
        if self.rows:
            self._convolve(mixed, gates, weights, states, made, scalars, decays)
            self._recur(made, scalars, decays, mixed, states)
            self._gate(made, mixed, weights, out)
        return out

    def _convolve(
        self,
        mixed: Tensor,
        gates: Tensor,
        weights: DeltaWeights,
        states: LayerStates,
        made: Tensor,
        scalars: Tensor,
        decays: Tensor,
    ) -> None:
        spec, together = self.spec, self._together
        programs = sum(-(-self.rows * count // together) for count in (spec.key_heads, spec.value_heads))
        direct(delta_kernels.convolve)[(programs,)](
            mixed, states.last, self.memory.taps, weights.conv, gates, weights.rate, weights.dt_bias, made, scalars,
            decays, self.rows, mixed.stride(0), spec.key_dim**-0.5, **self._heads, P=self._widest, TOGETHER=together,
            BY_CHANNEL=by_channel(spec), num_warps=4,
        )  # fmt: skip

    def _recur(self, made: Tensor, scalars: Tensor, decays: Tensor, mixed: Tensor, states: LayerStates) -> None:
        spec, memory = self.spec, self.memory
        parts = spec.value_heads * -(-spec.value_dim // COLUMNS)
        direct(delta_kernels.recur)[(self.groups, parts)](
            made, scalars, decays, mixed, states.last, states.matrices, memory.segments, memory.groups, mixed.stride(0),
            **self._heads, P=rounded(spec.key_dim), COLUMNS=COLUMNS, CHANNELS=rounded(-(-spec.channels // parts)),
            BY_CHANNEL=by_channel(spec), num_warps=1,
        )  # fmt: skip

    def _gate(self, made: Tensor, mixed: Tensor, weights: DeltaWeights, out: Tensor) -> None:
        spec, together = self.spec, self._together
        direct(delta_kernels.gate)[(-(-self.rows * spec.value_heads // together),)](
            made, mixed, weights.norm, out, self.rows, mixed.stride(0), weights.eps, VALUE_HEADS=spec.value_heads,
            KEYS=spec.keys, V=spec.value_dim, P=self._widest, TOGETHER=together,
            KIND="sigmoid" if by_channel(spec) else "silu", num_warps=4,
        )  # fmt: skip
