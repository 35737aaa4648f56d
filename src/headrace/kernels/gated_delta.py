"""Gated delta nets (arXiv 2412.06464) over states that live elsewhere, on a CPU: C++, or torch token by
token.

T: rows; K: inputs of the convolution; Hk, Hv: key and value heads; D: size of queries and keys, V: of values;
C = 2 Hk D + Hv V: channels. For each token, after a causal convolution with silu, q and k of length 1, q / sqrt(D):

    S = decay S + k (x) beta (v - decay k S),    out = norm(q S) silu(z)        S [D, V] fp32 of each value head

Kimi Delta Attention (arXiv 2510.26692) is the same with a decay for each channel of a key, Diag(decay) S, with Hk = Hv,
and out = norm(q S) sigmoid(z). A channel decays by e^(-rate softplus(a + dt_bias)), or, where the model bounds it, by
e^(bound sigmoid(rate (a + dt_bias))).

There is one order of operations, token by token, so a row has the same bits however its sequence is cut into segments.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.config import RecurrentSpec
from headrace.kernels import dispatch
from headrace.kernels.extension import check, require, type_of
from headrace.kernels.records import DeltaWeights, LayerStates, RecurrentWeights
from headrace.kernels.recurrent_step import check_states

MOST_KEY_DIM, MOST_INPUTS = 256, 8
"""Of the C++ kernel (csrc/kernels.h, GatedDelta; csrc/ops/state_rows.h, Convolution)."""


def gated_delta(
    spec: RecurrentSpec, mixed: Tensor, gates: Tensor, weights: DeltaWeights, states: LayerStates, segments: Tensor
) -> Tensor:
    """mixed [T, C + Hv V] = (q, k, v, z), gates fp32 [T, 2 Hv] = (b, a), or [T, Hv + Hv D] by channel -> [T, Hv, V] in
    mixed's type.

    segments int64 [n, 4] = (first row, row behind the last, slot of the state to begin with, slot to leave the state
    in); slot -1: the state of no tokens. They take effect in their order: one may begin with what another has left.
    Every row is in one segment. Raises ValueError for tensors that do not fit each other.
    """
    _check(spec, mixed, gates, weights, states, segments)
    if dispatch.native(mixed) and fits_cpp(spec):
        return _native(spec, mixed, gates, weights, states, segments)
    return _plain(spec, mixed, gates, weights, states, segments)


def of_net(gates: Tensor | None, weights: RecurrentWeights) -> tuple[Tensor, DeltaWeights]:
    """What is a gated delta net's; raises ValueError for anything else."""
    if gates is None or not isinstance(weights, DeltaWeights):
        raise ValueError("these are not the weights and gates of a gated delta net")
    return gates, weights


def fits_cpp(spec: RecurrentSpec) -> bool:
    """Whether the C++ kernel takes nets of these sizes."""
    return spec.key_dim <= MOST_KEY_DIM and spec.kernel <= MOST_INPUTS


def by_channel(spec: RecurrentSpec) -> bool:
    """Whether each channel of a key decays by itself."""
    return spec.kind == "kda"


def check_weights(spec: RecurrentSpec, weights: DeltaWeights) -> None:
    """Raises ValueError for vectors that do not fit."""
    wide = torch.float32
    check("conv", weights.conv, wide, (spec.kernel, spec.channels))
    check("rate", weights.rate, wide, (spec.value_heads,))
    check("dt_bias", weights.dt_bias, wide, (spec.keys if by_channel(spec) else spec.value_heads,))
    check("norm", weights.norm, wide, (spec.value_dim,))


def _check(
    spec: RecurrentSpec, mixed: Tensor, gates: Tensor, weights: DeltaWeights, states: LayerStates, segments: Tensor
) -> None:
    rows = len(mixed)
    if mixed.shape != (rows, spec.channels + spec.values) or mixed.stride(-1) != 1:
        raise ValueError(f"mixed must be [T, {spec.channels + spec.values}] with contiguous rows, got {mixed.shape}")
    check("gates", gates, torch.float32, (rows, spec.gates))
    check_weights(spec, weights)
    check_states(spec, states, len(states.matrices), mixed.dtype)
    check("segments", segments, torch.int64, (len(segments), 4))


