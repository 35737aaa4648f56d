"""An indexer's scores, what rows choose by them, and what they have chosen side by side: C++ beside plain torch."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.kernels import cpu, indexer
from headrace.kernels.indexer import IndexQueries, choose
from headrace.kernels.records import Pool
from headrace.types import CHUNK
from tests.support.attention_cases import Tree

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))]
native = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


class Case:
    """Rows of a random tree, an indexer's queries, and a pool [slots, 1, 64, D] whose unseen keys are NaN."""

    def __init__(self, dtype: torch.dtype, size: int, dim: int, heads: int = 5, seed: int = 0, int8: bool = False):
        draw = torch.Generator().manual_seed(seed)
        tree = Tree(draw, 3, 4, prefill=True)
        self.items, self.positions = tree.items(), tree.positions()
        rows, slots = len(self.positions), len(tree.covers)
        q = torch.randn(rows, heads, size, generator=draw).to(dtype)
        self.index = IndexQueries(q, torch.randn(rows, heads, generator=draw))
        values = torch.randn(slots, 1, CHUNK, dim, generator=draw).to(dtype)
        if int8:
            codes = torch.randint(-127, 128, values.shape, dtype=torch.int8, generator=draw)
            self.pool = Pool.of([codes, torch.rand(slots, 1, CHUNK, generator=draw) / 64], once=True)
        else:
            self.pool = Pool.of([values], once=True)
        self.keys = (int(self.items[:, 1].max()) // CHUNK + 1) * CHUNK

    def pooled(self, of: int) -> Case:
        """The same of pools of so many keys, whose second `size` numbers are what they count."""
        draw = torch.Generator().manual_seed(2)
        self.index = self.index._replace(places=torch.randn(of, self.index.q.shape[2], generator=draw))
        return self

    def scores(self, items: Tensor | None = None) -> Tensor:
        arranged = cpu.arrange(self.pool, self.index.q.dtype)
        return cpu.index_scores(self.index, arranged, self.items if items is None else items, self.positions, self.keys)


@native
@pytest.mark.parametrize("int8", [False, True], ids=["as computed", "int8"])
@pytest.mark.parametrize(("size", "dim", "heads"), [(128, 704, 64), (32, 96, 33), (16, 60, 3), (10, 22, 1)])
def test_scores(isa: str, threads_kept: None, size: int, dim: int, heads: int, int8: bool, dtype: torch.dtype) -> None:
    """Those of plain torch, to rounding; what a row does not see is -inf, whatever lies there."""
    case = Case(dtype, size, dim, heads, int8=int8)
    truth = indexer.index_scores(case.index, case.pool, case.items, case.positions, case.keys)
    torch.set_num_threads(2)
    found = case.scores()
    unseen = truth == -torch.inf
    assert torch.equal(found == -torch.inf, unseen) and unseen.any()
    assert torch.allclose(found[~unseen], truth[~unseen], rtol=1e-4, atol=2e-3 * float(truth[~unseen].std()))


@native
@pytest.mark.parametrize("int8", [False, True], ids=["as computed", "int8"])
@pytest.mark.parametrize(
    ("size", "dim", "heads", "of"), [(128, 768, 32, 16), (32, 112, 33, 2), (16, 60, 3, 64), (10, 22, 1, 4)]
)
def test_scores_of_pools(
    isa: str, threads_kept: None, size: int, dim: int, heads: int, of: int, int8: bool, dtype: torch.dtype
) -> None:
    """As test_scores; a pool is seen from its last key on."""
    case = Case(dtype, size, dim, heads, int8=int8).pooled(of)
    truth = indexer.index_scores(case.index, case.pool, case.items, case.positions, case.keys)
    torch.set_num_threads(2)
    found = case.scores()
    unseen = truth == -torch.inf
    assert found.shape[1] * of == case.keys and torch.equal(found == -torch.inf, unseen) and unseen.any()
    last = torch.arange(of - 1, case.keys, of)
    assert torch.equal(~unseen, last <= case.positions[:, None])
    assert torch.allclose(found[~unseen], truth[~unseen], rtol=1e-4, atol=2e-3 * float(truth[~unseen].std()))


@native
@pytest.mark.parametrize("of", [1, 16])
def test_a_rows_scores_are_its_own(isa: str, threads_kept: None, of: int, dtype: torch.dtype) -> None:
    """The same bits alone as among others, with one thread as with two."""
    case = Case(dtype, 32, 96) if of == 1 else Case(dtype, 32, 96).pooled(of)
    torch.set_num_threads(2)
    together = case.scores()
    torch.set_num_threads(1)
    for row in range(0, len(case.positions), 7):
        mine = (case.items[:, 2] <= row) & (row < case.items[:, 3])
        alone = case.items[mine].clone()
        alone[:, 2], alone[:, 3] = row, row + 1
        assert torch.equal(case.scores(alone)[row], together[row])


def test_scores_of_a_key_that_is_no_number(isa: str) -> None:
    """Keys of a slot's former owner count for nobody."""
    case = Case(torch.float32, 32, 96)
    last = int(case.positions[-1])
    slot = int(
        case.items[(case.items[:, 3] == len(case.positions)) & (case.items[:, 1] == last // CHUNK * CHUNK), 0][0]
    )
    case.pool.v[slot, :, last % CHUNK + 1 :] = torch.nan
    found = case.scores()
    assert not found.isnan().any() and torch.isfinite(found[-1, : last + 1]).all()


@native
def test_what_is_no_number_is_not_hidden(isa: str, dtype: torch.dtype) -> None:
    """A key whose score is none is chosen, and shows it."""
    case, blocks = Case(dtype, 32, 96), Blocks(dtype, 32, 48)
    slot = int(case.items[0, 0])
    case.pool.v[slot, 0, 3, 5] = torch.nan
    blocks.pool.k[slot, 1, 2, 3] = torch.nan
    truth = indexer.index_scores(case.index, case.pool, case.items, case.positions, case.keys)
    found = case.scores()
    assert torch.equal(found.isnan(), truth.isnan()) and found[:, 3].isnan().any()
    of_blocks = indexer.block_scores(blocks.q, blocks.pool, blocks.items, blocks.positions, blocks.chunks)
    assert torch.equal(blocks.scores().isnan(), of_blocks.isnan()) and of_blocks[:, :, 0].isnan().any()


class Blocks:
    """Rows of a random tree, an indexer's queries of two heads, and a pool whose keys have its parts first."""

    def __init__(self, dtype: torch.dtype, size: int, dim: int, int8: bool = False) -> None:
        draw = torch.Generator().manual_seed(0)
        tree = Tree(draw, 3, 4, prefill=True)
        self.items, self.positions = tree.items(), tree.positions()
        slots = len(tree.covers)
        self.q = torch.randn(len(self.positions), 2, size, generator=draw).to(dtype)
        k, v = (torch.randn(slots, 2, *shape, generator=draw).to(dtype) for shape in ((dim, CHUNK), (CHUNK, dim)))
        if int8:
            codes = [torch.randint(-127, 128, each.shape, dtype=torch.int8, generator=draw) for each in (k, v)]
            self.pool = Pool(*codes, *(torch.rand(slots, 2, CHUNK, generator=draw) / 64 for _ in "kv"))
        else:
            self.pool = Pool(k, v)
        self.chunks = int(self.items[:, 1].max()) // CHUNK + 1

    def scores(self, items: Tensor | None = None) -> Tensor:
        arranged = cpu.arrange(self.pool, self.q.dtype)
        return cpu.block_scores(self.q, arranged, self.items if items is None else items, self.positions, self.chunks)


@native
@pytest.mark.parametrize("int8", [False, True], ids=["as computed", "int8"])
@pytest.mark.parametrize(("size", "dim"), [(128, 160), (64, 96), (32, 48), (20, 44)])
def test_the_greatest_scores_of_chunks(
    isa: str, threads_kept: None, size: int, dim: int, int8: bool, dtype: torch.dtype
) -> None:
    """Those of plain torch, to rounding; the same bits alone as among others."""
    case = Blocks(dtype, size, dim, int8)
    truth = indexer.block_scores(case.q, case.pool, case.items, case.positions, case.chunks)
    torch.set_num_threads(2)
    found = case.scores()
    unseen = truth == -torch.inf
    assert torch.equal(found == -torch.inf, unseen) and unseen.any()
    assert torch.allclose(found[~unseen], truth[~unseen], rtol=1e-4, atol=2e-3 * float(truth[~unseen].std()))
    torch.set_num_threads(1)
    for row in range(0, len(case.positions), 9):
        mine = (case.items[:, 2] <= row) & (row < case.items[:, 3])
        alone = case.items[mine].clone()
        alone[:, 2], alone[:, 3] = row, row + 1
        assert torch.equal(case.scores(alone)[row], found[row])


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([-torch.inf, -1.0, -0.0, 0.0, 0.5, 2.0]), min_size=6, max_size=6), min_size=1
    ),
    count=st.integers(1, 6),
)
def test_the_greatest_are_chosen_and_the_first_of_equal_ones(rows: list[list[float]], count: int) -> None:
    found = choose(torch.tensor(rows), count).tolist()
    with patch.object(indexer, "FEW", 0):
        assert choose(torch.tensor(rows), count).tolist() == found
    assert found == [sorted(sorted(range(6), key=lambda at: -row[at])[:count]) for row in rows]


