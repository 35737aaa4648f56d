"""Row-wise operations: C++ against torch and fp64, and the same bits for a row in any company.

T: rows, H: width, D: head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.hy_v4.modeling_hy_v4 import HYV4Experts

from headrace.kernels import cpu, dispatch, ops

pytestmark = pytest.mark.cpu
needs_extension = pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))

DTYPES = [torch.float32, torch.bfloat16]
Op = Callable[[Tensor], Tensor]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def of_gpt_oss(x: Tensor) -> Tensor:
    """Gates and ups of x [T, 2 I], as transformers puts them together where they lie in turn."""
    experts: Any = SimpleNamespace(alpha=1.702, limit=7.0)
    return GptOssExperts._apply_gate(experts, x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2))


def of_hy4(x: Tensor) -> Tensor:
    """The same of HY4."""
    return HYV4Experts._apply_gate(SimpleNamespace(swiglu_limit=10.0), x)  # type: ignore[arg-type]


ALPHAS = torch.tensor([0.75, 1.25])


def xielu(x: Tensor) -> Tensor:
    """By its definition."""
    p, n = ALPHAS.to(x.dtype)
    return torch.where(x > 0, p * x * x + 0.5 * x, (torch.expm1(x.clamp(max=-1e-6)) - x) * n + 0.5 * x)


def operations(width: int, dtype: torch.dtype) -> dict[str, tuple[Op, Op]]:
    """Each operation on x [T, H] of this type: (ours, the same in fp64)."""
    weight, bias = random(width, dtype=dtype, seed=1), random(width, dtype=dtype, seed=2)
    w, b = weight.double(), bias.double()
    return {
        "rms_norm": (
            lambda x: ops.rms_norm(x, weight, 1e-5),
            lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * w,
        ),
        "layer_norm": (
            lambda x: ops.layer_norm(x, weight, bias, 1e-5),
            lambda x: F.layer_norm(x, (width,), w, b, 1e-5),
        ),
        "layer_norm plain": (
            lambda x: ops.layer_norm(x, None, None, 1e-5),
            lambda x: F.layer_norm(x, (width,), None, None, 1e-5),
        ),
        "silu_mul": (ops.silu_mul, lambda x: F.silu(x[..., : width // 2]) * x[..., width // 2 :]),
        "rms_norm by 1 + weight": (
            lambda x: ops.rms_norm(x, weight, 1e-5, 1.0),
            lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * (1 + w),
        ),
        "gelu_tanh_mul": (
            ops.gelu_tanh_mul,
            lambda x: F.gelu(x[..., : width // 2], approximate="tanh") * x[..., width // 2 :],
        ),
        "swiglu_oai_mul": (ops.swiglu_oai_mul, of_gpt_oss),
        "swiglu_clamped_mul": (ops.swiglu_clamped_mul, of_hy4),
        "gelu": (ops.gelu, F.gelu),
        "relu": (ops.relu, F.relu),
        "relu2": (ops.relu2, lambda x: F.relu(x).square()),
        "xielu": (partial(ops.xielu, alphas=ALPHAS), xielu),
        "gelu tanh": (partial(ops.gelu, approximate="tanh"), partial(F.gelu, approximate="tanh")),
    }


NAMES = list(operations(2, torch.float32))


def assert_close(ours: Tensor, exact: Tensor) -> None:
    """Within 1e-6 of the truth, relative to 1 or to the value if that is greater; bf16 adds half its ulp."""
    bound = 1e-6 + (2**-8 if ours.dtype == torch.bfloat16 else 0)
    error = (ours.double() - exact).abs() / exact.abs().clamp(min=1)
    assert error.max() <= bound, f"error {float(error.max()):.2e}"


@needs_extension
@pytest.mark.parametrize("cap", [None, 2.0, 30.0])
def test_soft_cap(isa: str, cap: float | None) -> None:
    x = torch.cat((20 * random(7, 330), torch.tensor([[torch.inf, -torch.inf, torch.nan, -0.0] + [0.0] * 326])))
    want = 0.5 * x.double() if cap is None else cap * torch.tanh(0.5 * x.double() / cap)
    with dispatch.force("torch"):
        plain = ops.soft_cap(x, 0.5, cap)
    for ours in (plain, ops.soft_cap(x.clone(), 0.5, cap)):
        torch.testing.assert_close(ours.double(), want, rtol=1e-6, atol=4e-6, equal_nan=True)
    row = ops.soft_cap(x[3:4].clone(), 0.5, cap)
    assert torch.equal(row, ops.soft_cap(x.clone(), 0.5, cap)[3:4]), "a row's bits are its own"


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [6, 64, 90, 640, 4096])
@pytest.mark.parametrize("name", NAMES)
def test_matches_fp64(isa: str, name: str, width: int, dtype: torch.dtype) -> None:
    x = 3 * random(9, width, dtype=dtype)
    ours, exact = operations(width, dtype)[name]
    with dispatch.force("cpu"):
        assert_close(ours(x), exact(x.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_torch_fallback_matches_fp64(name: str, dtype: torch.dtype) -> None:
    x = 3 * random(9, 90, dtype=dtype)
    ours, exact = operations(90, dtype)[name]
    with dispatch.force("torch"):
        assert_close(ours(x), exact(x.double()))


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [6, 90, 256, 4096])
@pytest.mark.parametrize("name", NAMES)
def test_row_alone_has_the_same_bits(isa: str, threads: int, name: str, width: int, dtype: torch.dtype) -> None:
    x = random(70, width, dtype=dtype)
    ours, _ = operations(width, dtype)[name]
    whole = ours(x)
    for begin, end in ((0, 0), (0, 1), (1, 2), (69, 70), (3, 8), (1, 70)):
        assert torch.equal(ours(x[begin:end]), whole[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [6, 90, 256, 4096])
@pytest.mark.parametrize("name", NAMES)
def test_torch_fallback_row_alone_has_the_same_bits(threads: int, name: str, width: int, dtype: torch.dtype) -> None:
    x = random(70, width, dtype=dtype)
    ours, _ = operations(width, dtype)[name]
    with dispatch.force("torch"):
        whole = ours(x)
        for begin, end in ((0, 1), (1, 2), (69, 70), (3, 8), (1, 70)):
            assert torch.equal(ours(x[begin:end]), whole[begin:end])


@needs_extension
def test_norms_take_more_dimensions(isa: str) -> None:
    x, weight = random(5, 3, 64), random(64, seed=1)
    assert torch.equal(ops.rms_norm(x[:, 1:], weight, 1e-6), ops.rms_norm(x, weight, 1e-6)[:, 1:])


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "width"), [(32, 32), (80, 20), (96, 96), (128, 128), (20, 6)])
def test_rotary(isa: str, dtype: torch.dtype, dim: int, width: int) -> None:
    wide = random(9, 6, dim, dtype=dtype)
    x = wide[:, 1:5]  # heads of a fused projection
    angles = 10 * random(9, width // 2, seed=1)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    ours = ops.rotary(x, cos_sin)
    a, b, rest = x.double().split((width // 2, width // 2, dim - width), dim=-1)
    cos, sin = cos_sin.double()[:, None].chunk(2, dim=-1)
    assert_close(ours, torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1))
    assert torch.equal(ours[3:4], ops.rotary(x[3:4], cos_sin[3:4]))
    with dispatch.force("torch"):
        torch.testing.assert_close(
            ops.rotary(x, cos_sin), ours, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
        )


@needs_extension
def test_activations_at_the_ends(isa: str) -> None:
    x = torch.tensor([-math.inf, -1e30, -100.0, -0.0, 0.0, 100.0, 1e30, math.inf, math.nan])
    for approximate in ("none", "tanh"):
        out = ops.gelu(x, approximate)
        assert torch.equal(out[:5].abs(), torch.zeros(5)) and torch.equal(out[5:8], x[5:8]) and out[8].isnan()
    out = ops.silu_mul(torch.cat((x, torch.ones_like(x)))[None])[0]
    assert torch.equal(out[1:5].abs(), torch.zeros(4)) and torch.equal(out[5:8], x[5:8]) and out[8].isnan()


@needs_extension
def test_xielu_near_0_and_at_the_ends(isa: str) -> None:
    """Where e^x - 1 has few digits left of e^x, too."""
    x = -torch.logspace(-7, 1, 4001)
    exact = xielu(x.double())
    with dispatch.force("torch"):
        plain = ops.xielu(x, ALPHAS)
    for ours in (ops.xielu(x, ALPHAS), plain):
        assert float(((ours.double() - exact) / x.double()).abs().max()) < 2e-6
    ends = ops.xielu(torch.tensor([-1e4, -0.0, 0.0, 1e3, math.inf, math.nan]), ALPHAS)
    assert ends[0] == 1.25 * 9999 - 5000 and (ends[1:3] + 1.25e-6).abs().max() < 1e-11 and ends[3] == 750500
    assert ends[4] == math.inf and ends[5].isnan()


@needs_extension
def test_every_bf16(isa: str) -> None:
    """Each passes through fp32 as it is, NaN and subnormal numbers too; halves are rounded like torch's."""
    every = torch.arange(2**15).to(torch.int16).view(torch.bfloat16)
    signalling = every.isnan() & (every.view(torch.int16) & 0x40 == 0)
    torch.testing.assert_close(ops.relu(every)[~signalling].view(torch.int16), every[~signalling].view(torch.int16))
    assert ops.relu(every)[signalling].isnan().all()
    small = every[every.float() < 1e-30]  # their sigmoid is 1/2
    halves = (small.float() / 2).bfloat16()
    assert torch.equal(ops.gelu(small, "tanh").view(torch.int16), halves.view(torch.int16))
    assert torch.equal(ops.gelu(-small, "tanh").view(torch.int16), (-halves).view(torch.int16))


