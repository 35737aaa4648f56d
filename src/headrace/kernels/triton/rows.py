"""Norms and activations on a GPU: a row has the same bits at every number of rows.

T: rows, H: width, I: MLP width. Sums are ours because torch's order may depend on the number of
rows; what is elementwise is ours where that saves a launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.triton import row_kernels
from headrace.kernels.triton.launching import direct
from headrace.kernels.triton.tiles import overlaps

LARGEST_ROW = 1 << 16


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Root-mean-square norm over the last dimension, times weight + offset, in fp32: [..., H], contiguous. ValueError
    for too wide rows."""
    return _normed(x, None, weight, None, eps, offset, rms=True)[1]


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Norm to mean 0 and variance 1 over the last dimension, then weight and bias if given, in fp32: [..., H]."""
    return _normed(x, None, weight, bias, eps, 0.0, rms=False)[1]


def add_rms_norm(x: Tensor, part: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """x + part, [T, H] each, and the norm of that: the bits of one after the other."""
    return _normed(x, part, weight, None, eps, offset, rms=True)


def add_layer_norm(
    x: Tensor, part: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """x + part, [T, H] each, and the norm of that: the bits of one after the other."""
    return _normed(x, part, weight, bias, eps, 0.0, rms=False)


def _normed(
    x: Tensor, part: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, rms: bool
) -> tuple[Tensor, Tensor]:
    """x + part, or x without one, and its norm."""
    width = x.shape[-1]
    if width > LARGEST_ROW:
        raise ValueError(f"rows of at most {LARGEST_ROW} elements are normed on a GPU, got {width}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if part is None else torch.empty_like(out)
    if not x.numel():
        return total, out
    parts = x if x.dim() == 2 or x.dim() == 3 else x.reshape(-1, width)
    heads = 1 if parts.dim() == 2 else parts.shape[1]
    if parts.stride(-1) != 1 or (heads > 1 and parts.stride(1) != width):
        parts = parts.contiguous()
    added = parts if part is None else _aligned(part.contiguous())
    padded = max(16, 1 << (width - 1).bit_length())
    direct(row_kernels.norm)[(len(parts), heads)](
        _aligned(parts), added, total, out if weight is None else weight, out if bias is None else bias, out, width,
        eps, offset, parts.stride(0), heads, P=padded, ADD=part is not None, RMS=rms, WEIGHT=weight is not None,
        BIAS=bias is not None, OVERLAPS=overlaps(x.device), num_warps=min(16, max(1, padded // 512)),
    )  # fmt: skip
    return total, out


def gated(gate_up: Tensor, gate: str) -> Tensor:
    """f(gate) * up for gate_up [T, 2 I] = (gate, up), in fp32: [T, I]. gate: as in ops.gated_linear, or sigmoid."""
    return _activated(gate_up, gate, gate_up.shape[1] // 2, gated=True)


def activate(x: Tensor, kind: str) -> Tensor:
    """f(x) of each element of x [T, I], in fp32. kind: relu, gelu or gelu_tanh."""
    return _activated(x, kind, x.shape[1], gated=False)


def _activated(x: Tensor, kind: str, width: int, gated: bool) -> Tensor:
    rows, block = len(x), 1024
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        x = x if x.stride(1) == 1 else x.contiguous()
        direct(row_kernels.activate)[(rows, -(-width // block))](
            x, out, x.stride(0), width, WIDTH=block, KIND=kind, GATED=gated, OVERLAPS=overlaps(x.device), num_warps=4
        )
    return out


def _aligned(x: Tensor) -> Tensor:
    """x where a compiled kernel may load several elements at once: how it loads decides how it adds up."""
    return x.clone(memory_format=torch.preserve_format) if x.data_ptr() % 16 else x
