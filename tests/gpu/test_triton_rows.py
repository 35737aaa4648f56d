"""Products and norms in Triton: near the truth, and a row's bits whatever other rows ride along."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZES = [(64, 64), (100, 72), (1024, 1536), (2816, 1024), (4096, 512), (1500, 5000)]
"""Inputs and outputs."""
ROWS = [1, 2, 16, 63, 64, 65, 300, 1000]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products(size: tuple[int, int], wide: bool, dtype: torch.dtype) -> None:
    from headrace.kernels.triton import rows as gpu_rows

    inputs, outputs = size
    torch.manual_seed(1)
    x = torch.randn(ROWS[-1], inputs, device="cuda").to(dtype)
    w, bias = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((outputs, inputs), (outputs,)))
    all_rows = gpu_rows.linear(x, w, bias, wide)
    truth = x.double() @ w.double().T + bias.double()
    size_of = x.double().abs() @ w.double().abs().T + bias.double().abs()
    rounding = 2**-8 * truth.abs() if dtype == torch.bfloat16 and not wide else 0.0
    assert ((all_rows.double() - truth).abs() <= 1e-6 * size_of + rounding).all()
    for rows in ROWS:
        for first in (0, ROWS[-1] - rows):
            assert torch.equal(gpu_rows.linear(x[first : first + rows], w, bias, wide), all_rows[first : first + rows])
    assert torch.equal(gpu_rows.linear(x[:0], w, None, wide), all_rows[:0])


def test_products_of_rows_that_lie_apart() -> None:
    from headrace.kernels.triton import rows as gpu_rows

    x, w = torch.randn(20, 3, 128, device="cuda"), torch.randn(64, 128, device="cuda")
    assert torch.equal(gpu_rows.linear(x[:, 1], w, None, False), gpu_rows.linear(x[:, 1].contiguous(), w, None, False))
    assert torch.equal(gpu_rows.linear(x[0].T, w[:, :3].contiguous(), None, False), gpu_rows.linear(
        x[0].T.contiguous(), w[:, :3].contiguous(), None, False))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(300, 1024), (65, 6, 80), (1, 4096), (0, 64)], ids=str)
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from headrace.kernels.triton import rows as gpu_rows

    torch.manual_seed(1)
    x, weight = torch.randn(shape, device="cuda").to(dtype), torch.randn(shape[-1], device="cuda").to(dtype)
    ours = gpu_rows.rms_norm(x, weight, 1e-5)
    wide = x.double()
    truth = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    assert ours.shape == x.shape and ours.dtype == dtype
    assert torch.allclose(ours.double(), truth, rtol=2**-8 if dtype == torch.bfloat16 else 2e-6, atol=1e-6)
    for row in range(0, len(x), 37):
        assert torch.equal(gpu_rows.rms_norm(x[row : row + 1], weight, 1e-5), ours[row : row + 1])
    if x.dim() == 3:
        apart = torch.cat((x, x), dim=1)[:, : x.shape[1]]
        assert torch.equal(gpu_rows.rms_norm(apart, weight, 1e-5), ours)


def test_too_wide() -> None:
    from headrace.kernels.triton import rows as gpu_rows

    with pytest.raises(ValueError, match="at most 65536"):
        gpu_rows.rms_norm(torch.zeros(1, 70_000, device="cuda"), torch.zeros(70_000, device="cuda"), 1e-5)
