"""The Triton kernels of the layers under Triton's interpreter, in fp32: products, norms, activations, rotation, and how
many launches a layer takes. tests/gpu has them compiled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has the same kernels, compiled", allow_module_level=True)

from triton.runtime.interpreter import GridExecutor

from headrace.kernels import dispatch, ops
from headrace.kernels.backend import Attend
from headrace.kernels.records import Pool, QKRotary, StepInputs
from headrace.kernels.triton import agreement, attention, products, rotary, tiles
from headrace.kernels.triton import rows as gpu_rows
from headrace.kernels.triton.tiles import Tile
from headrace.models.decoder import Decoder
from headrace.models.spec import ModelConfig
from tests.support.small_decoders import BIASED, PLAIN, model, weights_of

CPU = torch.device("cpu")
BOUND = 1e-5


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors take the way of those of a GPU."""
    monkeypatch.setattr(dispatch, "native", lambda x: False)
    monkeypatch.setattr(dispatch, "on_gpu", lambda x: True)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(100, 72), (296, 130)], ids=str)
def test_products(size: tuple[int, int], dtype: torch.dtype) -> None:
    """By every kind of tile: each row is one of many, of some and alone."""
    inputs, outputs = size
    w, bias = drawn(outputs, inputs, seed=2).to(dtype), drawn(outputs, seed=3).to(dtype)
    for rows in (0, 1, 20, 40, 65):
        x = drawn(rows, 3, inputs)[:, 1].to(dtype)
        for b, wide in ((None, False), (bias, True)):
            ours = products.linear(x, w, b, wide)
            truth = x.double() @ w.double().T + (0.0 if b is None else b.double())
            assert ours.shape == truth.shape and ours.dtype == (torch.float32 if wide else dtype)
            rounding = 0.0 if ours.dtype == torch.float32 else 2**-10
            near = 1e-6 * (x.double().abs() @ w.double().abs().T + 1.0) + rounding * truth.abs()
            assert ((ours.double() - truth).abs() <= near).all()


def test_tiles_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are taken: few rows by narrow ones, many by large ones where there are enough of them."""
    taken: list[Tile] = []

    def product(tile: Tile, *operands: Any) -> None:
        taken.append(tile)

    monkeypatch.setattr(products, "product", product)
    monkeypatch.setattr(products, "processors", lambda device: 8)
    few, many = products.FEW, products.MANY
    for rows, inputs, dtype, wide, expected in (
        (1, 64, torch.float16, False, few[0]),
        (16, 64, torch.float16, True, few[0]),
        (17, 64, torch.float16, False, few[1]),
        (64, 64, torch.float16, False, few[2]),
        (65, 64, torch.float16, False, many[1]),
        (512, 64, torch.float16, False, many[0]),
        (512, 64, torch.float16, True, many[3]),  # what is wide is not stored by blocks
        (17, 60, torch.float16, False, products.PLAIN[1]),  # rows begin anywhere
        (17, 64, torch.float32, False, products.PLAIN[1]),
        (512, 64, torch.float32, False, products.EXACT),
    ):
        products.linear(torch.zeros(rows, inputs, dtype=dtype), torch.zeros(1024, inputs, dtype=dtype), None, wide)
        assert taken.pop() == expected, (rows, inputs, dtype, wide)
    for rows, outputs, expected in (
        (16, 128, products.NARROW[0]), (32, 128, products.NARROW[1]), (33, 128, few[2]), (16, 129, few[0]),
    ):  # fmt: skip
        products.linear(torch.zeros(rows, 64).half(), torch.zeros(outputs, 64).half(), None, wide=False)
        assert taken.pop() == expected, (rows, outputs)


@pytest.mark.parametrize("tile", products.NARROW, ids=str)
def test_tiles_of_few_outputs(tile: Tile) -> None:
    """Rows, outputs and inputs that no tile divides."""
    x, w = drawn(tile.rows - 3, 264).half(), drawn(40, 264, seed=2).half()
    ours = torch.empty(len(x), len(w), dtype=torch.float16)
    tiles.product(tile, x, w, None, ours)
    assert torch.allclose(ours, (x.float() @ w.float().T).half(), rtol=2e-3, atol=2e-2)


def test_tiles_that_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU whose instructions add up otherwise all rows go by one kind of tile."""
    taken: list[Tile] = []

    def product(tile: Tile, x: Tensor, w: Tensor, bias: None, out: Tensor) -> None:
        taken.append(tile)
        out.zero_()

    monkeypatch.setattr(products, "product", product)
    monkeypatch.setattr(products, "agrees", lambda *way: False)
    w = torch.zeros(32, 64, dtype=torch.float16)
    for rows in (1, 100, 1000):
        x = torch.zeros(rows, 64, dtype=torch.float16)
        products.linear(x, w, None, wide=False)
        products.gated_linear(x[:100], w, None, "silu")
    assert taken == 6 * [products.EXACT]


