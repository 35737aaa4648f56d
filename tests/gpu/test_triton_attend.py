"""Attention in Triton: against the slow truth, and the same bits whatever the schedule. `make gpu-check` runs these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.attention import plan as planning
from headrace.kernels import reference
from headrace.kernels.records import Mask, Pool
from headrace.types import CHUNK

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPES = [(4, 4, 64), (8, 2, 128), (8, 1, 80), (6, 2, 96), (4, 2, 256), (71, 1, 64), (7, 1, 32)]
TREES = {
    "alone": [(0, 700)],
    "short": [(0, 3)],
    "shared": [(640, 700 + 13 * i) for i in range(5)],
    "few": [(1024, 1030 + i) for i in range(3)],
    "none": [(0, 65 + 200 * i) for i in range(4)],
}
"""For each sequence how many tokens it shares with the one before it, and its length."""


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    torch.manual_seed(0)
    yield torch.device("cuda", 0)


class Bed:
    """Sequences in pools, shares as in TREES. What nobody has written is NaN."""

    def __init__(
        self, shares: list[tuple[int, int]], shape: tuple[int, int, int], dtype: torch.dtype, apart: bool
    ) -> None:
        heads, kv_heads, dim = shape
        total = sum(-(-length // CHUNK) for _, length in shares) + 1
        random = torch.Generator().manual_seed(7)
        self.k = torch.full((total, kv_heads, dim, CHUNK), float("nan"), dtype=dtype)
        self.v = torch.full((total, kv_heads, CHUNK, dim), float("nan"), dtype=dtype)
        self.tables: list[np.ndarray] = []
        self.tokens: list[tuple[Tensor, Tensor, Tensor]] = []
        slot = total - 1
        for shared, length in shares:
            q = torch.randn(length, heads, dim, generator=random).to(dtype)
            k, v = (torch.randn(length, kv_heads, dim, generator=random).to(dtype) for _ in range(2))
            common = 0 if not self.tables else shared // CHUNK
            if common:
                k[: common * CHUNK], v[: common * CHUNK] = (x[: common * CHUNK] for x in self.tokens[-1][1:])
            table = np.zeros(-(-length // CHUNK), np.int32)
            for chunk in range(len(table)):
                if chunk < common and not apart:
                    table[chunk] = self.tables[-1][chunk]
                    continue
                slot -= 1
                table[chunk] = slot
                part = slice(chunk * CHUNK, min(length, (chunk + 1) * CHUNK))
                offsets = torch.arange(part.stop - part.start, dtype=torch.int32)
                reference.append(Pool(self.k, self.v), k[part], v[part], torch.full_like(offsets, slot), offsets)
            self.tables.append(table)
            self.tokens.append((q, k, v))

    def attend(self, rows: list[tuple[int, int, int]], kernels: Any, device: str, **others: Any) -> list[Tensor]:
        """rows: (sequence, first position, count). Returns the attention of each."""
        spans = [planning.Span(self.tables[s][: -(-(at + n) // CHUNK)], at, n) for s, at, n in rows]
        order = planning.batch_order([span.slots for span in spans])
        plan = planning.build([spans[i] for i in order])
        q = torch.cat([self.tokens[rows[i][0]][0][rows[i][1] : rows[i][1] + rows[i][2]] for i in order]).to(device)
        pool = Pool(*(x.nan_to_num() if kernels is reference else x.to(device) for x in (self.k, self.v)))
        items = torch.from_numpy(plan.items_within(others.get("window")))
        mask = Mask(items, torch.from_numpy(plan.positions), scale=q.shape[-1] ** -0.5, **others)
        out: Tensor = kernels.attend(q, pool, mask)
        parts = dict(zip(order, out.cpu().split([rows[i][2] for i in order]), strict=True))
        return [parts[i] for i in range(len(rows))]


def ends(bed: Bed, count: int = 1) -> list[tuple[int, int, int]]:
    return [(s, len(q) - count, count) for s, (q, _, _) in enumerate(bed.tokens)]


@pytest.fixture(params=["flash", "split"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces one of the two ways, wherever there is more than one span."""
    from headrace.kernels.triton import attention

    if request.param == "flash":
        monkeypatch.setattr(attention, "STATE_BYTES", -1)
    else:
        monkeypatch.setattr(attention, "processors", lambda device: 1 << 30)
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference(shape: tuple[int, int, int], tree: str, dtype: torch.dtype, way: str, cuda: torch.device) -> None:
    from headrace.kernels.triton import backend

    bed = Bed(TREES[tree], shape, dtype, apart=False)
    for count in (1, 3):
        rows = ends(bed, count)
        for ours, truth in zip(bed.attend(rows, backend, "cuda"), bed.attend(rows, reference, "cpu"), strict=True):
            bound = 1e-5 if dtype == torch.float32 else 2e-2
            assert (ours.float() - truth.float()).abs().max() < bound


@pytest.mark.parametrize("window", [1, 40, 100, 600])
@pytest.mark.parametrize("biased", [False, True])
def test_windows_and_bias(window: int, biased: bool, way: str, cuda: torch.device) -> None:
    from headrace.kernels.triton import backend

    bed = Bed(TREES["shared"], (8, 2, 64), torch.float32, apart=False)
    bias = torch.randn(8, 800) if biased else None
    rows = [*ends(bed)[:3], *ends(bed, 70)[3:]]
    ours = bed.attend(rows, backend, "cuda", window=window, bias=None if bias is None else bias.cuda())
    for one, truth in zip(ours, bed.attend(rows, reference, "cpu", window=window, bias=bias), strict=True):
        assert (one - truth).abs().max() < 1e-5


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
@pytest.mark.parametrize("tree", TREES)
def test_every_schedule_the_same_bits(tree: str, shape: tuple[int, int, int], way: str, cuda: torch.device) -> None:
    """Together or alone, shared or not, decoded or prefilled, by either way."""
    from headrace.kernels.triton import backend

    bed, apart = (Bed(TREES[tree], shape, torch.bfloat16, apart=apart) for apart in (False, True))
    decoded = bed.attend(ends(bed), backend, "cuda")
    for other in (
        apart.attend(ends(bed), backend, "cuda"),
        [bed.attend([row], backend, "cuda")[0] for row in ends(bed)],
    ):
        for one, two in zip(decoded, other, strict=True):
            assert torch.equal(one, two)
    for count in (2, 64, 3):
        if all(len(q) >= count for q, _, _ in bed.tokens):
            for one, two in zip(decoded, bed.attend(ends(bed, count), backend, "cuda"), strict=True):
                assert torch.equal(one[0], two[-1])


def test_both_ways_the_same_bits(monkeypatch: pytest.MonkeyPatch, cuda: torch.device) -> None:
    from headrace.kernels.triton import attention, backend

    bed = Bed(TREES["shared"], (8, 2, 128), torch.bfloat16, apart=False)
    rows = [*ends(bed)[:3], *ends(bed, 70)[3:]]
    monkeypatch.setattr(attention, "processors", lambda device: 1 << 30)
    split = bed.attend(rows, backend, "cuda")
    monkeypatch.setattr(attention, "STATE_BYTES", -1)
    for one, two in zip(split, bed.attend(rows, backend, "cuda"), strict=True):
        assert torch.equal(one, two)


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

    with pytest.raises(ValueError, match="heads of up to 256"):
        limits.check(torch.bfloat16, 512)
    with pytest.raises(ValueError, match="bfloat16"):
        limits.check(torch.int8, 64)
    x = torch.empty(0)
    with pytest.raises(ValueError, match="int8"):
        backend.append(Pool(x, x, k_scale=x), x, x, x, x)
