"""Attention in Triton: against the slow truth, and the same bits whatever the schedule. `make gpu-check` runs these."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headrace.kernels import reference
from headrace.kernels.records import Pool
from headrace.types import CHUNK
from tests.support.attention_testbed import SHAPES, TREES, PoolTestbed, ends

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    torch.manual_seed(0)
    yield torch.device("cuda", 0)


@pytest.fixture(params=["flash", "split"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces one of the two ways, wherever there is more than one span."""
    from headrace.kernels.triton import attention

    if request.param == "flash":
        monkeypatch.setattr("headrace.kernels.triton.heads.STATE_BYTES", -1)
    else:
        monkeypatch.setattr(attention, "processors", lambda device: 1 << 30)
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference(shape: tuple[int, int, int], tree: str, dtype: torch.dtype, way: str, cuda: torch.device) -> None:
    from headrace.kernels.triton import backend

    testbed = PoolTestbed(TREES[tree], shape, dtype, apart=False)
    for count in (1, 3):
        rows = ends(testbed, count)
        truths = testbed.attend(rows, reference, "cpu")
        for ours, truth in zip(testbed.attend(rows, backend, "cuda"), truths, strict=True):
            bound = 1e-5 if dtype == torch.float32 else 2e-2
            assert (ours.float() - truth.float()).abs().max() < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_int8_pools(shape: tuple[int, int, int], dtype: torch.dtype, way: str, cuda: torch.device) -> None:
    """Near the reference; and a row has the same bits beside others as alone."""
    from headrace.kernels.triton import backend

    testbed = PoolTestbed(TREES["shared"], shape, dtype, apart=False)
    pool = testbed.int8()
    there = Pool(*(each.cuda() for each in pool.tensors))
    rows = ends(testbed, 3)
    together = testbed.attend(rows, backend, "cuda", there)
    for ours, truth in zip(together, testbed.attend(rows, reference, "cpu", pool), strict=True):
        assert (ours.float() - truth.float()).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)
    for row, ours in zip(rows, together, strict=True):
        assert torch.equal(testbed.attend([row], backend, "cuda", there)[0], ours)


@pytest.mark.parametrize("window", [1, 40, 100, 600])
@pytest.mark.parametrize("biased", [False, True])
def test_windows_and_bias(window: int, biased: bool, way: str, cuda: torch.device) -> None:
    from headrace.kernels.triton import backend

    testbed = PoolTestbed(TREES["shared"], (8, 2, 64), torch.float32, apart=False)
    bias = torch.randn(8, 800) if biased else None
    rows = [*ends(testbed)[:3], *ends(testbed, 70)[3:]]
    ours = testbed.attend(rows, backend, "cuda", window=window, bias=None if bias is None else bias.cuda())
    for one, truth in zip(ours, testbed.attend(rows, reference, "cpu", window=window, bias=bias), strict=True):
        assert (one - truth).abs().max() < 1e-5


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
@pytest.mark.parametrize("tree", TREES)
def test_every_schedule_the_same_bits(tree: str, shape: tuple[int, int, int], way: str, cuda: torch.device) -> None:
    """Together or alone, shared or not, decoded or prefilled, by either way."""
    from headrace.kernels.triton import backend

    testbed, apart = (PoolTestbed(TREES[tree], shape, torch.bfloat16, apart=apart) for apart in (False, True))
    decoded = testbed.attend(ends(testbed), backend, "cuda")
    for other in (
        apart.attend(ends(testbed), backend, "cuda"),
        [testbed.attend([row], backend, "cuda")[0] for row in ends(testbed)],
    ):
        for one, two in zip(decoded, other, strict=True):
            assert torch.equal(one, two)
    for count in (2, 64, 3):
        if all(len(q) >= count for q, _, _ in testbed.tokens):
            for one, two in zip(decoded, testbed.attend(ends(testbed, count), backend, "cuda"), strict=True):
                assert torch.equal(one[0], two[-1])


def test_both_ways_the_same_bits(monkeypatch: pytest.MonkeyPatch, cuda: torch.device) -> None:
    from headrace.kernels.triton import attention, backend

    testbed = PoolTestbed(TREES["shared"], (8, 2, 128), torch.bfloat16, apart=False)
    rows = [*ends(testbed)[:3], *ends(testbed, 70)[3:]]
    monkeypatch.setattr(attention, "processors", lambda device: 1 << 30)
    split = testbed.attend(rows, backend, "cuda")
    monkeypatch.setattr("headrace.kernels.triton.heads.STATE_BYTES", -1)
    for one, two in zip(split, testbed.attend(rows, backend, "cuda"), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("others", ["plain", "window", "sinks"])
@pytest.mark.parametrize("shape", [(4, 4, 64), (8, 2, 128), (6, 2, 128)], ids=str)
def test_hopper_kernels_have_the_bits_of_the_portable_ones(
    shape: tuple[int, int, int], others: str, way: str, monkeypatch: pytest.MonkeyPatch, cuda: torch.device
) -> None:
    """Rows of several sequences, of which one ends in the midst of a chunk whose rest is NaN."""
    from headrace.kernels.triton import attention, backend, hopper, hopper_agreement
    from headrace.kernels.triton.heads import Heads

    if not hopper.present(cuda):
        pytest.skip("needs a Hopper GPU")
    agreed = attention.agreed(Heads(*shape), torch.bfloat16, cuda)
    assert agreed == hopper_agreement.Ways(flash=True, split=True)
    testbed = PoolTestbed([(0, 1030), (640, 1300), (640, 900)], shape, torch.bfloat16, apart=False)
    rows = [(0, 30, 1000), *ends(testbed, 3)[1:]]
    more = {"plain": {}, "window": {"window": 300}, "sinks": {"sinks": torch.randn(shape[0], device=cuda)}}[others]
    ours = testbed.attend(rows, backend, "cuda", **more)
    monkeypatch.setattr(hopper, "takes_call", lambda *_: False)
    for one, two in zip(ours, testbed.attend(rows, backend, "cuda", **more), strict=True):
        assert one.isfinite().all() and torch.equal(one, two)


def test_append(cuda: torch.device) -> None:
    from headrace.kernels.triton import backend

    k, v = (torch.randn(9, 3, 80, dtype=torch.bfloat16) for _ in range(2))
    slots = torch.tensor([4, 4, 1, 0, 5, 5, 5, 2, 3], dtype=torch.int32)
    offsets = torch.tensor([0, 1, 63, 7, 8, 9, 10, 2, 0], dtype=torch.int32)
    ours = [torch.zeros(6, 3, *tail, dtype=torch.bfloat16) for tail in ((80, CHUNK), (CHUNK, 80))]
    there = [x.cuda() for x in ours]
    reference.append(Pool(*ours), k, v, slots, offsets)
    backend.append(Pool(*there), k.cuda(), v.cuda(), slots, offsets)
    assert all(torch.equal(one, two.cpu()) for one, two in zip(ours, there, strict=True))


def test_what_is_refused(cuda: torch.device) -> None:
    from headrace.kernels.triton import backend, limits

    with pytest.raises(ValueError, match="heads of up to 512"):
        limits.check(torch.bfloat16, 513)
    with pytest.raises(ValueError, match="int8 heads of up to 256"):
        limits.check_stored(torch.int8, 512)
    with pytest.raises(ValueError, match="bfloat16"):
        limits.check(torch.int8, 64)
    x = torch.empty(0)
    with pytest.raises(ValueError, match="int8"):
        backend.append(Pool(x, x, k_scale=x), x, x, x, x)