def test_numbers_of_rows_at_which_cublas_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in which a single element has another bit is none."""

    def mm(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
        out.copy_(torch.nn.functional.linear(x, w.t()))
        out[-1, -1] += len(x) == 24
        return out

    def product(tile: Tile, x: Tensor, w: Tensor, bias: None, out: Tensor) -> None:
        out.copy_(torch.nn.functional.linear(x, w))

    monkeypatch.setattr(agreement, "SIZES", (16, 24, 32))
    monkeypatch.setattr(agreement, "product", product)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "mm", mm)
        assert agreement._compared(16, 64, torch.float64, CPU) == (16, 32)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_gated_products(gate: str) -> None:
    """In one launch or two: what a product and `gated` make."""
    w, bias = drawn(2 * 40, 104, seed=2).half(), drawn(2 * 40, seed=3).half()
    for rows in (0, 1, 20, 65):
        x = 0.1 * drawn(rows, 104).half()
        for b in (None, bias):
            truth = gpu_rows.gated(products.linear(x, w, b, wide=False), gate)
            assert torch.allclose(products.gated_linear(x, w, b, gate), truth, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["relu", "gelu", "gelu_tanh"])
def test_products_with_an_activation(kind: str) -> None:
    w, bias = drawn(40, 100, seed=2).half(), drawn(40, seed=3).half()
    for rows in (0, 1, 65):
        x = 0.1 * drawn(rows, 100).half()
        truth = ops.activated_linear(x, w, bias, kind)
        assert torch.allclose(products.activated_linear(x, w, bias, kind), truth, rtol=2e-3, atol=1e-3)


def test_batches_of_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go to cuBLAS in the numbers at which it agrees, the rest by tiles."""
    asked: list[int] = []

    def mm(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
        asked.append(len(x))
        return out.copy_(x @ w)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(products, "cublas_batches", lambda x, w: (128, 512, 1024))
    x, w = drawn(2700, 8), drawn(12, 8, seed=2)
    ours = products.linear(x, w, None, wide=False)
    assert asked == [1024, 1024, 512]  # 140 rows are left
    assert torch.allclose(ours, x @ w.T, rtol=1e-5, atol=1e-4)
    for rows, taken in ((640, [512, 128]), (128, [128]), (129, []), (64, [])):
        asked.clear()
        products.linear(x[:rows], w, None, wide=False)
        assert asked == taken
    products.linear(x[:512], w, drawn(12), wide=False)
    products.linear(x[:512], w, None, wide=True)
    assert not asked


@pytest.mark.parametrize("shape", [(5, 1024), (7, 6, 80), (0, 64), (3, 100)], ids=str)
def test_norms(shape: tuple[int, ...]) -> None:
    x, weight, bias = drawn(*shape), drawn(shape[-1], seed=2), drawn(shape[-1], seed=3)
    wide = x.double()
    truth = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * (weight.double() + 0.5)
    assert torch.allclose(gpu_rows.rms_norm(x, weight, 1e-5, 0.5).double(), truth, rtol=2e-6, atol=1e-6)
    if x.dim() == 3:
        apart = torch.cat((x, x), dim=1)[:, : x.shape[1]]
        assert torch.allclose(gpu_rows.rms_norm(apart, weight, 1e-5, 0.5).double(), truth, rtol=2e-6, atol=1e-6)
    for vectors in ((weight, bias), (weight, None), (None, None)):
        truth = torch.nn.functional.layer_norm(x, shape[-1:], *vectors, 1e-5)
        assert torch.allclose(gpu_rows.layer_norm(x, *vectors, 1e-5), truth, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_sum_and_its_norm(dtype: torch.dtype) -> None:
    """To the bits of one after the other, also where tensors lie one element off."""
    x, part = drawn(5, 96).to(dtype), drawn(5 * 96 + 1, seed=2).to(dtype)[1:].view(5, 96)
    weight, bias = drawn(96, seed=3).to(dtype), drawn(96, seed=4).to(dtype)
    total, normed = gpu_rows.add_rms_norm(x, part, weight, 1e-5, 1.0)
    assert torch.equal(total, x + part) and torch.equal(normed, gpu_rows.rms_norm(total, weight, 1e-5, 1.0))
    total, normed = gpu_rows.add_layer_norm(x, part, weight, bias, 1e-5)
    assert torch.equal(total, x + part) and torch.equal(normed, gpu_rows.layer_norm(total, weight, bias, 1e-5))


def test_rows_too_wide_for_a_norm() -> None:
    with pytest.raises(ValueError, match="at most 65536"):
        gpu_rows.rms_norm(torch.zeros(1, 70_000), torch.zeros(70_000), 1e-5)


@pytest.mark.parametrize("width", [1, 1500])
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "swiglu_oai", "swiglu_clamped"])
def test_gated(gate: str, width: int) -> None:
    both = 2 * drawn(3, 2 * width + 1)[:, : 2 * width]
    assert torch.allclose(gpu_rows.gated(both, gate), ops.gated(both, gate), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["relu", "gelu", "gelu_tanh"])
