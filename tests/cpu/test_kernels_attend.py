"""C++ attention over chunks: against fp64, and the same bits however the work is cut.

R: rows, Hq, Hkv: query and KV heads, D: head size, n: keys that a row sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.kernels import cpu, reference
from headrace.kernels.records import Mask, Pool
from headrace.memory import zeros
from headrace.types import CHUNK

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))]

SHARED_FIXTURE = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@dataclass(frozen=True, repr=False)
class Case:
    """One call of attend. items and positions as cpu.attend takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    items: Tensor
    positions: Tensor
    scale: float
    window: int | None = None
    bias: Tensor | None = None

    def __repr__(self) -> str:
        kind, dims = self.q.dtype, (tuple(self.q.shape), tuple(self.k.shape))
        bias = self.bias is not None
        return f"Case({kind}, q and k {dims}, window {self.window}, bias {bias}, items {self.items.tolist()})"

    @property
    def pool(self) -> Pool:
        """In plain order."""
        return Pool(self.k, self.v)

    @property
    def mask(self) -> Mask:
        return Mask(self.items, self.positions, window=self.window, bias=self.bias, scale=self.scale)

    def run(self) -> Tensor:
        return cpu.attend(self.q, cpu.arrange(self.pool), self.mask)

    def rows(self, begin: int, end: int) -> Case:
        """The same work for rows begin..end-1 only."""
        items = self.items.clone()
        items[:, 2:] = items[:, 2:].clamp(begin, end) - begin
        kept = items[items[:, 2] < items[:, 3]]
        return replace(self, q=self.q[begin:end], items=kept, positions=self.positions[begin:end].contiguous())


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Tree:
    """A random prefix tree: sequences in depth-first order, each with a path of chunks and rows at its end."""

    def __init__(self, generator: torch.Generator, sequences: int, depth: int, prefill: bool) -> None:
        self.generator = generator
        self.paths: list[list[int]] = [[] for _ in range(sequences)]
        self.covers: list[tuple[int, int, int, int]] = []  # (slot, key_start, first sequence, last sequence + 1)
        self._grow(0, sequences, 0, depth)
        self.lengths = [CHUNK * (len(path) - 1) + self.draw(1, CHUNK) for path in self.paths]
        self.row_counts = [self.draw(1, length) if prefill else 1 for length in self.lengths]

    def draw(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def _grow(self, begin: int, end: int, level: int, depth: int) -> None:
        """Gives sequences begin..end-1 a common chunk, then splits them; a sequence alone ends in a private chunk."""
        for path in self.paths[begin:end]:
            path.append(len(self.covers))
        self.covers.append((len(self.covers), level * CHUNK, begin, end))
        while begin < end and (level + 1 < depth or end - begin > 1):
            middle = self.draw(begin + 1, end)
            self._grow(begin, middle, level + 1, depth) if level + 1 < depth else self._private(
                begin, middle, level + 1
            )
            begin = middle

    def _private(self, begin: int, end: int, level: int) -> None:
        for sequence in range(begin, end):
            self.paths[sequence].append(len(self.covers))
            self.covers.append((len(self.covers), level * CHUNK, sequence, sequence + 1))

    def items(self) -> Tensor:
        starts = torch.tensor([0, *self.row_counts]).cumsum(0).tolist()
        return torch.tensor([(s, k, starts[a], starts[b]) for s, k, a, b in self.covers], dtype=torch.int32)

    def positions(self) -> Tensor:
        spans = [torch.arange(n - rows, n) for n, rows in zip(self.lengths, self.row_counts, strict=True)]
        return torch.cat(spans)


def make_case(tree: Tree, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, **options: object) -> Case:
    """Random tensors for the tree; keys that no row sees are NaN."""
    slots, rows = len(tree.covers), sum(tree.row_counts)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=tree.generator).to(dtype)

    case = Case(
        q=random(rows, heads, dim),
        k=random(slots, kv_heads, dim, CHUNK),
        v=random(slots, kv_heads, CHUNK, dim),
        items=tree.items(),
        positions=tree.positions(),
        scale=dim**-0.5,
    )
    case = replace(case, **options)  # type: ignore[arg-type]
    unseen = torch.ones(slots, CHUNK, dtype=torch.bool)
    for row in range(rows):
        slot, offset, _ = seen_keys(case, row)
        unseen[slot, offset] = False
    case.k.permute(0, 3, 1, 2)[unseen] = torch.nan
    case.v.permute(0, 2, 1, 3)[unseen] = torch.nan
    return case


