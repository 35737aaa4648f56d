"""The Triton kernels of latent attention under Triton's interpreter, in fp32 and fp16: attention over pools that hold a
latent once, in pieces too, and what lies between projections and attention. tests/gpu has them compiled."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has the same kernels, compiled", allow_module_level=True)

from headrace import device
from headrace.config import AttentionSpec
from headrace.kernels import latents, reference
from headrace.kernels.backend import in_pieces
from headrace.kernels.records import Mask, Pool
from headrace.kernels.triton import attention, backend, latent_row_kernels, layer_check, limits, walk_options
from headrace.kernels.triton import latents as gpu_latents
from headrace.kernels.triton.heads import Heads
from headrace.kernels.triton.launching import DirectKernel
from headrace.kernels.triton.walk_options import heads_of, latent_chosen, latent_parts
from headrace.memory import zeros
from headrace.models.layer_parts import LatentSpec
from headrace.types import CHUNK
from tests.support.attention_testbed import PoolTestbed, ends
from tests.support.fake_device import FakeDevice
from tests.support.small_gpu_engines import force

CPU = torch.device("cpu")
SHARES = [(0, 584), (576, 1028), (576, 580)]
"""The second goes into a third span, the others part from it within the second: its tasks are resumed."""
SHAPES = [(3, 1, 40), (5, 1, 24), (70, 1, 64)]
"""Query heads, one KV head and its size: 32 and 8 numbers, 16 and 8, 32 and 32; of the last a task has some heads."""
SPECS = [LatentSpec(rank=24, rotated=8, plain=12, value=20), LatentSpec(rank=40, rotated=16, plain=72, value=8)]


@pytest.mark.parametrize("way", ["flash", "split"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape: tuple[int, int, int], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody has written is NaN, and counts as nothing. Rows of a sequence are alone, or several."""
    force(way, monkeypatch)
    shares = SHARES if shape[0] < 70 else SHARES[:1]
    testbed = PoolTestbed(shares, shape, torch.float32, apart=False, once=True)
    for count in (1, 3) if shape[0] < 5 else (1,):
        rows = ends(testbed, count)
        truths = testbed.attend(rows, reference, "cpu")
        for ours, truth in zip(testbed.attend(rows, backend, "cpu"), truths, strict=True):
            assert (ours - truth).abs().max() < 1e-5


