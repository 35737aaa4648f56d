"""Quantised products: the rounding within its bounds, right against fp64, the same bits for a row in every company.

T: rows, N: outputs, K: inputs.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.config import Quantization
from headrace.kernels import cpu, dispatch, ops, quantized
from headrace.kernels.quantized import GROUP, Quantized, Rounded

pytestmark = pytest.mark.cpu
needs_extension = pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))

DTYPES = [torch.float32, torch.bfloat16]
SCHEMES: list[Quantization] = ["int8", "int4"]
WITH_ROWS: list[Quantization] = [*SCHEMES, "w8a8"]
"""Those whose products round rows, too."""
KERNEL_ERROR = 2e-6
"""Of the products against fp64, as a share of sum |x w|: fp32 sums over some hundred inputs."""

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
schemes = st.sampled_from(SCHEMES)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def per_input(rounded: Rounded) -> Tensor:
    """The scale [N, K] of every element."""
    return rounded.scales.repeat_interleave(rounded.codes.shape[1] // rounded.scales.shape[1], dim=1)


@given(schemes, st.integers(1, 70), st.integers(1, 5), st.integers(0, 99), st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
@few
def test_rounding_is_at_most_half_a_step(
    scheme: Quantization, outputs: int, groups: int, seed: int, size: float
) -> None:
    """But for codes that were cut off at 7, where it is at most a whole one (and 1/32: scales are bf16)."""
    weight = random(outputs, groups * GROUP, seed=seed) * size
    rounded = Rounded(weight, scheme)
    steps = per_input(rounded).abs().double()
    error = (rounded.dequantised().double() - weight.double()).abs()
    cut = (rounded.codes == 7) if scheme == "int4" else torch.zeros_like(rounded.codes, dtype=torch.bool)
    assert (error <= torch.where(cut, 33 / 32, 0.5) * steps * (1 + 1e-5)).all()
    low, high = (-8, 7) if scheme == "int4" else (-127, 127)
    assert rounded.codes.min() >= low and rounded.codes.max() <= high
    extreme = rounded.codes.view(*rounded.scales.shape, -1).int().abs().amax(-1)
    assert (extreme == (8 if scheme == "int4" else 127)).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_stays_nothing(scheme: Quantization) -> None:
    weight = random(3, 128)
    weight[1] = 0
    weight[2, :64] = 0
    kept = Rounded(weight, scheme).dequantised()
    assert (kept[weight == 0] == 0).all() and kept[0].abs().min(-1).values >= 0 and kept.isfinite().all()


def test_sixteen_codes_lose_less_than_fifteen() -> None:
    """Why the greatest element becomes -8: symmetric codes -7..7 lose an eighth more of a normal weight."""
    weight = random(256, 1024)
    groups = weight.view(256, -1, GROUP)
    step = groups.abs().amax(-1, keepdim=True) / 7
    symmetric = ((groups / step).round() * step).view_as(weight)
    lost = [float((rounded - weight).norm()) for rounded in (Rounded(weight, "int4").dequantised(), symmetric)]
    assert lost[0] < 0.9 * lost[1]
    assert float((Rounded(weight, "int8").dequantised() - weight).norm()) < 0.1 * lost[0]


def reference(x: Tensor, rounded: Rounded, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(x [T, K] times the rounded weight plus bias, the sum of the absolute terms), fp64 [T, N]."""
    weight = rounded.codes.double() * per_input(rounded).double()
    add = torch.zeros(len(weight)).double() if bias is None else bias.double()
    return x.double() @ weight.T + add, x.double().abs() @ weight.abs().T + add.abs()


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", WITH_ROWS)
def test_gates_on_the_way_to_memory(isa: str, dtype: torch.dtype, scheme: Quantization) -> None:
    """The bits of the product and of silu_mul, one after the other."""
    weight, bias = random(2 * 192, 128, seed=1) / 8, random(2 * 192, seed=2, dtype=dtype)
    rounded = Rounded(weight, scheme)
    gated = ops.pack(weight, scheme, gated=True)
    assert isinstance(gated, Quantized) and gated.gated
    for rows in (1, 9, 40, 67, 130, 300):
        x = random(rows, 128, dtype=dtype)
        want = ops.silu_mul(quantized.linear(x, Quantized(rounded), bias))
        assert torch.equal(ops.gated_linear(x, gated, bias), want), rows
        want = ops.silu_mul(quantized.linear(x, Quantized(rounded)))
        assert torch.equal(ops.gated_linear(x, gated), want), rows


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
@given(schemes, st.integers(1, 70), st.integers(1, 200), st.integers(1, 8), st.booleans(), st.integers(0, 99))
@example("int8", 17, 70, 8, True, 0)  # more inputs than are decoded at once
@few
def test_agrees_with_fp64(
    isa: str, dtype: torch.dtype, scheme: Quantization, rows: int, outputs: int, groups: int, biased: bool, seed: int
) -> None:
    # int8 takes any even number of inputs; AMX goes another way where they are a multiple of 32.
    inputs = groups * (46 if scheme == "int8" and seed % 2 else GROUP)
    x, bias = random(rows, inputs, seed=seed, dtype=dtype), random(outputs, seed=seed + 1, dtype=dtype)
    rounded = Rounded(random(outputs, inputs, seed=seed + 2), scheme)
    given_bias = bias if biased else None
    want, size = reference(x, rounded, given_bias)
    wide = quantized.linear(x, Quantized(rounded), given_bias, wide=True)
    assert ((wide - want).abs() <= KERNEL_ERROR * size).all()
    assert torch.equal(quantized.linear(x, Quantized(rounded), given_bias), wide.to(dtype))