@needs_extension
def test_exp(isa: str) -> None:
    """At most 2 ulp from the truth over all results that are normal; exact at 0; 0 below; NaN stays."""
    x = torch.linspace(-87.3, 88.7, 1_000_001)
    exact = x.double().exp()
    ulp = torch.exp2(exact.log2().floor() - 23)
    assert float(((cpu.exp(x).double() - exact).abs() / ulp).max()) <= 2.0
    ends = torch.tensor([0.0, -0.0, -87.4, -1e4, -1e30, -math.inf, 89.0, 1e30, math.inf, math.nan])
    got = cpu.exp(ends)
    expected = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, math.inf, math.inf, math.inf, math.nan])
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@needs_extension
def test_exp_does_not_depend_on_the_place(isa: str) -> None:
    x = 10 * random(67)
    whole = cpu.exp(x)
    assert all(torch.equal(cpu.exp(x[i : i + 1]), whole[i : i + 1]) for i in range(67))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "outputs"), [(256, 640), (640, 256), (2048, 512), (4096, 512), (1024, 2816), (90, 70), (127, 33)]
)
def test_torch_linear_gives_a_row_the_same_bits(threads: int, width: int, outputs: int, dtype: torch.dtype) -> None:
    """Also what is not packed; 64, 136 and 264 rows are where torch's product was seen to change its order."""
    x, weight = random(300, width, dtype=dtype), random(outputs, width, dtype=dtype, seed=1) / math.sqrt(width)
    whole = ops.linear(x, weight)
    for rows in (*range(1, 71, 1 if threads == 1 else 7), 127, 128, 129, 136, 264, 299):
        assert torch.equal(ops.linear(x[:rows], weight), whole[:rows]), f"{rows} rows"
        assert torch.equal(ops.linear(x[300 - rows :], weight), whole[300 - rows :]), f"the last {rows} rows"


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_linear_gives_a_row_the_same_bits(isa: str, threads: int, dtype: torch.dtype) -> None:
    """More of this: test_kernels_linear.py."""
    x, weight = random(300, 2048, dtype=dtype), ops.pack(random(512, 2048, dtype=dtype, seed=1) / math.sqrt(2048))
    whole = ops.linear(x, weight)
    for rows in (1, 2, 15, 16, 17, 64, 136, 264):
        assert torch.equal(ops.linear(x[300 - rows :], weight), whole[300 - rows :]), f"the last {rows} rows"


