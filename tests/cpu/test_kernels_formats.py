"""Products with weights in the formats of files: right against fp64, the same bits for a row in every company.

T: rows, N: outputs, K: inputs.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.config import Quantization
from headrace.kernels import cpu, dispatch, experts, ops, quantized
from headrace.kernels.formats import FORMATS, Coded
from headrace.kernels.quantized import Parts, Quantized
from tests.support.coded_weights import coded

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason())),
]

DTYPES = [torch.float32, torch.bfloat16]
KERNEL_ERROR = 3e-6
"""Of the products against fp64, as a share of the sum of |x| (|scale q| + |offset|)."""
STORED = {name: form for name, form in FORMATS.items() if name not in get_args(Quantization)} | {
    "W4 bf16": FORMATS["W4 zeros"].grouped(32, "bf16"),
    "W8 fp32": FORMATS["W8"].grouped(64, "fp32"),
    "W4 wide": FORMATS["W4 zeros"].grouped(48, "fp16"),
    "NVFP4": FORMATS["NVFP4"].of_rows(176),
    "NVFP4 long": FORMATS["NVFP4"].of_rows(768),
}

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
formats = pytest.mark.parametrize("name", STORED)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference(x: Tensor, weight: Coded, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(x times the weight plus bias, the sum of the absolute terms), fp64 [T, N]."""
    scales, offsets = weight.scales_and_offsets()
    each = weight.codes.shape[1] // scales.shape[1]
    values = weight.format.codes.values(weight.codes).double() * scales.double().repeat_interleave(each, 1)
    add = torch.zeros_like(values) if offsets is None else offsets.double().repeat_interleave(each, 1)
    if weight.order is not None:
        x = x[:, weight.order.long()]
    more = torch.zeros(len(values)).double() if bias is None else bias.double()
    return x.double() @ (values + add).T + more, x.double().abs() @ (values.abs() + add.abs()).T + more.abs()


@formats
@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(1, 70), st.integers(1, 200), st.integers(1, 7), st.booleans(), st.integers(0, 99))
@few
def test_agrees_with_fp64(
    isa: str, dtype: torch.dtype, name: str, rows: int, outputs: int, blocks: int, biased: bool, seed: int
) -> None:
    weight = coded(STORED[name], outputs, blocks, seed)
    x, bias = random(rows, weight.shape[1], seed=seed, dtype=dtype), random(outputs, seed=seed + 1, dtype=dtype)
    given_bias = bias if biased else None
    want, size = reference(x, weight, given_bias)
    wide = quantized.linear(x, Quantized(weight), given_bias, wide=True)
    assert ((wide - want).abs() <= KERNEL_ERROR * size).all()
    assert torch.equal(quantized.linear(x, Quantized(weight), given_bias), wide.to(dtype))