@needs_extension
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 1), (192, 70), (704, 130), (1088, 64), (3200, 330)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", WITH_ROWS)
def test_a_row_has_the_same_bits_in_every_company(
    isa: str,
    threads: None,
    first_caches: tuple[int, ...],
    scheme: Quantization,
    dtype: torch.dtype,
    inputs: int,
    outputs: int,
) -> None:
    x, bias = random(300, inputs, dtype=dtype), random(outputs, dtype=dtype, seed=1)
    weight = Quantized(Rounded(random(outputs, inputs, seed=2), scheme))
    whole = quantized.linear(x, weight, bias, wide=True)
    for turn, rows in enumerate([*range(1, 20), 31, 32, 33, 47, 63, 64, 66, 70, 127, 128, 129, 255, 257]):
        cpu.use_l1(first_caches[turn % len(first_caches)])
        start = rows * 7 % (300 - rows)
        some = quantized.linear(x[start : start + rows], weight, bias, wide=True)
        assert torch.equal(some, whole[start : start + rows]), rows


@needs_extension
@pytest.mark.parametrize("inputs", [32, 96, 288])
def test_inputs_that_are_no_whole_group(isa: str, threads: None, inputs: int) -> None:
    """int8 alone has them: 32 zeros more on both sides change nothing."""
    x, weight = random(70, inputs, dtype=torch.bfloat16), random(130, inputs, seed=1)
    more_x, more_weight = (torch.nn.functional.pad(each, (0, 32)) for each in (x, weight))
    packed, want = Quantized(Rounded(weight, "int8")), quantized.linear(more_x, Quantized(Rounded(more_weight, "int8")))
    for rows in (1, 16, 17, 40, 63, 70):
        assert torch.equal(quantized.linear(x[:rows], packed), want[:rows]), rows


@needs_extension
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_may_be_apart(isa: str, scheme: Quantization) -> None:
    wide_rows = random(9, 300, dtype=torch.bfloat16)
    x, weight = wide_rows[:, 40:168], Quantized(Rounded(random(70, 128, seed=1), scheme))
    assert torch.equal(quantized.linear(x, weight), quantized.linear(x.contiguous(), weight))
    assert quantized.linear(x[:0], weight).shape == (0, 70)


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_ops_pack_and_fall_back(scheme: Quantization, dtype: torch.dtype) -> None:
    """Without the kernels a tensor of the same values takes the place of the codes."""
    x, weight, bias = random(5, 128, dtype=dtype), random(70, 128, dtype=dtype), random(70, dtype=dtype)
    packed = ops.pack(weight, scheme)
    assert isinstance(packed, Quantized)
    assert packed.nbytes <= 128 * 128 * {"int8": 1.04, "int4": 0.54}[scheme]
    with dispatch.force("torch"):
        plain = ops.pack(weight, scheme)
        assert dispatch.table()[f"linear_{scheme}"].implementation == "torch"
    assert isinstance(plain, Tensor) and plain.dtype == dtype and not torch.equal(plain, weight)
    assert torch.equal(plain, Rounded(weight, scheme).dequantised(dtype))
    torch.testing.assert_close(ops.linear(x, packed, bias), ops.linear(x, plain, bias), rtol=2e-2, atol=1e-1)
    assert ops.linear(x, packed, wide=True).dtype == torch.float32
    assert dispatch.table()[f"linear_{scheme}"].implementation == "cpu"


@pytest.mark.parametrize(
    ("scheme", "weight", "words"),
    [
        ("int4", torch.ones(8, 96), "multiple of 64.*use int8, w8a8 or none"),
        ("int4", torch.ones(8, 33), "multiple of 64.*use none"),
        ("int8", torch.ones(8, 33), "multiple of 2.*use none"),
        ("int8", torch.ones(8), "takes matrices"),
        ("int8", torch.full((2, 2), float("nan")), "NaN.*use none"),
        ("int4", torch.full((2, 64), float("inf")), "infinities.*use none"),
        ("int5", torch.ones(8, 64), "one of int8, int4"),
    ],
)
def test_weights_that_cannot_be_quantised(scheme: Quantization, weight: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ops.pack(weight, scheme)


@needs_extension
def test_refusals() -> None:
    x, weight = random(5, 64), Quantized(Rounded(random(48, 64), "int8"))
    for bad in (x[:, :32], x.T, x[None]):
        with pytest.raises(ValueError, match="x must be"):
            quantized.linear(bad, weight)
    with pytest.raises(ValueError, match="float16"):
        quantized.linear(x.half(), weight)
    for bias in (random(47), random(48, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="bias"):
            quantized.linear(x, weight, bias)
