"""Packed products: right against fp64, and the same bits for a row in every company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from headrace.kernels import cpu, ops

pytestmark = [pytest.mark.skipif(not cpu.has_linear(), reason="this processor has no AVX-512 BF16")]

SHAPES = [(256, 640), (704, 256), (1024, 2816), (2816, 1024), (4096, 512), (72, 100), (2, 1), (1000, 333)]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def tensors(rows: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, inputs], weight [outputs, inputs], bias [outputs] in bf16."""
    g = torch.Generator().manual_seed(rows + inputs)
    shapes = [(rows, inputs), (outputs, inputs), (outputs,)]
    x, weight, bias = (torch.randn(shape, generator=g).bfloat16() for shape in shapes)
    return x, weight, bias


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 16, 17, 130])
def test_agrees_with_fp64(rows: int, inputs: int, outputs: int) -> None:
    x, weight, bias = tensors(rows, inputs, outputs)
    want = x.double() @ weight.double().T + bias.double()
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    wide = cpu.linear(x, cpu.Packed(weight), bias, wide=True)
    assert ((wide - want).abs() <= 2e-6 * size).all()
    assert torch.equal(cpu.linear(x, cpu.Packed(weight), bias), wide.bfloat16())
    plain = cpu.linear(x, cpu.Packed(weight), wide=True)
    assert ((plain - (want - bias.double())).abs() <= 2e-6 * size).all()


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_row_has_the_same_bits_in_every_company(inputs: int, outputs: int, threads: None) -> None:
    x, weight, bias = tensors(300, inputs, outputs)
    packed = cpu.Packed(weight)
    whole = cpu.linear(x, packed, bias)
    for rows in [*range(1, 71), 127, 128, 129, 255, 257]:
        start = rows * 7 % (300 - rows)
        assert torch.equal(cpu.linear(x[start : start + rows], packed, bias), whole[start : start + rows]), rows


def test_rows_may_be_apart() -> None:
    x, weight, _ = tensors(9, 128, 70)
    wide_rows = torch.randn(9, 300).bfloat16()
    wide_rows[:, 40:168] = x
    assert torch.equal(cpu.linear(wide_rows[:, 40:168], cpu.Packed(weight)), cpu.linear(x, cpu.Packed(weight)))


def test_ops_pack_what_can_be_packed() -> None:
    x, weight, bias = tensors(5, 64, 48)
    packed = ops.pack(weight)
    assert isinstance(packed, cpu.Packed)
    torch.testing.assert_close(ops.linear(x, packed, bias), ops.linear(x, weight, bias), rtol=2e-2, atol=2e-2)
    assert ops.linear(x, packed, wide=True).dtype == ops.linear(x, weight, wide=True).dtype == torch.float32
    for odd in (weight.float(), weight[:, :63].contiguous()):
        assert ops.pack(odd) is odd


def test_refusals() -> None:
    x, weight, bias = tensors(5, 64, 48)
    for bad in (x.float(), x[:, :32], x.T):
        with pytest.raises(ValueError, match="x must be"):
            cpu.linear(bad, cpu.Packed(weight))
    with pytest.raises(ValueError, match="bias"):
        cpu.linear(x, cpu.Packed(weight), bias[:5])