@pytest.mark.parametrize("major", [8, pytest.param(10, marks=pytest.mark.matrix)])
def test_tasks_of_other_gpus(major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By device: lanes, and the columns of the values that are taken together, of which there are several parts."""
    monkeypatch.setattr(walk_options, "_major", lambda device: major)
    monkeypatch.setattr(walk_options, "UNROLLED_COLUMNS", 32)
    walk_options.walk_options.cache_clear()
    walk_options.flash_options.cache_clear()
    variant = layer_check.Variant(heads_of((3, 1, 96), True, CPU), torch.float32, torch.float32, None, None, False, 0.1)
    assert variant.heads.lanes == (32 if major == 8 else 64) and variant.features == ["latents of 96"]
    monkeypatch.setattr(layer_check, "SEQUENCES", ((1, 90), (1, 530)))
    found = dict(layer_check.differences(variant, CPU))
    assert found.keys() == {"split, portable kernels", "flash, portable kernels"}
    assert all(0 < difference < 1e-5 for difference in found.values())
    walk_options.walk_options.cache_clear()
    walk_options.flash_options.cache_clear()


def test_both_ways_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    testbed, found = PoolTestbed([(0, 1100)], (2, 1, 40), torch.float16, apart=False, once=True), []
    for way in ("flash", "split"):
        with monkeypatch.context() as patch:
            force(way, patch)
            found += testbed.attend(ends(testbed), backend, "cpu")
    assert torch.equal(*found)


@pytest.mark.matrix
def test_merging_on_gives_the_bits_of_one_call() -> None:
    """States that are gone on with inside a span and behind one."""
    testbed = PoolTestbed([(0, 580)], (2, 1, 40), torch.float32, apart=False, once=True)
    q, keys = testbed.tokens[0][0][-1:], torch.arange(0, 640, CHUNK, dtype=torch.int32)
    every = torch.stack([torch.from_numpy(testbed.tables[0]), keys, torch.zeros_like(keys), torch.ones_like(keys)], 1)
    pool, kernels = Pool.of([testbed.v], once=True), in_pieces(backend)
    with device.use(FakeDevice()):
        state = None
        for part in every.split([3, 5, 2]):
            state = kernels.partial(q, pool, Mask(part.contiguous(), torch.tensor([579]), scale=0.2), state)
        assert state is not None
        ours = kernels.finish(state, torch.float32)
    truth = attention.attend(q, pool, Mask(every.contiguous(), torch.tensor([579]), scale=0.2))
    assert torch.equal(ours, truth)


class Drawn:
    """What a layer's projections and matrices would be, of T rows."""

    def __init__(self, spec: LatentSpec, rows: int, dtype: torch.dtype) -> None:
        g, heads, width = torch.Generator().manual_seed(rows), 3, spec.plain + spec.value

        def numbers(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g).to(dtype)

        self.spec, self.cos_sin = spec, torch.randn(rows, spec.rotated, generator=g)
        self.heads, self.projected = numbers(rows, heads, spec.query), numbers(rows, spec.rotated + spec.rank)
        self.attended, self.norm = numbers(rows, heads, spec.rotated + spec.rank), numbers(spec.rank)
        self.matrix = numbers(heads * width, spec.rank) / 8
        parts = [rows.split((spec.plain, spec.value)) for rows in self.matrix.split(width)]
        self.of_heads = latents.OfHeads([keys.t().contiguous() for keys, _ in parts], [each for _, each in parts])

    def on_gpu(self, rows: slice = slice(None)) -> list[Tensor]:
        heads, turns = self.heads[rows], self.cos_sin[rows]
        return [
            gpu_latents.queries(heads, self.matrix, self.spec, turns),
            gpu_latents.keys(self.projected[rows], self.norm, self.spec, turns),
            gpu_latents.values(self.attended[rows], self.matrix, self.spec),
        ]

    def on_cpu(self) -> list[Tensor]:
        return [
            latents.queries(self.heads, self.cos_sin, self.spec, self.of_heads),
            latents.keys(self.projected, self.norm, self.cos_sin, self.spec, on_gpu=False),
            latents.values(self.attended, self.spec, self.of_heads),
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=["small", "uneven"])
def test_what_lies_around_attention(spec: LatentSpec, dtype: torch.dtype) -> None:
    """Of 20 rows, by large tiles, those that each row has alone, by small ones; and those of a CPU."""
    drawn = Drawn(spec, 20, dtype)
    together, near = drawn.on_gpu(), 1e-5 if dtype == torch.float32 else 1e-2
    for ours, theirs in zip(together, drawn.on_cpu(), strict=True):
        assert ours.shape == theirs.shape and ours.dtype == dtype
        assert (ours.float() - theirs.float()).abs().max() < near
    for row in (0, 19):
        alone = drawn.on_gpu(slice(row, row + 1))
        for ours, one in zip(together, alone, strict=True):
            torch.testing.assert_close(
                ours[row : row + 1], one, rtol=1e-6 if dtype == torch.float32 else 1e-3, atol=1e-6
            )
    assert [each.shape[0] for each in drawn.on_gpu(slice(0, 0))] == [0, 0, 0]


def test_tiles_that_do_not_agree_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU whose instructions for few rows add up otherwise, these go by those for many."""
    taken: list[int] = []
    launch = DirectKernel.launch

    def watched(self: DirectKernel, grid: Any, arguments: Any, constants: dict[str, Any]) -> None:
        if self.kernel is latent_row_kernels.multiply_heads:
            taken.append(constants["ROWS"])
        launch(self, grid, arguments, constants)

    monkeypatch.setattr(DirectKernel, "launch", watched)
    drawn = Drawn(SPECS[0], 2, torch.float32)
    drawn.on_gpu()
    monkeypatch.setattr(gpu_latents, "agrees", lambda *given: False)
    drawn.on_gpu()
    assert taken == [16, 16, 64, 64]


def test_the_device_is_asked_whether_tiles_agree(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a product of each kind by both tiles; what differs is told."""
    asked, odd = list[tuple[int, str]](), set[tuple[int, str]]()

    def multiply(tile: gpu_latents.HeadTile, x: Tensor, m: Tensor, of: str, out: Tensor) -> None:
        asked.append((tile.rows, of))
        out.fill_(2.0 if (tile.rows, of) in odd else 1.0)

    monkeypatch.setattr(gpu_latents, "multiply", multiply)
    assert gpu_latents.compared(gpu_latents.FEW, torch.float32, CPU)
    odd.add((16, "values"))
    assert not gpu_latents.compared(gpu_latents.FEW, torch.float32, CPU)
    assert asked[:4] == [(64, "keys"), (16, "keys"), (64, "values"), (16, "values")]
    assert [record.message for record in caplog.records] == [
        "HeadTile(rows=16, columns=64, step=64) gives other bits on this GPU for values of latents, and is left alone"
    ]


def test_a_pool_holds_a_latent_once() -> None:
    pool = Pool.make(2, 1, 24, torch.float32, zeros, once=True)
    v, places = torch.randn(3, 1, 24), torch.tensor([0, -1, 1], dtype=torch.int32)
    attention.append(pool, v, v, places, torch.tensor([3, 4, 63], dtype=torch.int32))
    assert pool.tensors == (pool.v,) and pool.k.shape == (2, 1, 24, CHUNK)
    assert torch.equal(pool.v[0, 0, 3], v[0, 0]) and torch.equal(pool.k[1, 0, :, 63], v[2, 0])
    assert pool.v.count_nonzero() == 48


def test_int8_is_refused() -> None:
    pool, v, one = Pool.make(2, 1, 24, torch.int8, zeros, once=True), torch.randn(1, 1, 24), torch.tensor([0]).int()
    with pytest.raises(ValueError, match="take no latents as int8"):
        attention.append(pool, v, v, one, one)
    with pytest.raises(ValueError, match="take no latents as int8"):
        attention.attend(v, pool, Mask(torch.tensor([[0, 0, 0, 1]]).int(), torch.tensor([0]), scale=1.0))


def test_what_is_asked_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its latents, where its pools hold them once."""
    asked: list[layer_check.Variant] = []
    monkeypatch.setattr(layer_check, "check", lambda variant, place: asked.append(variant))
    monkeypatch.setattr(layer_check, "current", lambda: type("", (), {"place": torch.device("cuda")}))
    monkeypatch.setattr(walk_options, "_major", lambda device: 8)
    apart = AttentionSpec(2, 128, 1, 576, 0.1, (None, None))
    once = replace(apart, once=True)
    for spec in (apart, once):
        layer_check.verify(spec, torch.bfloat16, torch.bfloat16)
    assert asked[0].features == ["heads of 576"]  # by kernels that a backend would refuse
    assert asked[1].heads == Heads(128, 1, 576, once=True, lanes=32) and asked[1].heads.part == 32
    assert once.widest == 512 and apart.widest == 576


def test_sizes() -> None:
    assert [latent_parts(dim) for dim in (576, 288, 64, 24, 17)] == [(512, 64), (256, 32), (32, 32), (16, 16), (16, 16)]
    assert latent_chosen(9, 576).columns == 256 and latent_chosen(9, 576, flash=True).columns == 128
    assert latent_chosen(8, 576, flash=True) == latent_chosen(8, 576)
    assert latent_chosen(10, 80).columns == 64  # a column's share of the rest would be less than a product takes
    with pytest.raises(ValueError, match="one KV head of more than 16 numbers, got 2 of 32"):
        heads_of((4, 2, 32), True, CPU)
    with pytest.raises(ValueError, match="heads of up to 1024, got 1025"):
        limits.check(torch.float32, 1025, once=True)
    testbed = PoolTestbed([(0, 3)], (3, 1, 40), torch.float32, apart=False, once=True)
    with pytest.raises(ValueError, match="latents are attended to without windows, bias, caps and sinks"):
        testbed.attend(ends(testbed), backend, "cpu", window=2)
