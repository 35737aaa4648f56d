"""Products and norms in Triton: near the truth, and a row's bits whatever other rows ride along."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZES = [(64, 64), (100, 72), (1024, 1536), (2816, 1024), (4096, 512), (1500, 5000)]
"""Inputs and outputs."""
ROWS = [1, 2, 16, 17, 33, 64, 65, 128, 300, 512, 1100]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products(size: tuple[int, int], wide: bool, dtype: torch.dtype) -> None:
    from headrace.kernels.triton import products

    inputs, outputs = size
    torch.manual_seed(1)
    x = torch.randn(ROWS[-1], inputs, device="cuda").to(dtype)
    w, bias = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((outputs, inputs), (outputs,)))
    for b in (bias, None):
        all_rows = products.linear(x, w, b, wide)
        added = 0.0 if b is None else b.double()
        truth = x.double() @ w.double().T + added
        size_of = x.double().abs() @ w.double().abs().T + abs(added)
        rounding = 2**-8 * truth.abs() if dtype == torch.bfloat16 and not wide else 0.0
        assert ((all_rows.double() - truth).abs() <= 1e-6 * size_of + rounding).all()
        for rows in ROWS:
            for first in (0, ROWS[-1] - rows):
                some = slice(first, first + rows)
                assert torch.equal(products.linear(x[some], w, b, wide), all_rows[some]), (rows, first)
        assert torch.equal(products.linear(x[:0], w, b, wide), all_rows[:0])


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [(100, 144), (1024, 5632), (4096, 1024)], ids=str)
def test_gated_products(size: tuple[int, int], gate: str) -> None:
    """To the bits of a product and what is made of it, in one launch or two."""
    from headrace.kernels.triton import products
    from headrace.kernels.triton import rows as gpu_rows

    x, w = (torch.randn(rows, size[0], device="cuda").bfloat16() for rows in (ROWS[-1], size[1]))
    truth = gpu_rows.gated(products.linear(x, w, None, wide=False), gate)
    for rows in ROWS:
        assert torch.equal(products.gated_linear(x[:rows], w, None, gate), truth[:rows]), rows


@pytest.mark.parametrize("kind", ["relu", "gelu", "gelu_tanh"])
def test_products_with_an_activation(kind: str) -> None:
    from headrace.kernels.triton import products
    from headrace.kernels.triton import rows as gpu_rows

    x, w = (torch.randn(rows, 768, device="cuda").bfloat16() for rows in (ROWS[-1], 3072))
    bias = torch.randn(3072, device="cuda").bfloat16()
    truth = gpu_rows.activate(products.linear(x, w, bias, wide=False), kind)
    for rows in ROWS:
        assert torch.equal(products.activated_linear(x[:rows], w, bias, kind), truth[:rows]), rows


def test_outputs_alone() -> None:
    """The last outputs of a weight, as keys are projected from activations."""
    from headrace.kernels import ops

    x, w = torch.randn(300, 1024, device="cuda").bfloat16(), torch.randn(1536, 1024, device="cuda").bfloat16()
    tail = ops.outputs_from(w, 1024)
    assert tail is not None and torch.equal(ops.linear(x, tail), ops.linear(x, w)[:, 1024:])
    assert torch.equal(ops.linear(x[:3], tail), ops.linear(x, w)[:3, 1024:])


def test_products_of_rows_that_lie_apart() -> None:
    from headrace.kernels.triton.products import linear

    x, w = torch.randn(20, 3, 128, device="cuda"), torch.randn(64, 128, device="cuda")
    assert torch.equal(linear(x[:, 1], w, None, False), linear(x[:, 1].contiguous(), w, None, False))
    narrow = w[:, :3].contiguous()
    assert torch.equal(linear(x[0].T, narrow, None, False), linear(x[0].T.contiguous(), narrow, None, False))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [72, 1024, 5120])
def test_a_sum_and_its_norm(width: int, dtype: torch.dtype) -> None:
    """To the bits of one after the other, and of a row alone, wherever it lies in memory."""
    from headrace.kernels.triton import rows as gpu_rows

    torch.manual_seed(1)
    x, part, (weight, bias) = (
        *torch.randn(2, 300, width, device="cuda").to(dtype),
        torch.randn(2, width, device="cuda").to(dtype),
    )
    off = torch.empty(x.numel() + 1, device="cuda", dtype=dtype)[1:].view_as(x).copy_(x)
    total, normed = gpu_rows.add_rms_norm(x, part, weight, 1e-5, 1.0)
    assert torch.equal(total, x + part) and torch.equal(normed, gpu_rows.rms_norm(total, weight, 1e-5, 1.0))
    for given in (x, off):
        alone = gpu_rows.add_rms_norm(given[7:8], part[7:8], weight, 1e-5, 1.0)
        assert torch.equal(alone[0], total[7:8]) and torch.equal(alone[1], normed[7:8])
    total, normed = gpu_rows.add_layer_norm(x, part, weight, bias, 1e-5)
    assert torch.equal(normed, gpu_rows.layer_norm(total, weight, bias, 1e-5))
    truth = torch.nn.functional.layer_norm(total.double(), (width,), weight.double(), bias.double(), 1e-5)
    assert torch.allclose(normed.double(), truth, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", [(32, 8, 128, 128), (16, 4, 64, 64), (14, 2, 80, 32), (40, 40, 128, 0)], ids=str)
def test_rotation(shape: tuple[int, int, int, int], normed: bool, dtype: torch.dtype) -> None:
    """A stored key is the key that is handed back, projected alone or with the others, to the bit."""
    from headrace.kernels import ops
    from headrace.kernels.records import Pool, QKRotary
    from headrace.kernels.triton import rotary

    torch.manual_seed(1)
    (heads, kv_heads, dim, turned), rows = shape, 200
    projected = torch.randn(rows, heads + 2 * kv_heads, dim, device="cuda").to(dtype)
    norms = torch.randn(2, dim, device="cuda").to(dtype) if normed else (None, None)
    turn = torch.randn(rows, turned, device="cuda") if turned else None
    how = QKRotary(ops.rotated_heads, heads, kv_heads, turn, *norms, eps=1e-5)
    q, k, v = rotary.rotate(projected, how)
    alone = replace(how, heads=0)
    for part in (projected[:, heads:], projected[:, heads:].contiguous()):
        assert torch.equal(rotary.rotate(part, alone)[1], k)
    shapes = ((4, kv_heads, dim, 64), (4, kv_heads, 64, dim))
    pool = Pool(*(torch.zeros(each, device="cuda", dtype=dtype) for each in shapes))
    at = torch.arange(rows, device="cuda", dtype=torch.int32)
    assert torch.equal(rotary.rotate_and_store(projected, how, pool, at // 64, at % 64), q)
    assert torch.equal(pool.k.permute(0, 3, 1, 2).flatten(0, 1)[:rows], k)
    assert torch.equal(pool.v.transpose(1, 2).flatten(0, 1)[:rows], v)
    one = replace(how, cos_sin=None if turn is None else turn[5:6])
    assert torch.equal(rotary.rotate(projected[5:6], one)[0], q[5:6])
    for ours, wide, norm in (
        (q, projected[:, :heads].double(), norms[0]),
        (k, projected[:, heads:-kv_heads].double(), norms[1]),
    ):
        if norm is not None:
            wide = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.double()
        if turn is not None:
            (a, b), (cos, sin) = wide[..., :turned].chunk(2, -1), turn[:, None].double().chunk(2, -1)
            wide = torch.cat((a * cos - b * sin, b * cos + a * sin, wide[..., turned:]), -1)
        assert torch.allclose(
            ours.double(),
            wide,
            rtol=2**-6 if dtype == torch.bfloat16 else 1e-5,
            atol=0.1 if dtype == torch.bfloat16 else 1e-5,
        )


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "swiglu_oai", "swiglu_clamped", "sigmoid"])
def test_gates(gate: str) -> None:
    from headrace.kernels import dispatch, ops
    from headrace.kernels.triton import rows as gpu_rows

    both = 3 * torch.randn(40, 2 * 2816, device="cuda")
    with dispatch.force("torch"):
        truth = ops.gated(both, gate)
    ours = gpu_rows.gated(both, gate)
    assert torch.allclose(ours, truth, rtol=1e-5, atol=1e-5)
    assert torch.equal(gpu_rows.gated(both[3:4], gate), ours[3:4])


def test_too_wide() -> None:
    from headrace.kernels.triton import rows as gpu_rows

    with pytest.raises(ValueError, match="at most 65536"):
        gpu_rows.rms_norm(torch.zeros(1, 70_000, device="cuda"), torch.zeros(70_000, device="cuda"), 1e-5)
