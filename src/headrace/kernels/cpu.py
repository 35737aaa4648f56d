"""The C++ kernels, checked and called: row-wise operations here, attention in cpu_attention and cpu_states.

T: rows; D: head size; H: width; I: MLP width. bf16 and fp32, CPU tensors only. Every function raises ValueError for
tensors it cannot take, and for an instruction set in HEADRACE_ISA that this machine does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from headrace.kernels.backend import Capabilities, PiecewiseBackend
from headrace.kernels.cpu_attention import append, arrange, attend, layout, partial
from headrace.kernels.cpu_indexer import block_scores, gather, index_scores
from headrace.kernels.cpu_states import empty_running, finish, merge_blocks, merge_into, merge_states, states_of
from headrace.kernels.cpu_step import Step as prepare
from headrace.kernels.extension import (
    TYPES,
    VNNI_ISAS,
    available,
    available_isas,
    describe,
    isa,
    supports,
    unavailable_reason,
    use_isa,
    use_l1,
)
from headrace.kernels.extension import address as _address
from headrace.kernels.extension import check as _check
from headrace.kernels.extension import heads_of as _heads
from headrace.kernels.extension import require as _require
from headrace.kernels.extension import type_of as _type_of
from headrace.kernels.extension import unavailable_reason as missing
from headrace.memory import copied

if TYPE_CHECKING:
    from headrace.kernels import _cpu as native

__all__ = [
    "append", "arrange", "attend", "available", "available_isas", "block_scores", "capabilities", "describe",
    "described", "empty_running", "finish", "gather", "index_scores", "isa", "layout", "merge_blocks", "merge_into",
    "merge_states", "missing", "partial", "prepare", "states_of", "supports", "unavailable_reason", "use_isa",
    "use_l1",
]  # fmt: skip
"""What comes from the other files: callers need to know of one module only. It is a backend (kernels.backend)."""

capabilities = Capabilities(
    name="cpu", kernels="the C++ kernels", spoken_of="they", devices=("cpu",), dtypes=tuple(TYPES), int8=True,
    capped=True, pieces=True, prepared_step=True, all_layers=True, sparse=True, automatic=True,
)  # fmt: skip

OPERATIONS = (
    "rms_norm", "layer_norm", "silu_mul", "gelu_tanh_mul", "swiglu_oai_mul", "swiglu_clamped_mul", "sigmoid_mul",
    "gelu", "relu", "relu2", "xielu", "rotary", "collect_streams", "spread_streams", "gated_delta", "greatest",
    "softmax_sums", "soft_cap",
)  # fmt: skip
"""The row-wise ones."""

COLUMNS = 64
"""Outputs in a block of packed weights."""


def described(device: torch.device) -> str:
    """The kernels in use."""
    return describe()


class Packed:
    """A weight [N, K] as the C++ products read it, of its own type: [ceil(N / 64), K, 64], outputs beyond N zero.

    In bf16 with an even K, [ceil(N / 64), K / 2, 64, 2] where the instruction set in use multiplies pairs: only such
    sets take that form.

    gated: of the outputs, a multiple of 128, the first half are gates of the second, and `linear` gives their product
    (see `silu_mul`). They lie in turn then, see `in_turn`.
    """

    __slots__ = ("blocks", "gated", "shape")

    def __init__(self, weight: Tensor, gated: bool = False) -> None:
        outputs, inputs = weight.shape
        self.shape: tuple[int, int] = (outputs, inputs)
        self.gated = gated
        if gated:
            weight = in_turn(weight)
        padded = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % COLUMNS))
        pairs = has_pairs() and weight.dtype == torch.bfloat16 and inputs % 2 == 0
        cut = padded.view(-1, COLUMNS, inputs // 2, 2) if pairs else padded.view(-1, COLUMNS, inputs)
        self.blocks = copied(cut.transpose(1, 2))

    @property
    def pairs(self) -> bool:
        """Whether inputs lie in pairs."""
        return self.blocks.dim() == 4

    def matrix(self, bias: int) -> native.Matrix:
        """See StoredWeight."""
        ext, (outputs, inputs) = _require(), self.shape
        return ext.Matrix(
            ext.Form.pairs if self.pairs else ext.Form.plain, self.blocks.data_ptr(), 0, bias,
            inputs=inputs, outputs=outputs, gated=self.gated, scaling=no_scaling(), order=0,
        )  # fmt: skip

    def outputs_from(self, first: int, count: int | None = None) -> Packed:
        """So many outputs (None: all) from `first` on, a multiple of 64: a view."""
        tail = object.__new__(Packed)
        tail.shape, tail.gated = (self.shape[0] - first if count is None else count, self.shape[1]), self.gated
        tail.blocks = self.blocks[whole_blocks(first) :]
        return tail

    def by_columns(self) -> Packed:
        """The same outputs, in the order in which they lie, each by itself: a view."""
        plain = object.__new__(Packed)
        plain.shape, plain.gated, plain.blocks = self.shape, False, self.blocks
        return plain

    @property
    def nbytes(self) -> int:
        """Memory of the blocks."""
        return self.blocks.nbytes


def in_turn(weight: Tensor) -> Tensor:
    """weight [2 I, K] with 64 rows of the first half, then 64 of the second, and so on. I is a multiple of 64."""
    halves: Tensor = weight.unflatten(0, (2, -1, COLUMNS))
    return halves.transpose(0, 1).flatten(0, 2)


def by_halves(made: Tensor) -> Tensor:
    """made [T, 2 I], columns as `in_turn` has rows of a weight -> the first half, then the second."""
    halves: Tensor = made.unflatten(1, (-1, 2, COLUMNS))
    return halves.transpose(1, 2).flatten(1)


def whole_blocks(outputs: int) -> int:
    """How many blocks hold so many outputs. Raises ValueError where a block would have others too."""
    if outputs % COLUMNS:
        raise ValueError(f"{outputs} outputs do not fill whole blocks of {COLUMNS}")
    return outputs // COLUMNS


def has_pairs() -> bool:
    """Whether the instruction set in use multiplies bf16 in pairs."""
    return available() and isa() in VNNI_ISAS


def can_pack(weight: Tensor) -> bool:
    """Whether `linear` takes this weight: a matrix on the CPU, of a type that the kernels compute in."""
    return available() and weight.is_cpu and supports(weight.dtype) and weight.dim() == 2 and weight.numel() > 0


def linear(x: Tensor, weight: Packed, bias: Tensor | None = None, wide: bool = False, gate: str = "silu") -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N], fp32 if `wide`. All are of the weight's type.
    With a gated weight [T, N / 2] = gate(first half) * second half, rounded before and after; never wide. gate: silu,
    gelu_tanh, swiglu_oai or swiglu_clamped, see `gated`.

    Raises ValueError for a weight in pairs on an instruction set without them.
    """
    inputs, dtype = weight.shape[1], weight.blocks.dtype
    if x.dtype != dtype or not x.is_cpu or x.dim() != 2 or x.shape[1] != inputs or x.stride(1) != 1:
        raise ValueError(
            f"x must be a CPU tensor [T, {inputs}] of {dtype} with contiguous rows, "
            f"got {list(x.shape)} of {x.dtype} on {x.device}"
        )
    return product(x, weight, bias, wide, gate)