@pytest.mark.parametrize("few", [0, 100])
def test_a_score_that_is_no_number_is_the_greatest(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "FEW", few)
    assert choose(torch.tensor([[0.0, torch.nan, 5.0, torch.inf, 1.0]]), 2).tolist() == [[1, 3]]


@native
@pytest.mark.parametrize("int8", [False, True], ids=["as computed", "int8"])
@pytest.mark.parametrize(("size", "dim"), [(128, 704), (32, 96), (36, 96), (20, 60), (28, 60)])
def test_what_is_chosen_lies_side_by_side(isa: str, size: int, dim: int, int8: bool, dtype: torch.dtype) -> None:
    """Every number of it, whichever of the two pools lie in pairs."""
    case = Case(dtype, size, dim, int8=int8)
    draw = torch.Generator().manual_seed(1)
    slots, count = len(case.pool.v), 100
    tables = torch.stack([torch.randperm(slots, generator=draw)[:3] for _ in range(4)]).int()
    chosen = torch.stack([torch.randperm(3 * CHUNK, generator=draw)[:count].sort().values for _ in range(4)]).int()
    truth = cpu.arrange(indexer.gather(case.pool, tables, chosen, size, dtype), dtype)  # copied: both use one memory
    found = cpu.gather(cpu.arrange(case.pool, dtype), tables, chosen, size, dtype)

    def places(pool: Pool) -> list[Tensor]:
        """In plain order, but for those behind the last key."""
        pairs = cpu.layout(dtype, dim - size) == "vnni"
        v = pool.v.view(8, 32, dim - size, 2).transpose(2, 3) if pairs else pool.v
        parts = [v.reshape(4, 2 * CHUNK, dim - size)[:, :count]]
        return parts if pool.v_scale is None else [*parts, pool.v_scale.reshape(4, 2 * CHUNK)[:, :count]]

    assert all(torch.equal(one, other) for one, other in zip(places(found), places(truth), strict=True))