def test_activations(kind: str) -> None:
    x = 2 * drawn(3, 1100)
    truth = ops.relu(x) if kind == "relu" else ops.gelu(x, "tanh" if kind == "gelu_tanh" else "none")
    assert torch.allclose(gpu_rows.activate(x, kind), truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "turned"), [(4, 2, 64, 64), (14, 1, 80, 32), (9, 3, 128, 0)])
def test_rotation(heads: int, kv_heads: int, dim: int, turned: int, normed: bool) -> None:
    """Against torch; what is stored is what is handed back, and rows of negative slots are kept nowhere."""
    rows, count = 5, heads + 2 * kv_heads
    projected = drawn(rows, 2 * count, dim)[:, :count]
    norms = (drawn(dim, seed=2), drawn(dim, seed=3)) if normed else (None, None)
    turn = drawn(rows, turned + 6, seed=4)[:, 4 : turned + 4] if turned else None
    how = QKRotary(ops.rotated_heads, heads, kv_heads, turn, *norms, eps=1e-5, offset=1.0)
    q, k, v = rotary.rotate(projected, how)
    for ours, truth in zip((q, k, v), how(projected), strict=True):
        assert torch.allclose(ours, truth, rtol=1e-5, atol=BOUND)
    # Keys alone, as they are made from activations for a restore.
    keys, values = rotary.rotate(projected[:, heads:], replace(how, heads=0))[1:]
    assert torch.equal(keys, k) and torch.equal(values, v)
    pool = Pool(torch.zeros(3, kv_heads, dim, 64), torch.zeros(3, kv_heads, 64, dim))
    slots, offsets = (
        torch.tensor([2, 2, -1, 0, 1], dtype=torch.int32),
        torch.tensor([62, 63, 5, 0, 9], dtype=torch.int32),
    )
    assert torch.equal(rotary.rotate_and_store(projected, how, pool, slots, offsets), q)
    expected = Pool(torch.zeros_like(pool.k), torch.zeros_like(pool.v))
    for row, (slot, offset) in enumerate(zip(slots.tolist(), offsets.tolist(), strict=True)):
        if slot >= 0:
            expected.k[slot, :, :, offset], expected.v[slot, :, offset] = k[row], v[row]
    assert torch.equal(pool.k, expected.k) and torch.equal(pool.v, expected.v)


