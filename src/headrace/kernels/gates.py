"""Gated units in plain torch: what gates, fp32 [T, I], and the numbers that they let through, fp32 [T, I], make
together. In C++ csrc/isa/simd.h has them, in Triton kernels.triton.row_kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

OAI_ALPHA, OAI_LIMIT = 1.702, 7.0
CLAMPED_LIMIT = 10.0


def whole_vectors(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """f of each element of x [..., N] by vectors that are full: torch computes others another way."""
    width = x.shape[-1]
    return f(F.pad(x, (0, -width % 64)))[..., :width]


def _silu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return whole_vectors(partial(F.gelu, approximate="tanh"), gate) * up


def _sigmoid(gate: Tensor, up: Tensor) -> Tensor:
    return gate.sigmoid() * up


def _swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's (transformers' GptOssExperts): gates held to 7 at most, ups to -7 .. 7."""
    gate, up = gate.clamp(max=OAI_LIMIT), up.clamp(-OAI_LIMIT, OAI_LIMIT)
    return (up + 1) * (gate * whole_vectors(torch.sigmoid, OAI_ALPHA * gate))


def _swiglu_clamped(gate: Tensor, up: Tensor) -> Tensor:
    """That of the experts of HY4, DeepSeek-V4 and GLM-5-Next (transformers' HYV4Experts): held to 10 and -10 .. 10."""
    gate, up = gate.clamp(max=CLAMPED_LIMIT), up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)
    return whole_vectors(F.silu, gate) * up


PLAIN: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "sigmoid": _sigmoid,
    "swiglu_oai": _swiglu_oai,
    "swiglu_clamped": _swiglu_clamped,
}
"""By the names that kernels.ops.gated takes."""