def no_scaling() -> native.Scaling:
    """Of weights that are numbers."""
    ext = _require()
    return ext.Scaling(ext.Number.fp32, ext.Offset.none, subs=ext.Subs.none, block=0, group=0, run=0)


class StoredWeight(Protocol):
    """A weight [N, K] in a form that the C++ products read. gated: `product` gives N / 2 outputs (see Packed)."""

    shape: tuple[int, int]
    gated: bool

    def matrix(self, bias: int) -> native.Matrix:
        """The weight with a bias at that address (0: none), as the extension takes it."""


def product(x: Tensor, weight: StoredWeight, bias: Tensor | None, wide: bool, gate: str = "silu") -> Tensor:
    """x [T, K], checked, times a weight, plus bias: [T, N] (gated: [T, N / 2]), fp32 if `wide`, else as x."""
    outputs, _ = weight.shape
    if bias is not None:
        _check("bias", bias, x.dtype, (outputs,))
    width = outputs // 2 if weight.gated else outputs
    out = torch.empty((x.shape[0], width), dtype=torch.float32 if wide else x.dtype)
    _require().linear(
        _type_of(x), x.data_ptr(), weight.matrix(_address(bias)), out.data_ptr(), rows=x.shape[0],
        x_stride=x.stride(0), wide=wide, gate=getattr(_require().Gate, gate), threads=torch.get_num_threads(),
    )  # fmt: skip
    return out