def greatest_by_definition(row: list[float]) -> int:
    """The first NaN, else the first of the greatest."""
    return next((i for i, x in enumerate(row) if math.isnan(x)), row.index(max(row)))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_greatest(isa: str, data: st.DataObject) -> None:
    """Wide rows of few values, some of them special, at places where a stretch or a vector ends."""
    width = data.draw(st.sampled_from([1, 2, 15, 16, 17, 1023, 1024, 1025, 2048, 5000]), "width")
    rows = data.draw(st.sampled_from([1, 2, 20]), "rows")
    x = random(rows, width, seed=data.draw(st.integers(0, 99), "seed"))
    if data.draw(st.booleans(), "rounded"):
        x = x.round()
    special = st.sampled_from([math.nan, math.inf, -math.inf, 9.0, 0.0, -0.0])
    places = st.tuples(st.integers(0, rows - 1), st.integers(0, width - 1))
    for place, value in data.draw(st.lists(st.tuples(places, special), max_size=4), "special"):
        x[place] = value
    if data.draw(st.booleans(), "one row lost"):
        x[0] = -math.inf
    expected = [greatest_by_definition(row) for row in x.tolist()]
    for force in ("cpu", "torch"):
        with dispatch.force(force):  # type: ignore[arg-type]
            values, indices = ops.greatest(x)
        assert indices.tolist() == expected
        assert torch.equal(values.nan_to_num(7.5), x[torch.arange(rows), indices].nan_to_num(7.5))


