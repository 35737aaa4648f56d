"""Packed products: right against fp64, and the same bits for a row in every company, on every instruction set.

T: rows, K: inputs, N: outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.kernels import cpu, dispatch, ops
from headrace.kernels.extension import VNNI_ISAS

pytestmark = [pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))]

ISAS = cpu.available_isas() if cpu.available() else ()
SHAPES = [
    (256, 640), (704, 256), (1024, 2816), (2816, 1024), (2048, 512), (4096, 512), (3200, 410), (72, 100), (2, 1),
    (1000, 333), (1, 3), (65, 64), (96, 500), (127, 70), (1023, 129),
]  # fmt: skip
ROWS = [1, 2, 3, 4, 5, 6, 7, 16, 17, 130]
COMPANIES = [*range(1, 71), 127, 128, 129, 136, 255, 257, 264]
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture
def threads() -> Iterator[None]:
    """The test sets the number of threads as it likes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tensors(rows: int, inputs: int, outputs: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, inputs], weight [outputs, inputs], bias [outputs]."""
    g = torch.Generator().manual_seed(rows + inputs + seed)
    shapes = [(rows, inputs), (outputs, inputs), (outputs,)]
    x, weight, bias = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    return x, weight, bias


def truth(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The product in fp64, and the sum of the sizes of what it adds up."""
    x, weight = x.double(), weight.double()
    bias = torch.zeros(1).double() if bias is None else bias.double()
    return x @ weight.T + bias, x.abs() @ weight.abs().T + bias.abs()


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_fp64(isa: str, dtype: torch.dtype, inputs: int, outputs: int) -> None:
    every, weight, bias = tensors(max(ROWS), inputs, outputs, dtype)
    packed = cpu.Packed(weight)
    assert packed.pairs == (isa in VNNI_ISAS and dtype == torch.bfloat16 and inputs % 2 == 0)
    want, size = truth(every, weight)
    biased, larger = want + bias.double(), size + bias.double().abs()
    for rows in ROWS:
        x = every[:rows]
        wide = cpu.linear(x, packed, bias, wide=True)
        assert ((wide - biased[:rows]).abs() <= 2e-6 * larger[:rows]).all()
        assert torch.equal(cpu.linear(x, packed, bias), wide.to(dtype))
        assert ((cpu.linear(x, packed, wide=True) - want[:rows]).abs() <= 2e-6 * size[:rows]).all()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_sum_is_off_by_its_roundings_at_most(isa: str, threads: None, data: st.DataObject) -> None:
    """A product and a sum are rounded for each input, and the sum with the bias. One thread or two: the same bits."""
    rows, inputs, outputs = (
        data.draw(st.integers(1, most), name) for most, name in ((40, "T"), (300, "K"), (200, "N"))
    )
    dtype, biased, wide = data.draw(st.sampled_from(DTYPES)), data.draw(st.booleans()), data.draw(st.booleans())
    x, weight, bias = tensors(rows, inputs, outputs, dtype, data.draw(st.integers(0, 99)))
    packed, added = cpu.Packed(weight), bias if biased else None
    torch.set_num_threads(1)
    got = cpu.linear(x, packed, added, wide)
    want, size = truth(x, weight, added)
    narrow = 2**-8 * want.abs() if got.dtype == torch.bfloat16 else 0
    assert ((got - want).abs() <= 1.01 * (inputs + 2) * 2**-24 * size + 1.01 * narrow).all()
    torch.set_num_threads(2)
    assert torch.equal(cpu.linear(x, packed, added, wide), got)


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_company(
    isa: str, dtype: torch.dtype, inputs: int, outputs: int, threads: None, first_caches: tuple[int, ...]
) -> None:
    x, weight, bias = tensors(300, inputs, outputs, dtype)
    packed = cpu.Packed(weight)
    torch.set_num_threads(1)
    whole = cpu.linear(x, packed, bias)
    # Tiles of rows are the same for every shape: of large ones each meets a third of the companies, others than the
    # next. Five threads: some help others, and find nothing left.
    first, step = (SHAPES.index((inputs, outputs)) % 3, 3) if inputs * outputs > 500_000 else (0, 1)
    for count, every in ((1, 1), (2, 7), (5, 13)):
        torch.set_num_threads(count)
        assert torch.equal(cpu.linear(x, packed, bias), whole)
        for turn, rows in enumerate(COMPANIES[first :: every * step]):
            cpu.use_l1(first_caches[turn % len(first_caches)])
            start = rows * 7 % (300 - rows)
            assert torch.equal(cpu.linear(x[start : start + rows], packed, bias), whole[start : start + rows]), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_by_the_thousand(isa: str, dtype: torch.dtype) -> None:
    """Many ranges of rows, the last of them hardly begun."""
    x, weight, bias = tensors(8193, 32, 70, dtype)
    packed = cpu.Packed(weight)
    want = torch.cat([cpu.linear(part, packed, bias) for part in x.split(60)])
    assert torch.equal(cpu.linear(x, packed, bias), want)


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_more_rows_than_are_copied_in_fp32(isa: str, scheme: str | None) -> None:
    x, weight, _ = tensors(514, 32768, 3, torch.bfloat16)
    packed = cpu.Packed(weight) if scheme is None else ops.pack(weight, scheme)
    want = torch.cat([ops.linear(part, packed) for part in x.split([9, 500, 5])])
    assert torch.equal(ops.linear(x, packed), want)