@formats
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_company(
    isa: str, threads: None, first_caches: tuple[int, ...], name: str, dtype: torch.dtype
) -> None:
    form = STORED[name]
    made = coded(form, 330, -(-700 // form.block))
    x, bias, weight = random(300, made.shape[1], dtype=dtype), random(330, dtype=dtype, seed=1), Quantized(made)
    whole = quantized.linear(x, weight, bias, wide=True)
    for turn, rows in enumerate([*range(1, 20), 31, 32, 33, 63, 64, 66, 127, 129, 257]):
        cpu.use_l1(first_caches[turn % len(first_caches)])
        start = rows * 7 % (300 - rows)
        assert torch.equal(quantized.linear(x[start : start + rows], weight, bias, wide=True), whole[start:][:rows]), (
            rows
        )


@formats
def test_numbers_next_to_zero_have_the_same_bits_in_every_company(isa: str, name: str) -> None:
    """Inputs and products below 2^-126, which instructions of bf16 take as 0: in a row alone as among others."""
    form = STORED[name]
    weight = Quantized(coded(form, 130, -(-300 // form.block)))
    tiny = torch.exp2(random(70, weight.shape[1]) * 4 - 126)
    x = (tiny * random(70, weight.shape[1], seed=1).sign()).bfloat16()
    x[::3, ::5] = -0.0
    whole = quantized.linear(x, weight, wide=True)
    for rows in (1, 2, 17, 64):
        for start in range(0, 70 - rows + 1, 5):
            part = quantized.linear(x[start : start + rows], weight, wide=True)
            assert torch.equal(part.view(torch.int32), whole[start : start + rows].view(torch.int32)), (rows, start)


@formats
def test_memory_is_what_the_format_says(name: str) -> None:
    """And codes stay what they are: nothing is kept beside them."""
    form = STORED[name]
    weight = Quantized(coded(form, 128, 4))
    assert weight.nbytes * 8 == form.bits * 128 * 4 * form.block


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_in_another_order(isa: str, dtype: torch.dtype) -> None:
    """The product of x whose inputs were put in that order."""
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3)).int()
    plain = coded(FORMATS["W4 zeros"], 70, 2)
    weight = coded(FORMATS["W4 zeros"], 70, 2, order=order)
    for rows in (1, 5, 70):
        x = random(rows, 256, dtype=dtype)
        want = quantized.linear(x[:, order.long()].contiguous(), Quantized(plain))
        assert torch.equal(quantized.linear(x, Quantized(weight)), want)
    torch.testing.assert_close(weight.dequantised()[:, order.long()], plain.dequantised(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_in_several_formats(isa: str, dtype: torch.dtype) -> None:
    """Each part's bits are those it has alone; a tail of outputs may begin in any of them."""
    parts = [coded(FORMATS["Q4_K"], 128, 1), random(64, 256, dtype=dtype), coded(FORMATS["Q6_K"], 70, 1, seed=1)]
    whole, bias = ops.pack_stored(parts, dtype), random(262, dtype=dtype)
    assert isinstance(whole, Parts) and whole.shape == (262, 256)
    for rows in (1, 5, 40):
        x = random(rows, 256, dtype=dtype)
        want = torch.cat([
            ops.linear(x, ops.pack_stored([part], dtype), some)
            for part, some in zip(parts, bias.split([128, 64, 70]), strict=True)
        ], dim=1)  # fmt: skip
        assert torch.equal(ops.linear(x, whole, bias), want)
        for first in (0, 64, 128, 192):
            tail = ops.outputs_from(whole, first)
            assert tail is not None and torch.equal(ops.linear(x, tail, bias[first:]), want[:, first:])
            some = ops.outputs_from(whole, first, 60)
            assert some is not None and torch.equal(ops.linear(x, some), ops.linear(x, tail)[:, :60])
        across = ops.outputs_from(whole, 64, 110)
        assert across is not None and torch.equal(ops.linear(x, across, bias[64:174]), want[:, 64:174])
    assert ops.outputs_from(whole, 100) is None


@formats
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_have_the_bits_of_products_one_by_one(isa: str, dtype: torch.dtype, name: str) -> None:
    form = STORED[name]
    blocks = -(-200 // form.block)
    order = torch.randperm(blocks * form.block, generator=torch.Generator().manual_seed(3)).int()
    orders = {"none": [None] * 4, "one": [order] * 4, "each its own": [order.roll(e) for e in range(4)]}
    for told, each in orders.items():
        weights = [Quantized(coded(form, 70, blocks, seed=e, order=own)) for e, own in enumerate(each)]
        groups_are_single_products(random(155, weights[0].shape[1], dtype=dtype), weights, [0, 1, 1, 150, 155], told)


def groups_are_single_products(x: Tensor, weights: list[Any], begin: list[int], told: str = "") -> None:
    got = experts.linear(x, weights, begin)
    for e, weight in enumerate(weights):
        rows = slice(begin[e], begin[e + 1])
        assert torch.equal(got[rows], ops.linear(x[rows], weight)), (told, e)


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_in_several_formats(isa: str, dtype: torch.dtype) -> None:
    """Whole weights, others in parts, one in an order of its own, and numbers."""
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3)).int()
    first, second = coded(FORMATS["Q4_K"], 64, 1), coded(FORMATS["Q6_K"], 70, 1, seed=1)
    weights = [
        ops.pack_stored(parts, dtype)
        for parts in (
            [coded(FORMATS["Q4_K"], 134, 1)], [first, second], [coded(FORMATS["Q5_K"], 134, 1)],
            [coded(FORMATS["Q4_K"], 134, 1, order=order)], [first, random(70, 256, dtype=dtype)],
            [coded(FORMATS["Q4_K"], 134, 1, seed=2)], [random(134, 256, dtype=dtype)], [second, first],
        )
    ]  # fmt: skip
    assert [isinstance(weight, Parts) for weight in weights] == [False, True, False, False, True, False, True, True]
    for begin in ([0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 3, 3, 100, 100, 171, 172, 180, 181]):
        groups_are_single_products(random(begin[-1], 256, dtype=dtype), weights, begin)


def test_groups_of_other_shapes_are_refused() -> None:
    sizes = ((128, False), (64, False), (128, True))
    first, more, gated = (Quantized(coded(FORMATS["Q4_K"], outputs, 1), gated) for outputs, gated in sizes)
    for each in (more, gated):
        with pytest.raises(ValueError, match="differ in their shape"):
            experts.linear(random(4, 256), [first, each], [0, 2, 4])


def test_parts_alike_are_one_weight() -> None:
    parts = [coded(FORMATS["Q4_K"], 96, 1), coded(FORMATS["Q4_K"], 32, 1, seed=1)]
    whole = ops.pack_stored(parts, torch.bfloat16, gated=True)
    assert isinstance(whole, Quantized) and whole.gated and whole.shape == (128, 256)
    with dispatch.force("torch"):
        plain = ops.pack_stored(parts, torch.float32)
    assert isinstance(plain, Tensor) and torch.equal(plain, torch.cat([part.dequantised() for part in parts]))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(scales=torch.ones(4, 2).half()), "scales"),
        (dict(scales=torch.full((4, 1), float("nan")).half()), "NaN or infinity"),
        (dict(codes=torch.zeros(4, 200, dtype=torch.int8)), "multiples of 256"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Tensor], words: str) -> None:
    sound = coded(FORMATS["Q4_K"], 4, 1)
    given = {name: getattr(sound, name) for name in ("codes", "scales", "subs", "minima", "smalls")} | changed
    with pytest.raises(ValueError, match=words):
        Coded(FORMATS["Q4_K"], **given)