class Launches(TorchDispatchMode):
    """Counts what a GPU would be asked to run: kernels of Triton's, and operations of torch's that are no views."""

    VIEWS = ("empty", "view", "slice", "split", "select", "t.", "transpose", "unsqueeze", "expand", "alias", "detach")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.").lstrip("_")
        if not name.startswith(self.VIEWS):
            self.names.append(name)
        return func(*args, **kwargs or {})


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of what is launched within the test, of which Triton's kernels do nothing."""
    found = Launches()
    monkeypatch.setattr(GridExecutor, "__call__", lambda grid, *args, **options: found.names.append(grid.fn.__name__))
    with found:
        yield found.names


class StepOfThree(Attend):
    """A TritonStep for three rows, at positions 70, 71 and 5 of two sequences."""

    def __init__(self, config: ModelConfig) -> None:
        spec = config.attention
        self.pool = Pool(drawn(6, spec.kv_heads, spec.head_dim, 64), drawn(6, spec.kv_heads, 64, spec.head_dim))
        items = torch.tensor([[3, 0, 0, 2], [1, 64, 0, 2], [4, 0, 2, 3]], dtype=torch.int32)
        slots, offsets = torch.tensor([1, 1, 4], dtype=torch.int32), torch.tensor([6, 7, 5], dtype=torch.int32)
        inputs = StepInputs(
            {None: items}, torch.tensor([70, 71, 5]), slots, offsets, heads=spec.heads,
            shape=(6, spec.kv_heads, spec.head_dim), dtype=torch.float32, scale=spec.scale,
        )  # fmt: skip
        self.step = attention.TritonStep(inputs, CPU)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        return self.step(self.pool, q, k, v, None)

    def projected(self, layer: int, heads: Tensor, rotary: QKRotary, rows: Tensor | None = None) -> Tensor:
        return self.step.projected(self.pool, heads, rotary, None)


MODELS = {
    "llama": model(),
    "qwen3": model(qk_norm=True),
    "opt": model(**PLAIN | BIASED | dict(activation="relu", rotary=0)),
    "neox": model(**PLAIN | BIASED | dict(block="parallel", mlp_norm=True, rotary=8)),
    "gemma": model(norm_offset=1.0, activation="gelu_tanh"),
}
MORE = {"neox": 1}
"""Launches beyond those of a Llama: a parallel block adds what attention and the MLP make."""


def entered(name: str) -> tuple[Decoder, StepOfThree, Tensor, Tensor | None]:
    """A model in fp32, attention for three rows, and what enters its first layer."""
    config = MODELS[name]
    decoder = Decoder(config, {key: value.float() for key, value in weights_of(config).items()})
    turns = None if decoder.rope is None else decoder.rope.at(torch.tensor([70, 71, 5]), None)
    return decoder, StepOfThree(config), drawn(3, config.hidden_size), turns


@pytest.mark.parametrize("name", MODELS)
def test_launches_of_a_layer(name: str, as_on_a_gpu: None, launches: list[str]) -> None:
    """9, where rows are walked in one round, the merge of their spans among them; a further round is the tenth."""
    decoder, attend, x, turns = entered(name)
    launches.clear()
    decoder.first(1).layers(x, turns, attend)
    first = len(launches)
    decoder.layers(x, turns, attend)
    assert len(launches) - 2 * first == 9 + MORE.get(name, 0), launches


@pytest.mark.parametrize("name", ["qwen3", "neox", "opt"])
def test_a_layer_in_few_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fused is what torch makes of the layer one operation at a time."""
    decoder, attend, x, turns = entered(name)
    with dispatch.force("torch"):
        truth = decoder.first(1).layers(x, turns, attend)
    monkeypatch.setattr(dispatch, "native", lambda x: False)
    monkeypatch.setattr(dispatch, "on_gpu", lambda x: True)
    assert torch.allclose(decoder.first(1).layers(x, turns, attend), truth, rtol=1e-4, atol=1e-4)