def test_what_does_not_fit_is_refused() -> None:
    blocks = Blocks(torch.float32, 32, 48)
    with pytest.raises(ValueError, match="2 heads of 33 numbers fit no pool of 2 heads of 48"):
        cpu.block_scores(torch.zeros(1, 2, 33), blocks.pool, blocks.items, blocks.positions, blocks.chunks)
    with pytest.raises(ValueError, match="there is room for 64"):
        cpu.block_scores(blocks.q, blocks.pool, blocks.items, blocks.positions, 1)
    case = Case(torch.float32, 32, 96)
    pool = cpu.arrange(case.pool, torch.float32)
    with pytest.raises(ValueError, match="there is room for 64"):
        cpu.index_scores(case.index, pool, case.items, case.positions, CHUNK)
    with pytest.raises(ValueError, match="keys of 128 numbers lie in no pool of 1 heads of 96"):
        wide = case.index._replace(q=torch.zeros(len(case.positions), 5, 128))
        cpu.index_scores(wide, pool, case.items, case.positions, case.keys)
    with pytest.raises(ValueError, match="places must be a contiguous CPU tensor"):
        places = torch.zeros(16, 32, dtype=torch.bfloat16)
        cpu.index_scores(case.index._replace(places=places), pool, case.items, case.positions, case.keys)
    with pytest.raises(ValueError, match="keys of 64 numbers lie in no pool of 1 heads of 96"):
        wide = case.index._replace(q=torch.zeros(len(case.positions), 5, 64), places=torch.zeros(16, 64))
        cpu.index_scores(wide, pool, case.items, case.positions, case.keys)
    with pytest.raises(ValueError, match="row 0 has chosen key 64, which lies in none of its chunks"):
        cpu.gather(
            pool, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([[64]], dtype=torch.int32), 32, torch.float32
        )
    with pytest.raises(ValueError, match="v_pool must be a contiguous CPU tensor"):
        cpu.index_scores(case.index, replace(pool, v=pool.v.bfloat16()), case.items, case.positions, case.keys)
