"""C++ attention over values that are the keys too (latent attention): the bits of pools that have both."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.kernels import cpu
from headrace.kernels.records import Pool
from headrace.types import CHUNK
from tests.support.attention_cases import SHARED_FIXTURE, Case, Tree, cases, make_case

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))]

Pools = tuple[Pool, Pool]


def pools_of(values: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Pools:
    """Of values [slots, Hkv, 64, D] that are the keys, as kernels have them for rows of this type: once, and twice."""
    keys = values.transpose(2, 3).contiguous()
    both = Pool(keys, values) if scale is None else Pool(keys, values, scale, scale)
    once = Pool.of([values] if scale is None else [values, scale], once=True)
    return cpu.arrange(once, dtype), cpu.arrange(both, dtype)


def as_int8(case: Case, seed: int) -> Pools:
    """Pools like the case's of numbers drawn anew, rounded."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, case.v.shape, dtype=torch.int8, generator=draw)
    return pools_of(codes, case.q.dtype, torch.rand(codes.shape[:3], generator=draw) / 64)


def same_bits(case: Case, pools: Pools) -> None:
    once, both = (cpu.attend(case.q, pool, case.mask) for pool in pools)
    assert torch.equal(once, both)
    states = [cpu.partial(case.q, pool, case.mask) for pool in pools]
    for name in ("total", "block"):
        one, other = (getattr(state, name) for state in states)
        assert all(torch.equal(getattr(one, each), getattr(other, each)) for each in ("acc", "m", "l"))


@SHARED_FIXTURE
@given(case=cases(), seed=st.integers(0, 2**32))
def test_the_bits_of_keys_beside_values(isa: str, threads_kept: None, case: Case, seed: int) -> None:
    for threads in (1, 2):
        torch.set_num_threads(threads)
        same_bits(case, pools_of(case.v, case.q.dtype))
        same_bits(case, as_int8(case, seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [576, 320, 288, 60, 22])
def test_sizes_of_latents(isa: str, threads_kept: None, dim: int, dtype: torch.dtype) -> None:
    """As models have them, and such as fill no square; rows enough to be met in groups, chunks of several blocks."""
    tree = Tree(torch.Generator().manual_seed(dim), 2, 34, False)
    tree.row_counts = [9, 40]
    case = make_case(tree, 4, 1, dim, dtype)
    torch.set_num_threads(2)
    same_bits(case, pools_of(case.v, dtype))
    same_bits(case, as_int8(case, dim))
    assert cpu.attend(case.q, pools_of(case.v, dtype)[0], case.mask).isfinite().all()


@pytest.mark.parametrize("stored", ["as computed", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [576, 48, 20])
def test_stored_as_values(isa: str, dim: int, dtype: torch.dtype, stored: str) -> None:
    """By runs of rows, and row by row."""
    slots, rows = 3, 100
    draw = torch.Generator().manual_seed(dim)
    x = torch.randn(rows, 1, dim, generator=draw).to(dtype)
    at = torch.cat([torch.arange(CHUNK), CHUNK + torch.randperm(CHUNK, generator=draw)])[:rows]
    scale = torch.zeros(slots, 1, CHUNK) if stored == "int8" else None
    values = torch.zeros(slots, 1, CHUNK, dim, dtype=dtype if scale is None else torch.int8)
    once, both = pools_of(values, dtype, scale)
    if scale is not None:
        both = Pool(both.k, both.v, torch.zeros_like(scale), torch.zeros_like(scale))
    for pool in (once, both):
        cpu.append(pool, x, x, (at // CHUNK).int(), (at % CHUNK).int())
    assert torch.equal(once.v, both.v) and once.v.count_nonzero() > 0
    if scale is not None:
        assert once.v_scale is not None and both.v_scale is not None and torch.equal(once.v_scale, both.v_scale)
        assert once.k_scale is once.v_scale
