"""The C++ kernels, checked and called: attention over chunks, appending to the pools, row-wise operations.

R, T: rows; Hq, Hkv: query and KV heads; D: head size; H: width; I: MLP width. bf16 and fp32, CPU tensors only.

torch is imported before the extension, because both then share one OpenMP thread pool. The number of threads is
torch's; results do not depend on it. Every function raises ValueError for tensors it cannot take, and for an
instruction set in HEADRACE_ISA that this machine does not have.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.types import CHUNK

_TYPES = {torch.bfloat16: 0, torch.float32: 1}


def _load() -> tuple[Any, str | None]:
    """The extension, or why there is none."""
    try:
        return import_module("headrace.kernels._cpu"), None
    except ModuleNotFoundError as error:
        if error.name != "headrace.kernels._cpu":
            raise
        note = Path(__file__).with_name("_unbuilt.txt")
        why = note.read_text().strip() if note.exists() else "install the package to build it"
        return None, f"extension not built: {why}"
    except ImportError as error:
        return None, f"extension does not load: {error}"


_ext, _reason = _load()


def available() -> bool:
    """Whether the extension was built and loads."""
    return _ext is not None


def unavailable_reason() -> str | None:
    """Why there is no extension; None where there is one."""
    return _reason


def isa() -> str:
    """Instruction set in use: portable, avx2, avx512 or avx512bf16. Raises ValueError if HEADRACE_ISA names another."""
    return str(_require().isa())


def available_isas() -> tuple[str, ...]:
    """Instruction sets that can be used here, from plain to fast."""
    return tuple(_require().available_isas().split(", "))


def use_isa(name: str) -> None:
    """Switches the instruction set of this process, for tests."""
    _require().use_isa(name)


def describe() -> str:
    """The kernels in use, in a few words: 'C++ avx512'."""
    return f"C++ {isa()}" + ("" if _require().openmp else ", one thread (built without GCC's OpenMP)")


def supports(dtype: torch.dtype) -> bool:
    """Whether the kernels compute in `dtype`."""
    return dtype in _TYPES


def _require() -> Any:
    if _ext is None:
        raise ValueError(f"the C++ kernels are not available ({unavailable_reason()})")
    return _ext


def _type_of(x: Tensor) -> int:
    if not x.is_cpu:
        raise ValueError(f"the C++ kernels take CPU tensors, got {x.device}")
    kind = _TYPES.get(x.dtype)
    if kind is None:
        raise ValueError(f"the C++ kernels take bfloat16 or float32, got {x.dtype}")
    return kind


def _check(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless x is a contiguous CPU tensor of this type and shape."""
    if x.dtype != dtype or x.shape != shape or not x.is_cpu or not x.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous CPU tensor {list(shape)} of {dtype}, "
            f"got {list(x.shape)} of {x.dtype} on {x.device} with strides {x.stride()}"
        )