@needs_extension
@pytest.mark.parametrize("place", [0, 1, 1023, 1024, 3000, 4999])
def test_one_nan_is_found_wherever_it_is(isa: str, place: int) -> None:
    x = torch.zeros(1, 5000)
    x[0, 0], x[0, place] = 9.0, math.nan
    values, indices = cpu.greatest(x)
    assert values.isnan().all() and indices.tolist() == [place]


@needs_extension
def test_greatest_on_threads(isa: str, threads: int) -> None:
    x = random(7, 32_000)
    assert cpu.greatest(x)[1].tolist() == x.argmax(dim=1).tolist()


@needs_extension
def test_greatest_of_nothing() -> None:
    assert [each.tolist() for each in cpu.greatest(torch.empty(0, 5))] == [[], []]
    with pytest.raises(ValueError, match="no greatest"):
        cpu.greatest(torch.empty(3, 0))
    with pytest.raises(ValueError, match="x must be"):
        cpu.greatest(torch.empty(4, 3).T)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_softmax_sums(isa: str, data: st.DataObject) -> None:
    """Rows of any width against the definition: one alone has the bits that it has beside others."""
    width = data.draw(st.sampled_from([1, 2, 7, 31, 32, 33, 64, 1000]), "width")
    rows, scale = data.draw(st.sampled_from([1, 3, 9]), "rows"), data.draw(st.sampled_from([0.0, 1.0, 40.0, 900.0]))
    x = random(rows, width, seed=data.draw(st.integers(0, 99), "seed")) * scale
    if data.draw(st.booleans(), "some impossible"):
        x[:, 1::3] = -math.inf
    targets = [data.draw(st.integers(0, width - 1)) for _ in range(rows)]
    wide = x.double()
    top = wide.max(dim=1).values
    for force in ("cpu", "torch"):
        with dispatch.force(force):  # type: ignore[arg-type]
            greatest, sums, above = ops.softmax_sums(x, targets)
            alone = [ops.softmax_sums(x[i : i + 1], targets[i : i + 1])[1] for i in range(rows)]
        assert torch.equal(greatest.double(), top) and torch.equal(torch.cat(alone), sums)
        torch.testing.assert_close(sums, (wide - top[:, None]).exp().sum(1), rtol=1e-13, atol=0)
        assert above.tolist() == [int((row > row[target]).sum()) for row, target in zip(wide, targets, strict=True)]


@needs_extension
@pytest.mark.parametrize("place", [0, 31, 32, 69])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_softmax_sums_tell_a_broken_row(isa: str, place: int, value: float) -> None:
    x = torch.zeros(2, 70)
    x[1, place] = value
    greatest, sums, _ = cpu.softmax_sums(x, [0, 0])
    assert greatest[0] == 0 and sums[0] == 70 and not greatest[1].isfinite()


@needs_extension
def test_softmax_sums_on_threads(isa: str, threads: int) -> None:
    x = random(7, 32_000)
    assert torch.equal(cpu.softmax_sums(x, [5] * 7)[1], torch.cat([cpu.softmax_sums(row[None], [5])[1] for row in x]))


@needs_extension
@pytest.mark.parametrize("targets", [[0], [0, 3], [-1, 0]])
def test_softmax_sums_refuse_targets_that_do_not_fit(targets: list[int]) -> None:
    with pytest.raises(ValueError, match="as many targets"):
        cpu.softmax_sums(torch.zeros(2, 3), targets)
    assert [each.tolist() for each in cpu.softmax_sums(torch.empty(0, 5), [])] == [[], [], []]
