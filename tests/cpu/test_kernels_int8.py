"""int8 keys and values: what append stores, attention over it on both backends, and what it costs in accuracy.

T, R: rows, Hq, Hkv: query and KV heads, D: head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.kernels import cpu, reference
from headrace.kernels.records import Pool
from headrace.types import CHUNK
from tests.support.attention_cases import SHARED_FIXTURE, Case, Tree, cases, make_case, reordered, truth

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))]


@dataclass(frozen=True)
class Int8Case:
    """A case whose keys and values are stored as int8: k and v in plain order, scales [slots, Hkv, 64].

    `case` is the original; where no row sees a key, its numbers are arbitrary and its scales NaN.
    """

    case: Case
    k: Tensor
    v: Tensor
    scales: dict[str, Tensor]

    @property
    def pool(self) -> Pool:
        return Pool(self.k, self.v, **self.scales)

    def run(self, kernels: Any = cpu, **change: Any) -> Tensor:
        case = replace(self.case, **change)
        pool = cpu.arrange(self.pool, case.q.dtype) if kernels is cpu else self.pool
        out: Tensor = kernels.attend(case.q, pool, case.mask)
        return out

    def exact(self) -> Case:
        """The case with the numbers that the int8 stand for, fp32."""
        k = self.k * self.scales["k_scale"][:, :, None]
        return replace(self.case, k=k, v=self.v * self.scales["v_scale"][..., None])


def stored(case: Case) -> Int8Case:
    """The case stored by the reference; keys that nobody sees are garbage of a former owner."""
    generator = torch.Generator().manual_seed(1)
    slots, kv_heads, dim, _ = case.k.shape
    pools = [
        torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8) for shape in (case.k.shape, case.v.shape)
    ]
    scales = {name: torch.full((slots, kv_heads, CHUNK), torch.nan) for name in ("k_scale", "v_scale")}
    keys = case.k.permute(0, 3, 1, 2).reshape(-1, kv_heads, dim)
    values = case.v.permute(0, 2, 1, 3).reshape(-1, kv_heads, dim)
    seen = (~keys.isnan().any(-1).any(-1)).nonzero()[:, 0]
    slot, offset = (seen // CHUNK).int(), (seen % CHUNK).int()
    reference.append(Pool(*pools, **scales), keys[seen], values[seen], slot, offset)
    return Int8Case(case, *pools, scales)


@SHARED_FIXTURE
@given(case=cases())
def test_matches_fp64_of_the_stored_numbers(isa: str, case: Case) -> None:
    """The bound is that of attention over unquantised keys and values."""
    int8 = stored(case)
    expected, size = truth(int8.exact())
    bound = 1e-5 + (2**-7 if case.q.dtype == torch.bfloat16 else 0)
    for kernels in (cpu, reference):
        error = (int8.run(kernels).double() - expected).abs()
        assert (error <= bound * size + 1e-30).all(), f"error {float((error / size).max()):.2e}"


@SHARED_FIXTURE
@given(case=cases(), seed=st.integers(0, 2**32))
def test_same_bits_however_cut(
    isa: str,
    threads_kept: None,
    first_caches: tuple[int, ...],
    case: Case,
    seed: int,
) -> None:
    """Rows together and alone, one thread and two, items in another order, merged on from a stored state."""
    generator = torch.Generator().manual_seed(seed)
    int8 = stored(case)
    torch.set_num_threads(1)
    whole = int8.run()
    torch.set_num_threads(2)
    for kilobytes in first_caches:
        cpu.use_l1(kilobytes)
        assert torch.equal(int8.run(), whole)
    items = reordered(case.items, generator)
    assert torch.equal(int8.run(items=items), whole)
    row = int(torch.randint(0, len(case.q), (), generator=generator))
    alone = case.rows(row, row + 1)
    assert torch.equal(int8.run(q=alone.q, items=alone.items, positions=alone.positions), whole[row : row + 1])
    cut = int(torch.randint(0, len(items) + 1, (), generator=generator))
    state = None
    for part in (items[:cut], items[cut:]):
        state = cpu.partial(case.q, cpu.arrange(int8.pool, case.q.dtype), replace(case, items=part).mask, state)
    assert state is not None and torch.equal(cpu.finish(state, case.q.dtype, case.sinks), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [20, 128])
def test_append_stores_the_references_bits(isa: str, dtype: torch.dtype, dim: int) -> None:
    rows, heads = 200, 3
    wide = torch.randn(rows, 2 * heads, dim).to(dtype)
    wide[3], wide[4, 0, 1], wide[5, 0, 2], wide[6] = 0.0, torch.nan, -torch.inf, 1e-44
    wide[7, :, 1:] = 0.0
    places = torch.randperm(5 * CHUNK)[:rows]
    slots, offsets = (places // CHUNK).int(), (places % CHUNK).int()
    written = {}
    for kernels in (cpu, reference):
        k, v = torch.zeros(5, heads, dim, CHUNK, dtype=torch.int8), torch.zeros(5, heads, CHUNK, dim, dtype=torch.int8)
        scales = {name: torch.full((5, heads, CHUNK), -1.0) for name in ("k_scale", "v_scale")}
        pool = Pool(k, v, **scales)
        kernels.append(pool, wide[:, :heads], wide[:, heads:], slots, offsets)
        lying = pool if kernels is cpu else cpu.arrange(pool, dtype)
        written[kernels] = (lying.k, lying.v, *(x.nan_to_num(-1.0) for x in scales.values()))
        assert k.amin() == -127 and k.amax() == 127
        x, scale = wide[0, 0].float(), scales["k_scale"][slots[0], 0, offsets[0]]
        assert scale == x.abs().max() / 127
        if kernels is reference:
            assert (k[slots[0], 0, :, offsets[0]] * scale - x).abs().max() <= scale * 0.5001
            assert not v[slots[3], :, offsets[3]].any()
        assert not scales["v_scale"][slots[3], :, offsets[3]].any()
        assert scales["k_scale"][slots[4], 0, offsets[4]].isnan()
        assert scales["k_scale"][slots[5], 0, offsets[5]].isinf()
    assert all(torch.equal(a, b) for a, b in zip(written[cpu], written[reference], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128])
def test_accuracy(isa: str, dtype: torch.dtype, dim: int) -> None:
    """Against fp64 on what was never quantised: 1.2e-2 relative rms, on normal random numbers."""
    tree = Tree(torch.Generator().manual_seed(dim), 4, 6, False)
    case = make_case(tree, 8, 2, dim, dtype)
    want, _ = truth(case)
    error = float((stored(case).run().double() - want).norm() / want.norm())
    assert 1e-3 < error < 1.2e-2, error


def test_what_is_no_number_is_not_hidden(isa: str) -> None:
    case = make_case(Tree(torch.Generator().manual_seed(7), 1, 2, False), 2, 1, 32, torch.bfloat16)
    for name in ("k_scale", "v_scale"):
        int8 = stored(case)
        int8.scales[name][case.items[0, 0], 0, 5] = torch.nan
        assert int8.run().isnan().all()


def test_refusals() -> None:
    int8 = stored(make_case(Tree(torch.Generator().manual_seed(4), 2, 2, True), 2, 1, 32, torch.bfloat16))
    case, scales = int8.case, int8.scales
    for kernels in (cpu, reference):
        for wrong in ({}, {"k_scale": scales["k_scale"]}, {"v_scale": scales["v_scale"]}):
            with pytest.raises(ValueError, match=r"k_pool must be|need both"):
                kernels.attend(case.q, Pool(int8.k, int8.v, **wrong), case.mask)
        with pytest.raises(ValueError, match=r"k_pool must be|others neither"):
            kernels.attend(case.q, Pool(case.k, case.v, **scales), case.mask)
    with pytest.raises(ValueError, match="v_scale must be"):
        cpu.attend(case.q, replace(int8.pool, v_scale=scales["v_scale"][:1]), case.mask)
    new = torch.zeros(1, 1, 32).bfloat16()
    place = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="k_pool must be"):
        cpu.append(Pool(int8.k, int8.v), new, new, place, place)