def _native(
    spec: RecurrentSpec, mixed: Tensor, gates: Tensor, weights: DeltaWeights, states: LayerStates, segments: Tensor
) -> Tensor:
    out = torch.empty((len(mixed), spec.value_heads, spec.value_dim), dtype=mixed.dtype)
    require().gated_delta(
        type_of(mixed), mixed.data_ptr(), gates.data_ptr(), [each.data_ptr() for each in weights[:4]],
        [states.last.data_ptr(), states.matrices.data_ptr()], segments.data_ptr(), out.data_ptr(), rows=len(mixed),
        mixed_stride=mixed.stride(0), count=len(segments), slots=len(states.matrices), key_heads=spec.key_heads,
        value_heads=spec.value_heads, key_dim=spec.key_dim, value_dim=spec.value_dim, kernel=spec.kernel,
        eps=weights.eps, threads=torch.get_num_threads(), by_channel=by_channel(spec), bound=spec.bound,
    )  # fmt: skip
    return out


def _plain(
    spec: RecurrentSpec, mixed: Tensor, gates: Tensor, weights: DeltaWeights, states: LayerStates, segments: Tensor
) -> Tensor:
    """One token at a time, in tensors of the same shapes: torch then computes each alike."""
    out = torch.empty((len(mixed), spec.value_heads, spec.value_dim), dtype=mixed.dtype)
    for begin, end, source, target in segments.tolist():
        if source < 0:
            last, matrix = torch.zeros_like(states.last[0]), torch.zeros_like(states.matrices[0])
        else:
            last, matrix = states.last[source], states.matrices[source]
        for row in range(begin, end):
            seen = torch.cat((last, mixed[row : row + 1, : spec.channels]))
            gate = mixed[row, spec.channels :].reshape(spec.value_heads, spec.value_dim).float()
            matrix, read = _token(spec, seen.float(), gates[row], weights, matrix)
            scaled = read * torch.rsqrt(read.pow(2).mean(-1, keepdim=True) + weights.eps) * weights.norm
            gate = gate.sigmoid() if by_channel(spec) else F.silu(gate)
            out[row], last = (scaled * gate).to(mixed.dtype), seen[1:]
        states.last[target], states.matrices[target] = last.clone(), matrix.clone()
    return out


def _token(
    spec: RecurrentSpec, seen: Tensor, gates: Tensor, weights: DeltaWeights, matrix: Tensor
) -> tuple[Tensor, Tensor]:
    """seen [K, C], gates [2 Hv] or [Hv + Hv D], matrix [Hv, D, V] -> the next matrix, and what the token reads of it
    [Hv, V]."""
    convolved = F.silu((seen * weights.conv).sum(0))
    q, k, v = convolved.split((spec.keys, spec.keys, spec.values))
    shared = spec.value_heads // spec.key_heads
    q, k = (_unit(x.view(spec.key_heads, spec.key_dim)).repeat_interleave(shared, 0) for x in (q, k))
    b, a = gates[: spec.value_heads], gates[spec.value_heads :]
    gate, rate = (a + weights.dt_bias).view(spec.value_heads, -1), weights.rate[:, None]  # [Hv, 1 or D]
    decay = spec.bound * torch.sigmoid(rate * gate) if spec.bound else -rate * F.softplus(gate)
    matrix = matrix * torch.exp(decay)[:, :, None]
    delta = (v.view(spec.value_heads, spec.value_dim) - (matrix * k[:, :, None]).sum(1)) * b.sigmoid()[:, None]
    matrix = matrix + k[:, :, None] * delta[:, None, :]
    return matrix, (matrix * q[:, :, None]).sum(1) * spec.key_dim**-0.5


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)
