"""Mamba-2 layers (arXiv 2405.21060) over states that live elsewhere, on a CPU: C++, or torch token
by token.

T: rows; K: inputs of the convolution; Hk: groups of heads that share keys and queries; Hv: heads; D: size of keys and
queries (B and C of the paper), V: of a head's x; C = Hv V + 2 Hk D: channels. For each token, after a causal
convolution with silu, with step = softplus(gate + dt_bias):

    S = exp(-rate step) S + k (x) step x,    out = norm((q S + skip x) silu(z))        S [D, V] fp32 of each head

The norm is of all heads of a group together; without it (MambaWeights.norm None) out is what it would be taken of, in
fp32. There is one order of operations, token by token, so a row has the same bits however its sequence is cut into
segments.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.config import RecurrentSpec
from headrace.kernels import dispatch, ops
from headrace.kernels.extension import check, require, type_of
from headrace.kernels.records import LayerStates, MambaWeights
from headrace.kernels.recurrent_step import check_states

MOST_KEY_DIM, MOST_INPUTS = 256, 8
"""Of the C++ kernel (csrc/kernels.h, Mamba2; csrc/ops/state_rows.h, Convolution)."""


def mamba2(
    spec: RecurrentSpec, mixed: Tensor, gates: Tensor, weights: MambaWeights, states: LayerStates, segments: Tensor
) -> Tensor:
    """mixed [T, Hv V + C] = (z, x, k, q), gates fp32 [T, Hv] -> [T, Hv, V] in mixed's type, in fp32 without a norm.

    segments: as of kernels.gated_delta. Raises ValueError for tensors that do not fit each other.
    """
    rows, width = len(mixed), spec.values + spec.channels
    if mixed.shape != (rows, width) or mixed.stride(-1) != 1:
        raise ValueError(f"mixed must be [T, {width}] with contiguous rows, got {list(mixed.shape)}")
    check("gates", gates, torch.float32, (rows, spec.value_heads))
    check_weights(spec, weights)
    check_states(spec, states, len(states.matrices), mixed.dtype)
    check("segments", segments, torch.int64, (len(segments), 4))
    native = dispatch.native(mixed) and fits_cpp(spec)
    return (_native if native else _plain)(spec, mixed, gates, weights, states, segments)


def fits_cpp(spec: RecurrentSpec) -> bool:
    """Whether the C++ kernel takes layers of these sizes."""
    return spec.key_dim <= MOST_KEY_DIM and spec.kernel <= MOST_INPUTS


def check_weights(spec: RecurrentSpec, weights: MambaWeights) -> None:
    """Raises ValueError for vectors that do not fit."""
    wide = torch.float32
    check("conv", weights.conv, wide, (spec.kernel, spec.channels))
    if weights.conv_bias is not None:
        check("conv_bias", weights.conv_bias, wide, (spec.channels,))
    for name in ("rate", "dt_bias", "skip"):
        check(name, getattr(weights, name), wide, (spec.value_heads,))
    if weights.norm is not None:
        check("norm", weights.norm, wide, (spec.values,))


def normed(spec: RecurrentSpec, x: Tensor, norm: Tensor, eps: float) -> Tensor:
    """The norm that was left out: x fp32 [T, Hv V], norm [Hv V] -> [T, Hv V], fp32. spec: of all heads. In C++ it has
    the bits of the one that was not."""
    parts = zip(x.chunk(spec.key_heads, dim=1), norm.chunk(spec.key_heads), strict=True)
    return torch.cat([ops.rms_norm(part.contiguous(), own, eps, 0.0) for part, own in parts], dim=1)


def _out(spec: RecurrentSpec, mixed: Tensor, weights: MambaWeights) -> Tensor:
    dtype = mixed.dtype if weights.norm is not None else torch.float32
    return torch.empty((len(mixed), spec.value_heads, spec.value_dim), dtype=dtype)


def _native(
    spec: RecurrentSpec, mixed: Tensor, gates: Tensor, weights: MambaWeights, states: LayerStates, segments: Tensor
) -> Tensor:
    out = _out(spec, mixed, weights)
    require().mamba2(
        type_of(mixed), mixed.data_ptr(), gates.data_ptr(), weights.addresses,
        [states.last.data_ptr(), states.matrices.data_ptr()], segments.data_ptr(), out.data_ptr(), rows=len(mixed),
        mixed_stride=mixed.stride(0), count=len(segments), slots=len(states.matrices), key_heads=spec.key_heads,
        value_heads=spec.value_heads, key_dim=spec.key_dim, value_dim=spec.value_dim, kernel=spec.kernel,
        eps=weights.eps, threads=torch.get_num_threads(),
    )  # fmt: skip
    return out


def _plain(
    spec: RecurrentSpec, mixed: Tensor, gates: Tensor, weights: MambaWeights, states: LayerStates, segments: Tensor
) -> Tensor:
    """One token at a time, in tensors of the same shapes: torch then computes each alike."""
    out = _out(spec, mixed, weights)
    for begin, end, source, target in segments.tolist():
        if source < 0:
            last, matrix = torch.zeros_like(states.last[0]), torch.zeros_like(states.matrices[0])
        else:
            last, matrix = states.last[source], states.matrices[source]
        for row in range(begin, end):
            seen = torch.cat((last, mixed[row : row + 1, spec.values :]))
            matrix, read = _token(spec, seen.float(), gates[row], weights, matrix)
            gated = read.flatten() * F.silu(mixed[row, : spec.values].float())
            if weights.norm is not None:
                groups = gated.view(spec.key_heads, -1)
                scaled = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + weights.eps)
                gated = scaled.flatten() * weights.norm
            out[row], last = gated.view_as(read).to(out.dtype), seen[1:]
        states.last[target], states.matrices[target] = last.clone(), matrix.clone()
    return out


def _token(
    spec: RecurrentSpec, seen: Tensor, gates: Tensor, weights: MambaWeights, matrix: Tensor
) -> tuple[Tensor, Tensor]:
    """seen [K, C], gates [Hv], matrix [Hv, D, V] -> the next matrix, and what the token reads of it [Hv, V]."""
    made = (seen * weights.conv).sum(0)
    convolved = F.silu(made if weights.conv_bias is None else made + weights.conv_bias)
    x, k, q = convolved.split((spec.values, spec.keys, spec.keys))
    shared, x = spec.value_heads // spec.key_heads, x.view(spec.value_heads, spec.value_dim)
    k, q = (each.view(spec.key_heads, spec.key_dim).repeat_interleave(shared, 0)[:, :, None] for each in (k, q))
    step = F.softplus(gates + weights.dt_bias)
    decay = torch.exp(-weights.rate * step)
    matrix = matrix * decay[:, None, None] + k * (x * step[:, None])[:, None, :]
    return matrix, (matrix * q).sum(1) + weights.skip[:, None] * x
