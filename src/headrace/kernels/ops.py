"""Row-wise operations of the decoder: C++ for CPU tensors where the extension exists, Triton for CUDA tensors where
torch would add up in an order of its own, torch otherwise.

T: rows, H: width, I: MLP width, D: head size. Every operation gives a row the same bits whatever other rows ride along
(docs/architecture.md, rule 2). C++ and torch differ in the last bit; `dispatch.force` selects either.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.config import Quantization
from headrace.kernels import cpu, dispatch, quantized
from headrace.kernels.formats import Coded
from headrace.kernels.gates import PLAIN, whole_vectors
from headrace.kernels.records import QKRotary
from headrace.kernels.triton import weights as gpu_weights

SLICE = 32
"""Rows that torch's CPU product always gets: it chooses the order in which it adds up by their number."""

Weight = Tensor | cpu.Packed | quantized.Quantized | quantized.Parts | gpu_weights.GpuWeight
Table = Tensor | cpu.Packed | quantized.Quantized
"""Of rows that are looked up."""


def pack(
    weight: Tensor, quantization: Quantization = "none", gated: bool = False, outputs: int | None = None
) -> Weight:
    """A weight matrix [N, H] in the form that `linear` multiplies by fastest here; maybe the tensor itself.

    Quantised where that is asked for. Without the C++ kernels, and off a GPU, a tensor of the rounded values takes its
    place, in the weight's own type. Raises ValueError for a matrix that cannot be quantised so, for w8a8 where there
    are neither, and for fp8_rowwise off a GPU that multiplies FP8.

    gated: half of the outputs are gates of the others, and `gated_linear` will multiply. outputs: of the whole matrix,
    where this is a tensor rank's share of it.
    """
    gated = gated and weight.shape[0] % (2 * cpu.COLUMNS) == 0
    _refuse_rounded_rows(weight, quantization)
    if quantization != "none":
        rounded = quantized.Rounded(weight, quantization)
        if dispatch.on_gpu(weight):
            return gpu_weights.pack(rounded, weight.device, outputs)
        return quantized.Quantized(rounded, gated) if dispatch.native(weight) else rounded.dequantised(weight.dtype)
    if dispatch.on_gpu(weight):
        from headrace.kernels.triton import products

        return products.prepare(weight)
    return cpu.Packed(weight, gated) if dispatch.native(weight) and cpu.can_pack(weight) else weight


def _refuse_rounded_rows(weight: Tensor, quantization: Quantization) -> None:
    if dispatch.on_gpu(weight):
        return
    if quantization in quantized.GPU_ALONE:
        raise ValueError("quantization fp8_rowwise: only a GPU multiplies FP8; use w8a8")
    if quantization == "w8a8" and not dispatch.native(weight):
        raise ValueError("quantization w8a8 needs the C++ kernels or a GPU, which round rows; use int8")


def pack_stored(parts: Sequence[Tensor | Coded], dtype: torch.dtype, gated: bool = False) -> Weight:
    """A weight whose outputs a file holds in parts, as codes or as numbers, in the form that `linear` multiplies by
    fastest here: codes as they are. Without the C++ kernels a tensor of what they stand for, in `dtype`."""
    if not dispatch.native(torch.empty(0, dtype=dtype)):
        return torch.cat([part.to(dtype) if isinstance(part, Tensor) else part.dequantised(dtype) for part in parts])
    first, *others = parts
    if isinstance(first, Coded) and all(isinstance(other, Coded) and first.alike(other) for other in others):
        whole = first.joined([other for other in others if isinstance(other, Coded)]) if others else first
        return quantized.Quantized(whole, gated and whole.shape[0] % (2 * cpu.COLUMNS) == 0)
    return quantized.Parts(
        [cpu.Packed(part.to(dtype)) if isinstance(part, Tensor) else quantized.Quantized(part) for part in parts]
    )


def pack_table(parts: Sequence[Tensor | Coded]) -> quantized.Quantized:
    """A table of rows that a file holds as codes, all in one part, as `look_up` reads it in C++."""
    (coded,) = parts
    assert isinstance(coded, Coded)
    return quantized.Quantized(coded.of_plain_rows())


