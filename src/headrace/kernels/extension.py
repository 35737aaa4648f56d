"""The C++ extension: loaded or why not, its instruction sets, and the checks of tensors that go into it.

The kernels run on threads of their own (csrc/common/threads.cpp), as many as torch has, and results do not
depend on the number.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headrace.kernels._cpu import Extension

TYPES = {torch.bfloat16: 0, torch.float32: 1}
"""The C++ kernels' numbers of the types that they compute in."""
VNNI_ISAS = ("avx512bf16", "amx")
"""Instruction sets that multiply bf16 in pairs: they share a layout of chunks, and states in base 2."""


def _load() -> tuple[Extension | None, str | None]:
    """The extension, or why there is none."""
    try:
        return usable(import_module("headrace.kernels._cpu"))
    except ModuleNotFoundError as error:
        if error.name != "headrace.kernels._cpu":
            raise
        note = Path(__file__).with_name("_unbuilt.txt")
        why = note.read_text().strip() if note.exists() else "install the package to build it"
        return None, f"extension not built: {why}"
    except ImportError as error:
        return None, f"extension does not load: {error}"


def usable(built: Extension) -> tuple[Extension | None, str | None]:
    """The extension, or why it is of no use here: it may have been built for one processor and taken to another."""
    if built.available_isas():
        return built, None
    remedy = "install again here, or with HEADRACE_ISA_BUILD=all"
    return None, f"extension built for {built.built_isas()}, which this processor cannot run; {remedy}"


_ext, _reason = _load()


def available() -> bool:
    """Whether the extension was built and loads."""
    return _ext is not None


def unavailable_reason() -> str | None:
    """Why there is no extension; None where there is one."""
    return _reason


def isa() -> str:
    """The instruction set in use, one of `available_isas`. Raises ValueError if HEADRACE_ISA names another."""
    return require().isa()


def available_isas() -> tuple[str, ...]:
    """Instruction sets that can be used here, from plain to fast."""
    return tuple(require().available_isas().split(", "))


def use_isa(name: str) -> None:
    """Switches the instruction set of this process, for tests."""
    require().use_isa(name)


def use_l1(kilobytes: int) -> None:
    """Takes L1 for one of so many KB (0: of what it is): kernels fetch ahead by it. For tests; no bits change."""
    require().use_l1(kilobytes)


def describe() -> str:
    """The kernels in use, in a few words: 'C++ avx512'."""
    return f"C++ {isa()}"


def supports(dtype: torch.dtype) -> bool:
    """Whether the kernels compute in `dtype`."""
    return dtype in TYPES


def require() -> Extension:
    """The C++ module. Raises ValueError with the reason where there is none."""
    if _ext is None:
        raise ValueError(f"the C++ kernels are not available ({unavailable_reason()})")
    return _ext


def address(x: Tensor | None) -> int:
    """Where a tensor lies, as the extension takes it: 0 for none."""
    return 0 if x is None else x.data_ptr()


def type_of(x: Tensor) -> int:
    if not x.is_cpu:
        raise ValueError(f"the C++ kernels take CPU tensors, got {x.device}")
    kind = TYPES.get(x.dtype)
    if kind is None:
        raise ValueError(f"the C++ kernels take bfloat16 or float32, got {x.dtype}")
    return kind


def check(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless x is a contiguous CPU tensor of this type and shape."""
    if x.dtype != dtype or x.shape != shape or not x.is_cpu or not x.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous CPU tensor {list(shape)} of {dtype}, "
            f"got {list(x.shape)} of {x.dtype} on {x.device} with strides {x.stride()}"
        )


def heads_of(name: str, x: Tensor) -> tuple[int, int, int, int]:
    """(rows, heads, head size, elements from row to row) of x [T, heads, D], whose rows must be contiguous each."""
    if x.dim() != 3:
        raise ValueError(f"{name} must be [rows, heads, head size], got {list(x.shape)}")
    rows, heads, dim = x.shape
    row_stride, head_stride, stride = x.stride()
    if stride != 1 or (head_stride != dim and heads != 1):
        raise ValueError(f"{name}: each row must be contiguous, got strides {x.stride()}")
    return rows, heads, dim, row_stride
