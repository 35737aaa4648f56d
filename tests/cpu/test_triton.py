"""The Triton kernels under Triton's own interpreter, in fp32 (it knows no bf16): what they compute, not how fast.

With a GPU they are compiled instead, and tests/gpu covers all of this and more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has the same kernels, compiled", allow_module_level=True)

from headrace.attention.plan import Span, batch_order, build
from headrace.kernels import reference
from headrace.kernels.records import Mask, Pool, StepInputs
from headrace.kernels.triton import attention, backend, limits, walk_options
from headrace.kernels.triton.heads import Heads
from headrace.types import CHUNK
from tests.support.attention_testbed import SHAPES, TREES, PoolTestbed, ends
from tests.support.small_gpu_engines import force

CPU = torch.device("cpu")
BOUND = 1e-5


@pytest.fixture(params=["flash", "split"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces one of the two ways, wherever there is more than one span."""
    force(request.param, monkeypatch)
    return str(request.param)


def both(testbed: PoolTestbed, rows: list[tuple[int, int, int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Attention of each of these rows in Triton, and by the reference."""
    return zip(*(testbed.attend(rows, kernels, "cpu") for kernels in (backend, reference)), strict=True)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_attention(shape: tuple[int, int, int], tree: str, way: str) -> None:
    testbed = PoolTestbed(TREES[tree], shape, torch.float32, apart=False)
    for count in (1, 3):
        rows = ends(testbed, count)
        for ours, truth in both(testbed, rows):
            assert (ours - truth).abs().max() < BOUND


@pytest.mark.parametrize("shape", SHAPES[3:], ids=str)
def test_other_shapes(shape: tuple[int, int, int]) -> None:
    testbed = PoolTestbed(TREES["short"], shape, torch.float32, apart=False)
    for ours, truth in both(testbed, ends(testbed)):
        assert (ours - truth).abs().max() < BOUND


@pytest.mark.parametrize("window", [1, 40, 100, 600, -40, -128])
@pytest.mark.parametrize("biased", [False, True])
def test_windows_and_bias(window: int, biased: bool, way: str) -> None:
    """Fewer sequences and heads than in tests/gpu: each program of the grid is interpreted."""
    testbed = PoolTestbed(TREES["shared"][:3], (4, 2, 32), torch.float32, apart=False)
    bias = torch.randn(4, 800, generator=torch.Generator().manual_seed(1)) if biased else None
    rows = [*ends(testbed)[:2], *ends(testbed, 70)[2:]]
    truths = testbed.attend(rows, reference, "cpu", window=window, bias=bias)
    for ours, truth in zip(testbed.attend(rows, backend, "cpu", window=window, bias=bias), truths, strict=True):
        assert (ours - truth).abs().max() < BOUND


@pytest.mark.parametrize("window", [None, 100])
def test_caps_and_sinks(window: int | None, way: str) -> None:
    testbed = PoolTestbed(TREES["shared"][:2], (2, 1, 16), torch.float32, apart=False)
    rows = [*ends(testbed)[:1], *ends(testbed, 3)[1:]]
    for others in ({"cap": 2.0}, {"cap": 3.0, "sinks": torch.tensor([0.5, 6.0])}):
        truths = testbed.attend(rows, reference, "cpu", window=window, **others)
        for ours, truth in zip(testbed.attend(rows, backend, "cpu", window=window, **others), truths, strict=True):
            assert (ours - truth).abs().max() < BOUND


@pytest.mark.parametrize("seed", range(3))
def test_random_trees_in_half_precision(seed: int, way: str) -> None:
    """Sequences that part anywhere, some in the midst of a span; rows of each at its end."""
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 900, 3)
    shares = [(int(random.integers(0, n)), int(n)) for n in lengths]
    shares = [(min(shared, before - 1), n) for (shared, n), before in zip(shares, [1, *lengths], strict=False)]
    testbed = PoolTestbed(shares, (2, 1, 16), torch.float16, apart=False)
    rows = [
        (s, n - count, count) for (s, (_, n)) in enumerate(shares) for count in [int(random.integers(1, min(n, 10)))]
    ]
    for ours, truth in both(testbed, rows):
        assert (ours.float() - truth.float()).abs().max() < 2e-3


def test_tensors_that_begin_between_aligned_addresses(way: str) -> None:
    """Base addresses off by one element: queries, keys and values."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(x.numel() + 1, dtype=x.dtype)
        memory[1:] = x.flatten()
        return memory[1:].view(x.shape)

    testbed = PoolTestbed(TREES["shared"][:2], (2, 1, 16), torch.float32, apart=False)
    plain = testbed.attend(ends(testbed), backend, "cpu")
    testbed.k, testbed.v = moved(testbed.k), moved(testbed.v)
    testbed.tokens = [(moved(q), k, v) for q, k, v in testbed.tokens]
    assert testbed.k.data_ptr() % 16 and testbed.v.data_ptr() % 16
    for ours, other in zip(testbed.attend(ends(testbed), backend, "cpu"), plain, strict=True):
        assert torch.equal(ours, other)


def test_both_ways_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are merged one by one either way. (One sequence: the interpreter's products are numpy's, whose bits may
    depend on a row's place.)"""
    testbed = PoolTestbed([(0, 1500)], (4, 2, 64), torch.float32, apart=False)
    monkeypatch.setattr(attention, "processors", lambda device: 1 << 30)
    (split,) = testbed.attend(ends(testbed), backend, "cpu")
    monkeypatch.setattr("headrace.kernels.triton.heads.STATE_BYTES", -1)
    (flash,) = testbed.attend(ends(testbed), backend, "cpu")
    assert torch.equal(split, flash)


def test_rows_on_both_sides_of_a_spans_end(way: str) -> None:
    """They share tasks, but those before it have no state of the later span."""
    testbed = PoolTestbed([(0, 520)], (2, 1, 16), torch.float32, apart=False)
    ((ours, truth),) = both(testbed, [(0, 500, 20)])
    assert (ours - truth).abs().max() < BOUND


def test_what_is_no_number_stays_in_its_sequence(way: str) -> None:
    """One sequence's values are NaN: no other's answer is, though their rows may go through the same task."""
    testbed = PoolTestbed(TREES["none"], (4, 2, 64), torch.float32, apart=False)
    before = testbed.attend(ends(testbed), backend, "cpu")
    testbed.v[torch.from_numpy(testbed.tables[1]).long()] = float("nan")
    after = testbed.attend(ends(testbed), backend, "cpu")
    assert after[1].isnan().all()
    for number in (0, 2, 3):
        assert torch.equal(after[number], before[number])


def test_scores_far_below_zero(way: str) -> None:
    testbed = PoolTestbed(TREES["shared"], (4, 2, 64), torch.float32, apart=False)
    testbed.k *= 100.0
    rows = ends(testbed)
    for ours, truth in both(testbed, rows):
        assert ours.isfinite().all() and (ours - truth).abs().max() < 1e-4


def test_the_next_step_by_a_prepared_one(way: str) -> None:
    """Two steps of decoding by one prepared Step: each stores its keys and values, and sees those of the one before."""
    heads, kv_heads, dim, starts = 4, 2, 32, (700, 650)
    tables = [np.array([*range(10), 20 + i], np.int32) for i in range(2)]
    random = torch.Generator().manual_seed(3)
    pools = [torch.randn(23, kv_heads, *tail, generator=random) for tail in ((dim, CHUNK), (CHUNK, dim))]
    ours, truths = (Pool(*(x.clone() for x in pools)) for _ in range(2))
    step = None
    for turn in range(2):
        spans = [Span(table, start + turn, 1) for table, start in zip(tables, starts, strict=True)]
        plan = build([spans[i] for i in batch_order(tables)])
        items, *places = (torch.from_numpy(x) for x in (plan.items, plan.positions, plan.row_slots, plan.row_offsets))
        if step is None:
            shape = (23, kv_heads, dim)
            inputs = StepInputs({None: items}, *places, heads=heads, shape=shape, dtype=torch.float32, scale=0.2)
            step = attention.TritonStep(inputs, CPU)
        else:
            step.go_on(places[0], places[2])
        qkv = torch.randn(2, heads + 2 * kv_heads, dim, generator=random)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        attended = step(ours, q, k, v, None)
        reference.append(truths, k, v, places[1], places[2])
        truth = reference.attend(q, truths, Mask(items, places[0], scale=0.2))
        assert all(torch.equal(x, y) for x, y in zip(ours.tensors, truths.tensors, strict=True))
        assert (attended - truth).abs().max() < BOUND


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="heads of up to 512"):
        limits.check(torch.bfloat16, 528)
    with pytest.raises(ValueError, match="int8 heads of up to 256"):
        limits.check_stored(torch.int8, 512)
    with pytest.raises(ValueError, match="bfloat16"):
        limits.check(torch.int8, 64)


@pytest.mark.parametrize("heads", [(2, 1, 16), (40, 1, 16)], ids=str)
def test_tasks_of_fewer_lanes(heads: tuple[int, int, int], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs with little shared memory; a KV head with more query heads than that takes 64."""

    def options(device: torch.device, heads: Heads, dtype: torch.dtype) -> walk_options.WalkOptions:
        return walk_options.chosen(8, 256, heads.part)

    monkeypatch.setattr(attention, "walk_options", options)
    testbed = PoolTestbed(TREES["shared"][:2], heads, torch.float32, apart=False)
    for ours, truth in both(testbed, [*ends(testbed)[:1], *ends(testbed, 20)[1:]]):
        assert (ours - truth).abs().max() < BOUND


def test_lanes_are_told_by_the_gpu_and_the_head() -> None:
    assert walk_options.walk_options(CPU, Heads(4, 1, 128), torch.float16) == walk_options.chosen(9, 128, 4)
    assert walk_options.chosen(12, 256, 8) == walk_options.chosen(8, 256, 8), "as other GPUs with little shared memory"
    assert [walk_options.chosen(8, 256, part).lanes for part in (1, 32, 33, 64)] == [32, 32, 64, 64]
    assert walk_options.chosen(9, 80, 4) == walk_options.OPTIONS[9][128]
    assert walk_options.chosen(8, 256, 1, fp32=True) == walk_options.UNROLLED._replace(lanes=32)


@pytest.mark.parametrize("major", [8, 9, 10])
def test_keys_are_taken_alike_by_both_ways(major: int) -> None:
    """Probabilities of larger heads are rounded for half a chunk, by split and by flash tasks."""
    for padded, keys in ((128, 64), (256, 64), (512, 32)):
        for dtype in (torch.bfloat16, torch.float32):
            fp32 = dtype == torch.float32
            flash, split = (
                walk_options.flash_chosen(major, padded, 8, dtype),
                walk_options.chosen(major, padded, 8, fp32),
            )
            assert flash.keys == split.keys == keys


@pytest.mark.parametrize(("dim", "first"), [(512, 127), pytest.param(320, 511, marks=pytest.mark.matrix)])
def test_larger_heads(dim: int, first: int, way: str) -> None:
    """Half a chunk at a time, and the values' columns by several passes or programs; two rows on both sides of a
    chunk's, or span's, end, the later of which sees the first half of a chunk alone."""
    testbed = PoolTestbed([(0, first + 9)], (2, 1, dim), torch.float16, apart=False)
    window = 70 if way == "split" else None
    (ours,), (truth,) = (testbed.attend([(0, first, 2)], each, "cpu", window=window) for each in (backend, reference))
    assert (ours.float() - truth.float()).abs().max() < 2e-3


@pytest.mark.parametrize("dim", [256, 160])
def test_programs_that_share_the_columns_of_the_values(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large heads on a Hopper GPU: flash tasks of 128 lanes, each by two programs, one of which has fewer columns."""
    monkeypatch.setattr("headrace.kernels.triton.heads.STATE_BYTES", -1)
    testbed = PoolTestbed([(0, 150)], (3, 1, dim), torch.float16, apart=False)
    assert walk_options.flash_options(CPU, Heads(3, 1, 256), torch.float16) == walk_options.FLASH_256
    for window in (None, 70):
        (ours,), (truth,) = (
            testbed.attend(ends(testbed, 50), kernels, "cpu", window=window) for kernels in (backend, reference)
        )
        assert (ours.float() - truth.float()).abs().max() < 2e-3
