"""What lies between projections and attention where attention is latent (models.latent): on a CPU head by head.

T: rows, Hq: query heads, D = rotated + rank: size of the one KV head, whose first numbers are the rotated ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels import experts, ops
from headrace.kernels.layer_shape import Latent


class OfHeads(NamedTuple):
    """What each head multiplies: U transposed, [rank, plain], and W [value, rank] of each; on a GPU the matrix
    [Hq (plain + value), rank] that has U and W of one head after the other, and lists of none."""

    keys: Sequence[ops.Weight]
    values: Sequence[ops.Weight]
    whole: Tensor | None = None


def queries(heads: Tensor, cos_sin: Tensor, spec: Latent, of_heads: OfHeads) -> Tensor:
    """heads [T, Hq, rotated + plain], as projected -> [T, Hq, D]: rotated, and multiplied by what makes keys of
    latents. cos_sin fp32 [T, rotated]."""
    if of_heads.whole is not None:
        from headrace.kernels.triton import latents as gpu_latents

        return gpu_latents.queries(heads, of_heads.whole, spec, cos_sin)
    turned, plain = heads.split((heads.shape[2] - spec.plain, spec.plain), dim=-1)
    if not turned.shape[2]:
        return _by_head(of_heads.keys, plain)
    return torch.cat((ops.rotary(turned.contiguous(), cos_sin), _by_head(of_heads.keys, plain)), dim=-1)


def keys(projected: Tensor, norm: Tensor, cos_sin: Tensor, spec: Latent, on_gpu: bool) -> Tensor:
    """projected [T, D] -> [T, 1, D], which is values as well: the first numbers rotated, the latent behind them normed
    with weights [rank]. cos_sin fp32 [T, rotated]."""
    if on_gpu:
        from headrace.kernels.triton import latents as gpu_latents

        return gpu_latents.keys(projected, norm, spec, cos_sin)
    turned, latent = projected.split((projected.shape[1] - spec.rank, spec.rank), dim=-1)
    latent = ops.rms_norm(latent.contiguous(), norm, spec.norm_eps)
    if not turned.shape[1]:
        return latent[:, None]
    return torch.cat((ops.rotary(turned[:, None].contiguous(), cos_sin), latent[:, None]), dim=-1)


def values(attended: Tensor, spec: Latent, of_heads: OfHeads) -> Tensor:
    """attended [T, Hq, D] -> [T, Hq, value]: what W makes of latents."""
    if of_heads.whole is not None:
        from headrace.kernels.triton import latents as gpu_latents

        return gpu_latents.values(attended, of_heads.whole, spec)
    return _by_head(of_heads.values, attended[..., attended.shape[2] - spec.rank :])


def _by_head(weights: Sequence[ops.Weight], x: Tensor) -> Tensor:
    """x [T, Hq, K], each head times its own matrix [N, K], transposed: [T, Hq, N]."""
    rows, heads, _ = x.shape
    begin = list(accumulate(repeat(rows, heads), initial=0))
    made = experts.linear(x.transpose(0, 1).flatten(0, 1).contiguous(), weights, begin)
    return made.view(heads, rows, made.shape[-1]).transpose(0, 1)
