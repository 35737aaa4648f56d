"""Triton's interpreter as the tests have it: an element has the same bits at every place of a tile, as on a GPU."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: kernels are compiled", allow_module_level=True)

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

Numbers = np.ndarray
DRAWS = np.random.default_rng(0)


def dot(a: Numbers, b: Numbers) -> Numbers:
    kinds = {np.dtype(np.float32): tl.float32, np.dtype(np.float16): tl.float16}
    sums = TensorHandle(np.zeros((len(a), b.shape[1]), np.float32), tl.float32)
    handles = (TensorHandle(x, kinds[x.dtype]) for x in (a, b))
    return InterpreterBuilder().create_dot(*handles, sums, "ieee", 0).data


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("inner", [16, 64, 80])
def test_an_element_has_its_bits_at_every_place_of_every_tile(inner: int, kind: type) -> None:
    a, b = DRAWS.standard_normal((64, inner)).astype(kind), DRAWS.standard_normal((inner, 64)).astype(kind)
    whole = dot(a, b)
    assert np.allclose(whole, a.astype(np.float64) @ b.astype(np.float64), atol=1e-4)
    rows, columns = DRAWS.permutation(64), DRAWS.permutation(64)
    assert np.array_equal(dot(a[rows], b[:, columns]), whole[rows][:, columns])
    for height, width in ((16, 64), (64, 16), (16, 16), (32, 128)):
        beside = np.resize(b, (inner, width))
        beside[:, :16] = b[:, 20:36]
        assert np.array_equal(dot(a[48:][:height], beside)[:16, :16], whole[48:64, 20:36][:height])


def test_codes_of_8_bits_are_numbers() -> None:
    a, b = DRAWS.standard_normal((16, 32)).astype(np.float16), DRAWS.standard_normal((32, 16)).astype(np.float16)
    codes = [(x.view(np.uint16) >> 8).astype(np.uint8) for x in (a, b)]  # e5m2 is fp16 without its last 8 bits
    cut = [(x.astype(np.uint16) << 8).view(np.float16) for x in codes]
    sums = TensorHandle(np.zeros((16, 16), np.float32), tl.float32)
    found = InterpreterBuilder().create_dot(*(TensorHandle(x, tl.float8e5) for x in codes), sums, "ieee", 0)
    assert np.array_equal(found.data, dot(*cut))
