"""Triton's interpreter without work that it does anew at each call of a kernel and of each function of a kernel, and
with products that give a row the same bits at every place of every tile, as a GPU's do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def prepare_once() -> None:
    """Puts the interpreter's functions in place of those of Triton's language for good. By itself the interpreter looks
    for them among all members of the language at each call, which takes half of its time."""
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing_to_restore = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda fn: nothing_to_restore
    InterpreterBuilder.create_dot = _dot_by_rows(InterpreterBuilder.create_dot)


def _dot_by_rows(dot: Any) -> Any:
    """tl.dot with an inner product for each element of a sum in fp32. By itself it is numpy's matrix product, in which
    an element's order of sums depends on its place and on the tile's shape where OpenBLAS has AVX2 alone."""

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if d.data.dtype != np.float32:
            return dot(builder, a, b, d, *precision)
        rows, columns = _numbers(a)[..., :, None, :], np.swapaxes(_numbers(b), -1, -2)[..., None, :, :]
        sums = np.vecdot(np.ascontiguousarray(rows), np.ascontiguousarray(columns))
        return TensorHandle(sums + d.data, d.dtype.scalar)

    return create_dot


def _numbers(x: Any) -> Any:
    """In fp32; the interpreter has numbers of 8 bits as their codes."""
    if x.dtype.primitive_bitwidth == 8 and x.dtype.is_floating():
        return interpreter._convert_float(x.data, x.dtype, tl.float16, None).view(np.float16).astype(np.float32)
    return x.data.astype(np.float32, copy=False)