def _heads(name: str, x: Tensor) -> tuple[int, int, int, int]:
    """(rows, heads, head size, elements from row to row) of x [T, heads, D], whose rows must be contiguous each."""
    if x.dim() != 3:
        raise ValueError(f"{name} must be [rows, heads, head size], got {list(x.shape)}")
    rows, heads, dim = x.shape
    row_stride, head_stride, stride = x.stride()
    if stride != 1 or (head_stride != dim and heads != 1):
        raise ValueError(f"{name}: each row must be contiguous, got strides {x.stride()}")
    return rows, heads, dim, row_stride


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    items: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of rows q [R, Hq, D] over the chunks that `items` lists: [R, Hq, D], zeros for rows that see no key.

    k_pool [slots, Hkv, D, 64], v_pool [slots, Hkv, 64, D]. items int32 [n, 4] = (slot, key_start, row_begin, row_end):
    the chunk in `slot` holds the keys at key_start..key_start+63 and is offered to rows row_begin..row_end-1. A row's
    items come in ascending key_start; otherwise any order gives the same bits. A row at position p sees the keys at
    p - window + 1 .. p (no window: 0 .. p). bias [Hq, keys] fp32 is added to the scaled scores by key position.
    """
    rows, heads, dim, q_stride = _heads("q", q)
    if k_pool.dim() != 4 or v_pool.dim() != 4:
        raise ValueError(f"pools must have 4 dimensions, got {list(k_pool.shape)} and {list(v_pool.shape)}")
    slots, kv_heads = k_pool.shape[:2]
    _check("k_pool", k_pool, q.dtype, (slots, kv_heads, dim, CHUNK))
    _check("v_pool", v_pool, q.dtype, (slots, kv_heads, CHUNK, dim))
    _check("items", items, torch.int32, (items.shape[0], 4))
    _check("positions", positions, torch.int64, (rows,))
    if kv_heads == 0 or heads % kv_heads or (window is not None and window < 1):
        raise ValueError(f"cannot attend with {heads} query heads, {kv_heads} KV heads and window {window}")
    bias_at, bias_len = 0, 0
    if bias is not None:
        bias_len = bias.shape[-1]
        _check("bias", bias, torch.float32, (heads, bias_len))
        bias_at = bias.data_ptr()
    out = torch.empty((rows, heads, dim), dtype=q.dtype)
    _require().attend(
        _type_of(q), q.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(), out.data_ptr(), items.data_ptr(),
        positions.data_ptr(), bias_at, rows, q_stride, items.shape[0], heads, kv_heads, dim, slots, window or 0,
        bias_len, scale, torch.get_num_threads(),
    )  # fmt: skip
    return out


def layout(dtype: torch.dtype, dim: int) -> str:
    """How the pools must lie for this type and head size: 'natural' (K [slots, Hkv, D, 64], V [slots, Hkv, 64, D]) or
    'paired' (the two bf16 of a pair side by side: K [slots, Hkv, D/2, 64, 2], V [slots, Hkv, 32, D, 2])."""
    return "paired" if isa() == "avx512bf16" and dtype == torch.bfloat16 and dim % 16 == 0 else "natural"


def arrange(k_pool: Tensor, v_pool: Tensor) -> tuple[Tensor, Tensor]:
    """Natural pools in the layout that the kernels read, in new memory and under the natural shapes."""
    slots, kv_heads, dim, _ = k_pool.shape
    if layout(k_pool.dtype, dim) == "natural":
        return k_pool.clone(), v_pool.clone()
    k = k_pool.view(slots, kv_heads, dim // 2, 2, CHUNK).transpose(3, 4).contiguous()
    v = v_pool.view(slots, kv_heads, CHUNK // 2, 2, dim).transpose(3, 4).contiguous()
    return k.view(k_pool.shape), v.view(v_pool.shape)


def append(k_pool: Tensor, v_pool: Tensor, k_new: Tensor, v_new: Tensor, slots: Tensor, offsets: Tensor) -> None:
    """Writes row t of k_new, v_new [T, Hkv, D] into both pools at key offsets[t] of chunk slots[t] (int32 [T] each)."""
    rows, kv_heads, dim, k_stride = _heads("k_new", k_new)
    v_rows, v_heads, v_dim, v_stride = _heads("v_new", v_new)
    if (v_rows, v_heads, v_dim) != (rows, kv_heads, dim) or v_new.dtype != k_new.dtype:
        raise ValueError(f"k_new and v_new differ: {list(k_new.shape)} and {list(v_new.shape)}, or in type")
    slot_count = k_pool.shape[0]
    _check("k_pool", k_pool, k_new.dtype, (slot_count, kv_heads, dim, CHUNK))
    _check("v_pool", v_pool, k_new.dtype, (slot_count, kv_heads, CHUNK, dim))
    _check("slots", slots, torch.int32, (rows,))
    _check("offsets", offsets, torch.int32, (rows,))
    _require().append(
        _type_of(k_new), k_new.data_ptr(), v_new.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(), slots.data_ptr(),
        offsets.data_ptr(), rows, k_stride, v_stride, kv_heads, dim, slot_count, torch.get_num_threads(),
    )  # fmt: skip


COLUMNS = 64
"""Outputs in a block of packed weights."""


class Packed:
    """A weight [N, K] as the C++ product reads it: bf16 [ceil(N / 64), K / 2, 64, 2], outputs beyond N zero."""

    __slots__ = ("blocks", "shape")

    def __init__(self, weight: Tensor) -> None:
        outputs, inputs = weight.shape
        self.shape = (outputs, inputs)
        padded = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % COLUMNS))
        self.blocks = padded.view(-1, COLUMNS, inputs // 2, 2).transpose(1, 2).contiguous()

    @property
    def nbytes(self) -> int:
        """Memory of the blocks."""
        return self.blocks.nbytes


def has_linear() -> bool:
    """Whether the instruction set in use has products of bf16 pairs."""
    return available() and bool(_require().has_linear())


def can_pack(weight: Tensor) -> bool:
    """Whether `linear` takes this weight [N, K]: bf16 on the CPU, K even, and an instruction set with bf16 products."""
    return (
        has_linear()
        and weight.is_cpu
        and weight.dtype == torch.bfloat16
        and weight.dim() == 2
        and weight.shape[1] % 2 == 0
    )


def linear(x: Tensor, weight: Packed, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """x bf16 [T, K] times weight [N, K] transposed, plus bias bf16 [N]: [T, N], fp32 if `wide`, else in bf16."""
    outputs, inputs = weight.shape
    if x.dtype != torch.bfloat16 or not x.is_cpu or x.dim() != 2 or x.shape[1] != inputs or x.stride(1) != 1:
        raise ValueError(f"x must be a CPU tensor [T, {inputs}] of bfloat16 with contiguous rows, got {list(x.shape)}")
    if bias is not None:
        _check("bias", bias, torch.bfloat16, (outputs,))
    out = torch.empty((x.shape[0], outputs), dtype=torch.float32 if wide else torch.bfloat16)
    _require().linear(
        x.data_ptr(), weight.blocks.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), x.shape[0],
        x.stride(0), inputs, outputs, wide, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """x [..., H] as contiguous rows, with their number and width."""
    width = x.shape[-1]
    return x.contiguous(), x.numel() // width if width else 0, width


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] / sqrt(mean(x^2) + eps) * weight [H], rounded once."""
    x, rows, width = _rows(x)
    _check("weight", weight, x.dtype, (width,))
    out = torch.empty_like(x)
    _require().rms_norm(
        _type_of(x), x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps, torch.get_num_threads()
    )
    return out


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, rounded once."""
    x, rows, width = _rows(x)
    addresses = []
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            _check(name, vector, x.dtype, (width,))
        addresses.append(0 if vector is None else vector.data_ptr())
    out = torch.empty_like(x)
    _require().layer_norm(
        _type_of(x), x.data_ptr(), *addresses, out.data_ptr(), rows, width, eps, torch.get_num_threads()
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2 I] = (gate, up): [..., I]."""
    gate_up, rows, width = _rows(gate_up)
    if width % 2:
        raise ValueError(f"gate_up must have an even width, got {width}")
    out = torch.empty((*gate_up.shape[:-1], width // 2), dtype=gate_up.dtype)
    _require().silu_mul(
        _type_of(gate_up), gate_up.data_ptr(), out.data_ptr(), rows, width // 2, torch.get_num_threads()
    )
    return out


def gelu(x: Tensor, tanh: bool = False) -> Tensor:
    """x Phi(x), exact or in the tanh form."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _require().gelu(_type_of(x), tanh, x.data_ptr(), out.data_ptr(), x.numel(), torch.get_num_threads())
    return out


def rotary(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, heads, D] with its first N elements rotated by halves, the others copied, as a new tensor.

    cos_sin [T, N] fp32 = (cos, sin), each N/2 wide.
    """
    rows, heads, dim, x_stride = _heads("x", x)
    width = cos_sin.shape[-1]
    if width % 2 or width > dim:
        raise ValueError(f"cannot rotate {width} of {dim} elements")
    _check("cos_sin", cos_sin, torch.float32, (rows, width))
    out = torch.empty((rows, heads, dim), dtype=x.dtype)
    _require().rotary(
        _type_of(x), x.data_ptr(), out.data_ptr(), cos_sin.data_ptr(), rows, x_stride, heads, dim, width,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def exp(x: Tensor) -> Tensor:
    """The kernels' own exp of x fp32, for the test of its accuracy."""
    _check("x", x, torch.float32, tuple(x.shape))
    out = torch.empty_like(x)
    _require().exp(x.data_ptr(), out.data_ptr(), x.numel())
    return out
