"""Short convolutions between two gates (LFM2) over states that live elsewhere, on a CPU: C++, or torch
token by token.

T: rows; H: channels; K: inputs of the convolution, each channel's own. For each token, with B, C, x [H] = mixed:

    out = C sum_j conv_j (B x)_j        over the last K tokens of its sequence, in fp32

B x is rounded to mixed's type before it is convolved and kept, so a row has the same bits however its sequence is cut
into segments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.config import RecurrentSpec
from headrace.kernels import dispatch
from headrace.kernels.extension import check, require, type_of
from headrace.kernels.records import ConvWeights, LayerStates
from headrace.kernels.recurrent_step import check_states

MOST_INPUTS = 8
"""Of the C++ kernel (csrc/kernels.h, ShortConv)."""


def short_conv(
    spec: RecurrentSpec, mixed: Tensor, weights: ConvWeights, states: LayerStates, segments: Tensor
) -> Tensor:
    """mixed [T, 3 H] = (B, C, x) -> [T, H] in its type. states: `last` [slots, K - 1, H] of that type.

    segments: as of kernels.gated_delta. Raises ValueError for tensors that do not fit each other.
    """
    width = 3 * spec.channels
    if mixed.shape != (len(mixed), width) or mixed.stride(-1) != 1:
        raise ValueError(f"mixed must be [T, {width}] with contiguous rows, got {list(mixed.shape)}")
    check_weights(spec, weights)
    check_states(spec, states, len(states.last), mixed.dtype)
    check("segments", segments, torch.int64, (len(segments), 4))
    native = dispatch.native(mixed) and fits_cpp(spec)
    return (_native if native else _plain)(spec, mixed, weights.conv, states.last, segments)


def fits_cpp(spec: RecurrentSpec) -> bool:
    """Whether the C++ kernel takes convolutions of so many inputs."""
    return spec.kernel <= MOST_INPUTS


def check_weights(spec: RecurrentSpec, weights: ConvWeights) -> None:
    """Raises ValueError for another convolution's."""
    check("conv", weights.conv, torch.float32, (spec.kernel, spec.channels))


def _native(spec: RecurrentSpec, mixed: Tensor, conv: Tensor, last: Tensor, segments: Tensor) -> Tensor:
    out = torch.empty((len(mixed), spec.channels), dtype=mixed.dtype)
    require().short_conv(
        type_of(mixed), mixed.data_ptr(), conv.data_ptr(), last.data_ptr(), segments.data_ptr(), out.data_ptr(),
        rows=len(mixed), mixed_stride=mixed.stride(0), count=len(segments), slots=len(last), channels=spec.channels,
        kernel=spec.kernel, threads=torch.get_num_threads(),
    )  # fmt: skip
    return out


def _plain(spec: RecurrentSpec, mixed: Tensor, conv: Tensor, last: Tensor, segments: Tensor) -> Tensor:
    """One token at a time, in tensors of the same shapes: torch then computes each alike."""
    out = torch.empty((len(mixed), spec.channels), dtype=mixed.dtype)
    gates, out_gates, x = mixed.split(spec.channels, dim=1)
    for begin, end, source, target in segments.tolist():
        kept = torch.zeros_like(last[0]) if source < 0 else last[source]
        for row in range(begin, end):
            seen = torch.cat((kept, (gates[row] * x[row])[None]))
            out[row] = ((seen.float() * conv).sum(0) * out_gates[row].float()).to(mixed.dtype)
            kept = seen[1:]
        last[target] = kept.clone()
    return out