@pytest.mark.parametrize(("inputs", "half"), [(256, 64), (100, 192), (33, 320), (3200, 192)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "swiglu_oai", "swiglu_clamped"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_on_the_way_to_memory(
    isa: str, dtype: torch.dtype, gate: str, biased: bool, inputs: int, half: int, threads: None
) -> None:
    """The bits of the product and of silu_mul and its kin, one after the other."""
    gated = partial(cpu.gated, gate=gate)
    x, weight, bias = tensors(600, inputs, 2 * half, dtype)
    x, weight = x * 2, weight / inputs**0.5  # sums with gates that are neither open nor shut
    added = bias if biased else None
    want = gated(cpu.linear(x, cpu.Packed(weight), added))
    for form, count in ((ops.pack(weight, gated=True), 1), (cpu.Packed(weight, gated=True), 5)):
        assert isinstance(form, cpu.Packed) and form.gated
        torch.set_num_threads(count)
        for rows in (0, 1, 4, 7, 16, 31, 40, 130, 600):
            assert torch.equal(ops.gated_linear(x[:rows], form, added, gate), want[:rows]), rows


def test_gates_that_do_not_fill_blocks() -> None:
    x, weight, _ = tensors(3, 64, 2 * 96, torch.bfloat16)
    form = ops.pack(weight, gated=True)
    assert isinstance(form, cpu.Packed) and not form.gated
    assert torch.equal(ops.gated_linear(x, form), ops.silu_mul(cpu.linear(x, form)))


@pytest.mark.parametrize("rows", [9, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_be_apart(isa: str, dtype: torch.dtype, rows: int) -> None:
    x, weight, _ = tensors(rows, 128, 70, dtype)
    wide_rows = torch.randn(rows, 300).to(dtype)
    wide_rows[:, 40:168] = x
    assert torch.equal(cpu.linear(wide_rows[:, 40:168], cpu.Packed(weight)), cpu.linear(x, cpu.Packed(weight)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(isa: str, dtype: torch.dtype) -> None:
    x, weight, bias = tensors(1, 64, 70, dtype)
    for form in (cpu.Packed(weight), weight):
        assert ops.linear(x[:0], form, bias).shape == (0, 70)


@pytest.mark.parametrize("inputs", [64, 63])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ops_pack_every_matrix(isa: str, dtype: torch.dtype, inputs: int) -> None:
    x, weight, bias = tensors(5, inputs, 48, dtype)
    packed = ops.pack(weight)
    assert isinstance(packed, cpu.Packed)
    torch.testing.assert_close(ops.linear(x, packed, bias), ops.linear(x, weight, bias), rtol=2e-2, atol=2e-2)
    assert ops.linear(x, packed, wide=True).dtype == ops.linear(x, weight, wide=True).dtype == torch.float32


def test_what_is_not_packed() -> None:
    _, weight, bias = tensors(5, 64, 48, torch.float32)
    for other in (bias, weight[:0], weight[:, :0], weight.half(), weight.clone().requires_grad_()):
        assert ops.pack(other) is other
    with dispatch.force("torch"):
        assert ops.pack(weight) is weight


def test_a_form_is_never_read_as_the_other() -> None:
    """Pairs are refused where there are none; what is packed plainly serves every instruction set."""
    x, weight, _ = tensors(5, 64, 48, torch.bfloat16)
    before = cpu.isa()
    try:
        cpu.use_isa("portable")
        plain = cpu.Packed(weight)
        for name in ISAS:
            cpu.use_isa(name)
            want, size = truth(x, weight)
            assert ((cpu.linear(x, plain, wide=True) - want).abs() <= 2e-6 * size).all()
            packed = cpu.Packed(weight)
            cpu.use_isa("portable")
            if packed.pairs:
                with pytest.raises(ValueError, match="packed for another instruction set"):
                    cpu.linear(x, packed)
    finally:
        cpu.use_isa(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_refusals(isa: str, dtype: torch.dtype) -> None:
    x, weight, bias = tensors(5, 64, 48, dtype)
    for bad in (x.double(), x.half(), x[:, :32], x.T, x[0]):
        with pytest.raises(ValueError, match="x must be"):
            cpu.linear(bad, cpu.Packed(weight))
    for vector in (bias[:5], bias.double()):
        with pytest.raises(ValueError, match="bias"):
            cpu.linear(x, cpu.Packed(weight), vector)