def seen_keys(case: Case, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """(slot, offset in the chunk, position) of each key that the row sees: [n] each."""
    mine = case.items[(case.items[:, 2] <= row) & (row < case.items[:, 3])].long()
    slots = mine[:, 0].repeat_interleave(CHUNK)
    offsets = torch.arange(CHUNK).repeat(len(mine))
    positions = mine[:, 1].repeat_interleave(CHUNK) + offsets
    here = int(case.positions[row])
    seen = (positions <= here) & (positions > here - (case.window or here + 1))
    return slots[seen], offsets[seen], positions[seen]


def truth(case: Case) -> tuple[Tensor, Tensor]:
    """fp64 attention [R, Hq, D], and the sum over keys of p |v|, to which errors are compared."""
    group = case.q.shape[1] // case.k.shape[1]
    outs, sizes = [], []
    for row in range(len(case.q)):
        slots, offsets, positions = seen_keys(case, row)
        k = case.k[slots, :, :, offsets].double().repeat_interleave(group, dim=1)
        v = case.v[slots, :, offsets].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,nhd->hn", case.q[row].double(), k) * case.scale
        if case.bias is not None:
            scores = scores + case.bias[:, positions].double()
        p = scores.softmax(-1)
        outs.append(torch.einsum("hn,nhd->hd", p, v))
        sizes.append(torch.einsum("hn,nhd->hd", p, v.abs()))
    return torch.stack(outs), torch.stack(sizes)


def check(case: Case) -> None:
    """Error bound, relative to sum p |v|: 1e-5 in fp32; in bf16 also 2^-8 for P and 2^-8 for the output."""
    expected, size = truth(case)
    bound = 1e-5 + (2**-7 if case.q.dtype == torch.bfloat16 else 0)
    error = (case.run().double() - expected).abs()
    assert (error <= bound * size + 1e-30).all(), f"error {float((error / size).max()):.2e}, bound {bound:.2e}"


def reordered(items: Tensor, generator: torch.Generator) -> Tensor:
    """The items in another order that keeps each row's ascending, some cut in two."""
    rows = [tuple(item) for item in items.tolist()]
    for _ in range(4 * len(rows)):
        i = int(torch.randint(0, max(len(rows) - 1, 1), (), generator=generator))
        (_, _, a, b), (_, _, c, d) = rows[i], rows[min(i + 1, len(rows) - 1)]
        if b <= c or d <= a:
            rows[i], rows[i + 1] = rows[i + 1], rows[i]
    cut = []
    for slot, key, begin, end in rows:
        middle = int(torch.randint(begin, end + 1, (), generator=generator))
        cut += [(slot, key, begin, middle), (slot, key, middle, end)]
    return torch.tensor(cut, dtype=torch.int32)


@st.composite
def cases(draw: st.DrawFn, most: int = 6) -> Case:
    """Random trees, head layouts, windows, biases and types."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    tree = Tree(generator, draw(st.integers(1, most)), draw(st.integers(1, 4)), draw(st.booleans()))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (5, 1), (8, 1)]))
    bias = 10 * torch.randn(heads, max(tree.lengths), generator=generator) if draw(st.booleans()) else None
    return make_case(
        tree, heads, kv_heads, draw(st.sampled_from([32, 64, 80, 96, 128, 256, 8, 20])),
        draw(st.sampled_from([torch.float32, torch.bfloat16])), bias=bias,
        window=draw(st.sampled_from([None, None, 1, 7, 64, 100])),
    )  # fmt: skip


@SHARED_FIXTURE
@given(case=cases())
def test_matches_fp64(isa: str, case: Case) -> None:
    check(case)


@SHARED_FIXTURE
@given(case=cases(), seed=st.integers(0, 2**32))
def test_same_bits_however_cut(isa: str, threads: None, first_caches: tuple[int, ...], case: Case, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    torch.set_num_threads(1)
    whole = case.run()
    torch.set_num_threads(2)
    for kilobytes in first_caches:
        cpu.use_l1(kilobytes)
        assert torch.equal(case.run(), whole)
    assert torch.equal(replace(case, items=reordered(case.items, generator)).run(), whole)
    row = int(torch.randint(0, len(case.q), (), generator=generator))
    assert torch.equal(case.rows(row, row + 1).run(), whole[row : row + 1])
    end = int(torch.randint(row + 1, len(case.q) + 1, (), generator=generator))
    assert torch.equal(case.rows(row, end).run(), whole[row:end])


@pytest.mark.parametrize("heads", [(4, 2), (8, 4)])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 32), (torch.bfloat16, 32), (torch.bfloat16, 128)])
def test_long_context_crosses_blocks(
    isa: str, threads: None, dtype: torch.dtype, dim: int, heads: tuple[int, int]
) -> None:
    """4,500 keys in three blocks, prefill rows at their end and one row alone.

    With two threads, rows are cut where there are two KV heads, blocks where there are four.
    """
    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(dim)
    tree = Tree(generator, 1, 71, False)
    tree.row_counts = [30]
    case = make_case(tree, *heads, dim, dtype)
    assert int(case.positions[-1]) > 2 * 2048
    check(case)
    whole = case.run()
    for row in (0, 17, 29):
        assert torch.equal(case.rows(row, row + 1).run(), whole[row : row + 1])
    torch.set_num_threads(1)
    assert torch.equal(case.run(), whole)


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_rows_in_every_number(isa: str, threads: None, dim: int) -> None:
    """The tiles into which rows are cut differ with how many there are; their bits do not."""
    torch.set_num_threads(1)
    tree = Tree(torch.Generator().manual_seed(dim), 1, 4, False)
    tree.row_counts = [tree.lengths[0] - 3]
    case = make_case(tree, 1, 1, dim, torch.bfloat16)
    check(case)
    whole = case.run()
    for turn, count in enumerate([*range(1, 41), 63, 64, 65, 66, 96]):
        begin = turn * 11 % (len(whole) - count)
        assert torch.equal(case.rows(begin, begin + count).run(), whole[begin : begin + count]), (begin, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_met_together_end_with_their_block(isa: str, threads: None, dtype: torch.dtype) -> None:
    """Where rows meet the first chunk in two groups, those that follow are met from another one on than else."""
    torch.set_num_threads(1)
    tree = Tree(torch.Generator().manual_seed(9), 1, 71, False)
    tree.row_counts = [70]
    case = make_case(tree, 1, 1, 64, dtype)
    whole = case.run()
    for count in (1, 2, 3):
        first = case.items[:count].repeat_interleave(2, dim=0)
        first[::2, 3], first[1::2, 2] = 17, 17
        items = torch.cat([first, case.items[count:]])
        assert torch.equal(replace(case, items=items).run(), whole)
    assert torch.equal(case.rows(69, 70).run(), whole[69:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_scores_far_below_zero(isa: str, dtype: torch.dtype) -> None:
    tree = Tree(torch.Generator().manual_seed(3), 3, 3, True)
    case = make_case(tree, 4, 2, 64, dtype, bias=torch.full((4, max(tree.lengths)), -300.0))
    # 300 + s has an ulp of 3e-5, which is the relative error of p.
    expected, size = truth(case)
    error = (case.run().double() - expected).abs()
    assert (error <= (5e-5 + 2**-7 * (dtype == torch.bfloat16)) * size).all()


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)])
def test_scores_that_rise(isa: str, heads: tuple[int, int], dim: int) -> None:
    """Rows whose greatest scores rise from chunk to chunk, each at its own pace, keep their bits in company."""
    generator = torch.Generator().manual_seed(dim)
    tree = Tree(generator, 1, 8, False)
    tree.row_counts = [tree.lengths[0] - 250]
    case = make_case(tree, *heads, dim, torch.bfloat16)
    paces = 10 ** (2.5 * torch.rand(len(case.q), heads[0], 1, generator=generator) - 1)
    bias = torch.randn(heads[0], max(tree.lengths), generator=generator).mul(30).cumsum(1) / 20
    bias[:, :CHUNK] = -torch.inf  # a chunk that is seen, and weighs nothing
    case = replace(case, q=(case.q * paces).bfloat16(), bias=bias)
    check(case)
    whole = case.run()
    for begin, end in ((0, 1), (7, 12), (3, 19), (16, 48), (1, 70), (40, len(whole))):
        assert torch.equal(case.rows(begin, end).run(), whole[begin:end])


def test_many_scores_a_little_higher(isa: str) -> None:
    """Where probabilities sum to much though none is great, rows keep their bits in company."""
    tree = Tree(torch.Generator().manual_seed(6), 1, 8, False)
    tree.row_counts = [40]
    bias = torch.zeros(4, max(tree.lengths))
    bias[:, CHUNK:] = torch.tensor([[1.0], [1.5], [2.5], [6.0]])
    case = make_case(tree, 4, 2, 64, torch.bfloat16, bias=bias)
    paces = torch.arange(len(case.q)).view(-1, 1, 1) / 40
    case = replace(case, q=(case.q * paces).bfloat16())
    check(case)
    whole = case.run()
    for begin, end in ((0, 1), (3, 19), (39, 40)):
        assert torch.equal(case.rows(begin, end).run(), whole[begin:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_just_below_zero(isa: str, dtype: torch.dtype) -> None:
    """Where an exponent is taken apart, less than a last bit must not pass for a whole number."""
    tree = Tree(torch.Generator().manual_seed(4), 1, 2, False)
    tree.row_counts = [20]
    case = make_case(tree, 1, 1, 32, dtype)
    q, k = torch.zeros_like(case.q), torch.zeros_like(case.k)
    q[..., :2] = torch.tensor([1e-3, 1.0])
    k[:, :, 0, ::2], k[:, :, 1, 1::2] = -1e-6, 0.5
    check(replace(case, q=q, k=k, scale=1.0))


def test_first_row_copies_its_value(isa: str) -> None:
    case = make_case(Tree(torch.Generator().manual_seed(1), 1, 1, False), 2, 1, 32, torch.bfloat16)
    case = replace(case, positions=torch.zeros(1, dtype=torch.int64))
    case.k[0, :, :, 0], case.v[0, :, 0] = 1, torch.arange(32)
    assert torch.equal(case.run(), case.v[0, :, 0].expand(1, 2, 32))


@pytest.mark.parametrize("dim", [32, 80])
def test_rows_that_see_themselves_alone_copy_their_values(isa: str, dim: int) -> None:
    tree = Tree(torch.Generator().manual_seed(2), 1, 4, False)
    tree.row_counts = [tree.lengths[0]]
    case = make_case(tree, 2, 1, dim, torch.bfloat16, window=1)
    values = case.v[:, 0].reshape(-1, 1, dim)[: len(case.q)]
    assert torch.equal(case.run(), values.expand(-1, 2, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unseen_keys_contribute_nothing(isa: str, dtype: torch.dtype) -> None:
    """Each row of a prefill keeps its bits when all keys that it does not see become NaN or infinite."""
    tree = Tree(torch.Generator().manual_seed(5), 1, 3, False)
    tree.row_counts = [tree.lengths[0]]
    case = make_case(tree, 2, 1, 32, dtype, window=50)
    whole = case.run()
    assert whole.isfinite().all()
    for row in range(0, len(whole), 13):
        alone = case.rows(row, row + 1)
        slots, offsets, _ = seen_keys(alone, 0)
        unseen = torch.ones(len(case.k), CHUNK, dtype=torch.bool)
        unseen[slots, offsets] = False
        for garbage in (torch.nan, torch.inf):
            k, v = case.k.clone(), case.v.clone()
            k.permute(0, 3, 1, 2)[unseen] = garbage
            v.permute(0, 2, 1, 3)[unseen] = garbage
            assert torch.equal(replace(alone, k=k, v=v).run(), whole[row : row + 1])


def test_rows_without_keys_are_zero(isa: str) -> None:
    case = make_case(Tree(torch.Generator().manual_seed(6), 2, 2, True), 2, 1, 32, torch.float32)
    assert not replace(case, items=case.items[:0]).run().any()
    assert not replace(case, positions=torch.full_like(case.positions, -1)).run().any()


def test_no_rows_at_all(isa: str) -> None:
    case = make_case(Tree(torch.Generator().manual_seed(6), 1, 1, False), 2, 1, 32, torch.float32)
    assert case.rows(0, 0).run().shape == (0, 2, 32)
    none = torch.zeros(0, dtype=torch.int32)
    cpu.append(case.pool, torch.zeros(0, 1, 32), torch.zeros(0, 1, 32), none, none)


def test_nan_that_a_row_sees_is_not_hidden(isa: str) -> None:
    case = make_case(Tree(torch.Generator().manual_seed(7), 2, 2, False), 2, 1, 32, torch.bfloat16)
    case.q[0, 0, 0] = torch.nan
    out = case.run()
    assert out[0, 0].isnan().all()
    assert out[0, 1].isfinite().all() and out[1].isfinite().all()


def test_rows_may_be_apart(isa: str) -> None:
    """q may be a slice of wider rows, as it comes from the fused projection."""
    case = make_case(Tree(torch.Generator().manual_seed(8), 3, 2, True), 4, 2, 64, torch.bfloat16)
    wide = torch.randn(len(case.q), 8, 64).to(torch.bfloat16)
    wide[:, :4] = case.q
    assert torch.equal(replace(case, q=wide[:, :4]).run(), case.run())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_append_then_read(isa: str, dtype: torch.dtype) -> None:
    rows, heads, dim = 200, 3, 20
    k_pool, v_pool = torch.zeros(5, heads, dim, CHUNK, dtype=dtype), torch.zeros(5, heads, CHUNK, dim, dtype=dtype)
    expected_k, expected_v = k_pool.clone(), v_pool.clone()
    wide = torch.randn(rows, 2 * heads, dim).to(dtype)
    places = torch.randperm(5 * CHUNK)[:rows]
    slots, offsets = places // CHUNK, places % CHUNK
    expected_k[slots, :, :, offsets], expected_v[slots, :, offsets] = wide[:, :heads], wide[:, heads:]
    cpu.append(Pool(k_pool, v_pool), wide[:, :heads], wide[:, heads:], slots.int(), offsets.int())
    assert torch.equal(k_pool, expected_k) and torch.equal(v_pool, expected_v)


@pytest.mark.parametrize("dim", [16, 32, 80, 128])
def test_append_in_runs(isa: str, dim: int) -> None:
    """Rows that fill chunks in order, as a prefill's do, some that begin or end inside, some out of order."""
    heads, slots = 2, torch.tensor([3, 0, 4, 1]).repeat_interleave(CHUNK)
    offsets = torch.arange(CHUNK).repeat(4)
    order = torch.cat([torch.arange(5, 150), torch.tensor([151, 150]), torch.arange(152, 256), torch.arange(5)])
    k, v = torch.randn(256, heads, dim).bfloat16(), torch.randn(256, heads, dim).bfloat16()
    plain, pool = (Pool.make(5, heads, dim, torch.bfloat16, zeros) for _ in range(2))
    plain.k[slots, :, :, offsets], plain.v[slots, :, offsets] = k, v
    cpu.append(pool, k[order], v[order], slots[order].int(), offsets[order].int())
    for got, want in zip(pool.tensors, cpu.arrange(plain).tensors, strict=True):
        assert torch.equal(got, want)


def block_case(dtype: torch.dtype) -> Case:
    """One row over three blocks of equal scores. Values are 2^24 at the first key, 1 at the first key of each chunk of
    the second block, -2^24 at the first key of the third: merged by chunks all ones are lost, by blocks none."""
    per_block, chunks = 32, 96
    v = torch.zeros(chunks, 1, CHUNK, 16)
    v[0, 0, 0], v[per_block : 2 * per_block, 0, 0], v[2 * per_block, 0, 0] = 2.0**24, 1.0, -(2.0**24)
    items = torch.tensor([(chunk, chunk * CHUNK, 0, 1) for chunk in range(chunks)], dtype=torch.int32)
    return Case(
        q=torch.zeros(1, 1, 16, dtype=dtype),
        k=torch.ones(chunks, 1, 16, CHUNK, dtype=dtype),
        v=v.to(dtype),
        items=items,
        positions=torch.tensor([chunks * CHUNK - 1]),
        scale=1.0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_merged_before_the_total(isa: str, dtype: torch.dtype) -> None:
    """The canonical order, to the bit: 32 ones over 6,144 keys, in the kernels and in the reference."""
    case = block_case(dtype)
    want = torch.full((1, 1, 16), 32 / 6144, dtype=dtype)
    assert torch.equal(case.run(), want)
    assert torch.equal(reference.attend(case.q, case.pool, case.mask), want)