def has_rows(weight: Weight) -> TypeGuard[Table]:
    """Whether `look_up` finds the rows of a packed weight."""
    if isinstance(weight, quantized.Quantized):
        return not weight.gated and weight.format.name != "w8a8"
    return isinstance(weight, cpu.Packed) and not weight.gated


def look_up(table: Table, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [T, H] of a table [V, H] by their numbers, whole ones [T]; of codes what they stand for, rounded to `dtype`.
    Raises ValueError or IndexError for a number that is in no table."""
    return F.embedding(index, table) if isinstance(table, Tensor) else cpu.packed_rows(table, index, dtype)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """x [T, H] times weight [N, H] transposed, plus bias [N]: [T, N], the same bits for a row at every T.

    In x's type; `wide` asks for fp32, unrounded where the kernel can.
    """
    if isinstance(weight, cpu.Packed):
        return cpu.linear(x, weight, bias, wide)
    if isinstance(weight, Tensor) and dispatch.on_gpu(x):
        from headrace.kernels.triton import products

        return products.linear(x, weight, bias, wide)
    if isinstance(weight, quantized.Quantized | quantized.Parts):
        return quantized.linear(x, weight, bias, wide)
    if isinstance(weight, gpu_weights.GpuWeight):
        return gpu_weights.linear(x, weight, bias, wide)
    out = _plain_linear(x, weight, bias)
    return out.float() if wide else out


def gated_linear(x: Tensor, weight: Weight, bias: Tensor | None = None, gate: str = "silu") -> Tensor:
    """f(gate) * up for x [T, H] times weight [2 I, H] transposed, plus bias [2 I], = (gate, up) [T, 2 I]: [T, I].

    gate: silu, gelu_tanh, swiglu_oai or swiglu_clamped (kernels.gates).
    """
    if not isinstance(weight, Tensor) and weight.gated:
        if isinstance(weight, cpu.Packed):
            return cpu.linear(x, weight, bias, gate=gate)
        assert isinstance(weight, quantized.Quantized)
        return quantized.linear(x, weight, bias, gate=gate)
    if isinstance(weight, Tensor) and dispatch.on_gpu(x):
        from headrace.kernels.triton import products

        return products.gated_linear(x, weight, bias, gate)
    return gated(linear(x, weight, bias), gate)


def halves_linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """What `gated_linear` puts together, (gate, up) [T, 2 I]: `gated` of it has the same bits, on a CPU."""
    if not isinstance(weight, cpu.Packed | quantized.Quantized) or not weight.gated:
        return linear(x, weight, bias)
    turned = None if bias is None else cpu.in_turn(bias[:, None])[:, 0]
    return cpu.by_halves(linear(x, weight.by_columns(), turned))


def activated_linear(
    x: Tensor, weight: Weight, bias: Tensor | None = None, kind: str = "relu", alphas: Tensor | None = None
) -> Tensor:
    """f of x [T, H] times weight [N, H] transposed, plus bias [N]: [T, N]. kind: relu, relu2, gelu, gelu_tanh, or xielu
    with its alphas."""
    if isinstance(weight, Tensor) and dispatch.on_gpu(x) and kind not in ("relu2", "xielu"):
        from headrace.kernels.triton import products

        return products.activated_linear(x, weight, bias, kind)
    return activated(linear(x, weight, bias), kind, alphas)


def activated(out: Tensor, kind: str, alphas: Tensor | None = None) -> Tensor:
    """f of out [T, N], as `activated_linear` has it."""
    if kind == "xielu":
        assert alphas is not None, "a layer has its own"
        return xielu(out, alphas)
    if kind in ("relu", "relu2"):
        return relu(out) if kind == "relu" else relu2(out)
    return gelu(out, "tanh" if kind == "gelu_tanh" else "none")


def gated(gate_up: Tensor, gate: str) -> Tensor:
    """The halves of gate_up [T, 2 I] = (gate, up) put together as `gated_linear` does, or by the sigmoid: [T, I]."""
    if dispatch.native(gate_up):
        return cpu.gated(gate_up, gate)
    if dispatch.on_gpu(gate_up):
        from headrace.kernels.triton import rows as gpu_rows

        return gpu_rows.gated(gate_up, gate)
    return PLAIN[gate](*gate_up.float().chunk(2, dim=-1)).to(gate_up.dtype)


def outputs_from(weight: Weight, first: int, count: int | None = None) -> Weight | None:
    """The part of a weight whose outputs have the same bits alone as beside the others: so many (None: all) from
    `first` on.

    None where there is no such part: torch's product may add up in another order for another number of outputs.
    """
    if isinstance(weight, Tensor) and dispatch.on_gpu(weight):
        return weight[first:] if count is None else weight[first : first + count]
    if isinstance(weight, Tensor | gpu_weights.GpuWeight):
        return None
    if isinstance(weight, quantized.Parts) and not weight.begins_block(first):
        return None
    return (
        None
        if first % cpu.COLUMNS and isinstance(weight, cpu.Packed | quantized.Quantized)
        else weight.outputs_from(first, count)
    )


def _plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.shape[0]
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    slices = F.pad(x, (0, 0, 0, -rows % SLICE)).split(SLICE)
    return torch.cat([F.linear(part, weight, bias) for part in slices])[:rows]


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Root-mean-square norm over the last dimension, times weight + offset, in fp32: [..., H]."""
    if dispatch.native(x) and weight.dtype == x.dtype:
        return cpu.rms_norm(x, weight, eps, offset)
    if dispatch.on_gpu(x):
        from headrace.kernels.triton import rows as gpu_rows

        return gpu_rows.rms_norm(x, weight, eps, offset)
    factors = weight.float() + offset if offset else weight
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * factors.float()).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Norm to mean 0 and variance 1 over the last dimension, then weight and bias if given, in fp32: [..., H]."""
    if dispatch.native(x) and all(vector is None or vector.dtype == x.dtype for vector in (weight, bias)):
        return cpu.layer_norm(x, weight, bias, eps)
    if dispatch.on_gpu(x):
        from headrace.kernels.triton import rows as gpu_rows

        return gpu_rows.layer_norm(x, weight, bias, eps)
    wide = [None if vector is None else vector.float() for vector in (weight, bias)]
    return F.layer_norm(x.float(), x.shape[-1:], wide[0], wide[1], eps).to(x.dtype)


def add_rms_norm(x: Tensor, part: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """x + part [T, H], rounded, and the `rms_norm` of that."""
    if dispatch.on_gpu(x):
        from headrace.kernels.triton import rows as gpu_rows

        return gpu_rows.add_rms_norm(x, part, weight, eps, offset)
    total = x + part
    return total, rms_norm(total, weight, eps, offset)


def add_layer_norm(
    x: Tensor, part: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """x + part [T, H], rounded, and the `layer_norm` of that."""
    if dispatch.on_gpu(x):
        from headrace.kernels.triton import rows as gpu_rows

        return gpu_rows.add_layer_norm(x, part, weight, bias, eps)
    total = x + part
    return total, layer_norm(total, weight, bias, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2 I] = (gate, up): [T, I]."""
    return gated(gate_up, "silu")


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, in the tanh form, for gate_up [T, 2 I] = (gate, up): [T, I]."""
    return gated(gate_up, "gelu_tanh")


def swiglu_oai_mul(gate_up: Tensor) -> Tensor:
    """gate * sigmoid(1.702 gate) * (up + 1) for gate_up [T, 2 I] = (gate, up), gates held to 7 at most and ups to
    -7 .. 7: [T, I]."""
    return gated(gate_up, "swiglu_oai")


def swiglu_clamped_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2 I] = (gate, up), gates held to 10 at most and ups to -10 .. 10: [T, I]."""
    return gated(gate_up, "swiglu_clamped")


