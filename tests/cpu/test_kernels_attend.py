"""C++ attention over chunks: against fp64, and the same bits however the work is cut.

R: rows, Hq, Hkv: query and KV heads, D: head size, n: keys that a row sees.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from headrace.kernels import cpu, reference
from headrace.kernels.records import Pool
from headrace.memory import zeros
from headrace.types import CHUNK
from tests.support.attention_cases import (
    SHARED_FIXTURE,
    Case,
    Tree,
    cases,
    check,
    make_case,
    reordered,
    seen_keys,
    truth,
)

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))]


@SHARED_FIXTURE
@given(case=cases())
def test_matches_fp64(isa: str, case: Case) -> None:
    check(case)


@SHARED_FIXTURE
@given(case=cases(), seed=st.integers(0, 2**32))
def test_same_bits_however_cut(
    isa: str, threads_kept: None, first_caches: tuple[int, ...], case: Case, seed: int
) -> None:
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
    isa: str, threads_kept: None, dtype: torch.dtype, dim: int, heads: tuple[int, int]
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


@pytest.mark.parametrize("dim", [64, 80, 128, 576])
def test_rows_in_every_number(isa: str, threads_kept: None, dim: int) -> None:
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
def test_chunks_met_together_end_with_their_block(isa: str, threads_kept: None, dtype: torch.dtype) -> None:
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


def test_sinks_are_those_of_gpt_oss(isa: str) -> None:
    """Against the attention of transformers' class, and the same when a state is finished."""
    generator = torch.Generator().manual_seed(8)
    tree = Tree(generator, 1, 3, False)
    tree.row_counts = [tree.lengths[0]]
    case = make_case(tree, 4, 2, 32, torch.float32, sinks=2 * torch.randn(4, generator=generator))
    rows = len(case.q)
    k, v = (x.transpose(0, 1).flatten(1, 2)[None, :, :rows] for x in (case.k.transpose(2, 3), case.v))
    mask = torch.full((rows, rows), -torch.inf).triu(1)[None, None]
    module = SimpleNamespace(sinks=case.sinks, num_key_value_groups=2, training=False)
    want, _ = eager_attention_forward(module, case.q.transpose(0, 1)[None], k, v, mask, case.scale)
    torch.testing.assert_close(case.run(), want[0], rtol=1e-5, atol=1e-5)
    assert (replace(case, sinks=None).run() - want[0]).abs().max() > 0.01, "the sinks weigh something"


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


@pytest.mark.parametrize("dim", [16, 32, 80, 128, 576])
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