def packed_rows(weight: StoredWeight, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [T, K] of a weight [N, K], not gated, by their numbers, whole ones [T]. dtype: of the rows; of a weight that
    is no codes its own. Raises ValueError for a number that is no row's."""
    numbers = index.to(torch.int64).contiguous()
    out = torch.empty((len(numbers), weight.shape[1]), dtype=dtype)
    _require().packed_rows(
        _type_of(out), weight.matrix(0), numbers.data_ptr(), out.data_ptr(), rows=len(numbers),
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return out


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """x [..., H] as contiguous rows, with their number and width."""
    width = x.shape[-1]
    return x.contiguous(), x.numel() // width if width else 0, width


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x [..., H] / sqrt(mean(x^2) + eps) * (weight [H] + offset), rounded once."""
    x, rows, width = _rows(x)
    _check("weight", weight, x.dtype, (width,))
    out = torch.empty_like(x)
    _require().rms_norm(
        _type_of(x), x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows=rows, width=width, eps=eps,
        offset=offset, threads=torch.get_num_threads(),
    )  # fmt: skip
    return out


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, rounded once."""
    x, rows, width = _rows(x)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            _check(name, vector, x.dtype, (width,))
    out = torch.empty_like(x)
    _require().layer_norm(
        _type_of(x), x.data_ptr(), _address(weight), _address(bias), out.data_ptr(), rows=rows, width=width, eps=eps,
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return out


def gated(gate_up: Tensor, gate: str) -> Tensor:
    """f(gate) * up for gate_up [..., 2 I] = (gate, up): [..., I]. gate: silu, gelu_tanh, sigmoid, swiglu_oai or
    swiglu_clamped (kernels.gates); with `_mul` behind it the C++ activation's name in csrc/kernels.h."""
    gate_up, rows, width = _rows(gate_up)
    if width % 2:
        raise ValueError(f"gate_up must have an even width, got {width}")
    out = torch.empty((*gate_up.shape[:-1], width // 2), dtype=gate_up.dtype)
    run = getattr(_require(), f"{gate}_mul")
    run(_type_of(gate_up), gate_up.data_ptr(), out.data_ptr(), rows, width // 2, torch.get_num_threads())
    return out


def soft_cap(x: Tensor, scale: float, cap: float | None) -> Tensor:
    """x fp32 becomes cap * tanh(x * scale / cap), or x * scale without a cap: x, in place."""
    _check("x", x, torch.float32, tuple(x.shape))
    _require().soft_cap(x.data_ptr(), x.numel(), scale, cap or 0.0, torch.get_num_threads())
    return x


def gelu(x: Tensor, tanh: bool = False) -> Tensor:
    """x Phi(x), exact or in the tanh form."""
    return _elementwise("gelu_tanh" if tanh else "gelu", x)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return _elementwise("relu", x)


def relu2(x: Tensor) -> Tensor:
    """max(x, 0) squared."""
    return _elementwise("relu2", x)


def xielu(x: Tensor, alphas: Tensor) -> Tensor:
    """See ops.xielu."""
    _check("alphas", alphas, torch.float32, (2,))
    return _elementwise("xielu", x, alphas)


def _elementwise(name: str, x: Tensor, alphas: Tensor | None = None) -> Tensor:
    """A C++ activation that takes each element alone, by its name in csrc/kernels.h."""
    x = x.contiguous()
    out = torch.empty_like(x)
    run, more = getattr(_require(), name), () if alphas is None else (alphas.data_ptr(),)
    run(_type_of(x), x.data_ptr(), out.data_ptr(), 1, x.numel(), torch.get_num_threads(), *more)
    return out


def greatest(x: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest element of each row of x fp32 [R, N], [R], and where it is first, int64 [R]. NaN is above all."""
    rows, width = x.shape
    _check("x", x, torch.float32, (rows, width))
    if not width:
        raise ValueError("rows without elements have no greatest one")
    values, indices = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    _require().greatest(x.data_ptr(), values.data_ptr(), indices.data_ptr(), rows, width, torch.get_num_threads())
    return values, indices


def softmax_sums(x: Tensor, targets: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of x fp32 [R, N]: its greatest element [R], NaN if one is; the sum of e^(x - that), fp64 [R]; how
    many elements are above that of the row's target, int64 [R]. Raises ValueError for targets that do not fit."""
    rows, width = x.shape
    _check("x", x, torch.float32, (rows, width))
    if len(targets) != rows or (rows and not 0 <= min(targets) <= max(targets) < width):
        raise ValueError(f"{rows} rows of {width} need as many targets in them, got {len(targets)}: {targets[:8]}")
    places = torch.tensor(targets, dtype=torch.int64)
    greatest, sums, above = torch.empty(rows), torch.empty(rows, dtype=torch.float64), torch.empty_like(places)
    _require().softmax_sums(
        x.data_ptr(), places.data_ptr(), greatest.data_ptr(), sums.data_ptr(), above.data_ptr(), rows, width,
        torch.get_num_threads(),
    )  # fmt: skip
    return greatest, sums, above


def rotary(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, heads, D] with its first N elements rotated by halves, the others copied, as a new tensor.

    cos_sin [T, N] fp32 = (cos, sin), each N/2 wide; its rows may be parts of longer ones.
    """
    rows, heads, dim, x_stride = _heads("x", x)
    width = cos_sin.shape[-1]
    if width % 2 or width > dim:
        raise ValueError(f"cannot rotate {width} of {dim} elements")
    if cos_sin.stride(-1) != 1:
        raise ValueError(f"cos_sin: each row must be contiguous, got strides {cos_sin.stride()}")
    if not cos_sin.is_cpu or cos_sin.dtype != torch.float32 or cos_sin.shape != (rows, width):
        raise ValueError(
            f"cos_sin must be {[rows, width]} of torch.float32, got {list(cos_sin.shape)} of {cos_sin.dtype}"
        )
    out = torch.empty((rows, heads, dim), dtype=x.dtype)
    _require().rotary(
        _type_of(x), x.data_ptr(), cos_sin.data_ptr(), out.data_ptr(), rows=rows, x_stride=x_stride, heads=heads,
        dim=dim, width=width, turn_stride=cos_sin.stride(0), threads=torch.get_num_threads(),
    )  # fmt: skip
    return out


def exp(x: Tensor) -> Tensor:
    """The kernels' own exp of x fp32, for the test of its accuracy."""
    _check("x", x, torch.float32, tuple(x.shape))
    out = torch.empty_like(x)
    _require().exp(x.data_ptr(), out.data_ptr(), x.numel())
    return out


if TYPE_CHECKING:  # it keeps the contract
    from headrace.kernels import cpu as this_module

    _: PiecewiseBackend = this_module