def soft_cap(x: Tensor, scale: float, cap: float | None) -> Tensor:
    """cap * tanh(x * scale / cap) for x fp32 [R, N], or x * scale without a cap. On the CPU maybe in x's memory."""
    if dispatch.native(x) and x.is_contiguous():
        return cpu.soft_cap(x, scale, cap)
    return x * scale if cap is None else whole_vectors(torch.tanh, x * (scale / cap)) * cap


def sigmoid_mul(gate_up: Tensor) -> Tensor:
    """sigmoid(gate) * up for gate_up [T, 2 I] = (gate, up): [T, I]."""
    return gated(gate_up, "sigmoid")


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit, exact or 'tanh', in fp32."""
    if dispatch.native(x):
        return cpu.gelu(x, approximate == "tanh")
    if dispatch.on_gpu(x):
        from headrace.kernels.triton import rows as gpu_rows

        return gpu_rows.activate(x, "gelu_tanh" if approximate == "tanh" else "gelu")
    return whole_vectors(partial(F.gelu, approximate=approximate), x.float()).to(x.dtype)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return cpu.relu(x) if dispatch.native(x) else F.relu(x)


def xielu(x: Tensor, alphas: Tensor) -> Tensor:
    """xIELU (arXiv 2411.13010) of two numbers p and n, fp32 [2]: above 0 p x^2 + x / 2, else
    n (e^x - 1 - x) + x / 2."""
    if dispatch.native(x):
        return cpu.xielu(x, alphas)
    wide, (p, n) = x.float(), alphas
    curved = torch.where(wide > 0, p * wide * wide, (torch.expm1(wide.clamp(max=-1e-6)) - wide) * n)
    return (curved + 0.5 * wide).to(x.dtype)


def relu2(x: Tensor) -> Tensor:
    """max(x, 0) squared."""
    return cpu.relu2(x) if dispatch.native(x) else F.relu(x).square()


def greatest(x: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest element of each row of x [R, N], [R], and where it is first, int64 [R]. NaN is above all."""
    if dispatch.native(x) and x.dtype == torch.float32 and x.is_contiguous():
        return cpu.greatest(x)
    values, indices = x.max(dim=1)
    return values, indices


def softmax_sums(x: Tensor, targets: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of x [R, N], on any device: its greatest element [R], NaN if one is; the sum of e^(x - that), fp64
    [R], void where that is not finite; how many elements are above that of the row's target, int64 [R]. On the CPU."""
    if dispatch.native(x) and x.dtype == torch.float32 and x.is_contiguous():
        return cpu.softmax_sums(x, targets)
    rows = [row.numpy() for row in x.detach().to("cpu", torch.float64)]
    tops = [float(row.max()) for row in rows]
    with np.errstate(invalid="ignore"):
        sums = [float(np.exp(row - top).sum()) for row, top in zip(rows, tops, strict=True)]
    above = [int(np.count_nonzero(row > row[target])) for row, target in zip(rows, targets, strict=True)]
    wide = torch.float64
    return torch.tensor(tops, dtype=wide), torch.tensor(sums, dtype=wide), torch.tensor(above, dtype=torch.int64)


def rotary(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, heads, D] with its first N elements rotated by halves, in fp32: a new tensor.

    cos_sin [T, N] fp32 = (cos, sin), each N/2 wide.
    """
    if dispatch.native(x):
        return cpu.rotary(x, cos_sin)
    turned, kept = x.float().split((cos_sin.shape[-1], x.shape[-1] - cos_sin.shape[-1]), dim=-1)
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    a, b = turned.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, kept), dim=-1).to(x.dtype)


def rotated_heads(heads: Tensor, how: QKRotary) -> tuple[Tensor, Tensor, Tensor]:
    """heads [T, Hq + 2 Hkv, D], as projected -> q [T, Hq, D], k and v [T, Hkv, D], maybe views of `heads`. v is what
    there is behind queries and keys: nothing, [T, 0, D], where values are projected by the keys' weights."""
    if dispatch.on_gpu(heads) and not how.plain:
        from headrace.kernels.triton import rotary as gpu_rotary

        return gpu_rotary.rotate(heads, how)

    def turned(part: Tensor, weight: Tensor | None) -> Tensor:
        part = part if weight is None else rms_norm(part, weight, how.eps, how.offset)
        return part if how.cos_sin is None else rotary(part, how.cos_sin)

    q, k, v = heads.tensor_split((how.heads, how.heads + how.kv_heads), dim=1)
    return turned(q, how.q_norm), turned(k, how.k_norm), v
