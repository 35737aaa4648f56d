"""Attention in pieces, on both backends: merged on from call to call, by blocks, merged from segments.

R: rows, Hq: query heads, D: head size.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from headrace.kernels import cpu, reference, state
from headrace.kernels.backend import backend_of, in_pieces
from headrace.kernels.cpu_attention import LOG_2
from headrace.kernels.extension import VNNI_ISAS
from headrace.kernels.state import AttnState, RunningState
from headrace.types import BLOCK_CHUNKS, CHUNK
from tests.support.attention_cases import (
    SHARED_FIXTURE,
    Case,
    Tree,
    cases,
    check,
    in_fp64,
    make_case,
    reordered,
    seen_scores,
    truth,
)

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))]

BLOCK = BLOCK_CHUNKS * CHUNK


class Backend:
    """A backend on one case: the pools lie as it wants them."""

    def __init__(self, name: str, case: Case) -> None:
        self.kernels = in_pieces(backend_of(name))
        self.case = case
        self.pool = cpu.arrange(case.pool) if name == "cpu" else case.pool

    def attend(self) -> Tensor:
        return self.kernels.attend(self.case.q, self.pool, self.case.mask)

    def partial(self, items: Tensor, start: RunningState | None = None) -> RunningState:
        mask = replace(self.case, items=items.contiguous()).mask
        return self.kernels.partial(self.case.q, self.pool, mask, start)

    def finish(self, left: RunningState) -> Tensor:
        return self.kernels.finish(left, self.case.q.dtype, self.case.sinks)


def moved(case: Case, by: int) -> Case:
    """The same work `by` keys later, so that a few chunks straddle a block boundary. Rows that attend within blocks of
    their own see the same keys after so many whole ones."""
    assume((case.window or 0) >= 0 or by % case.window == 0)
    items = case.items.clone()
    items[:, 1] += by
    bias = None if case.bias is None else torch.nn.functional.pad(case.bias, (by, 0))
    return replace(case, items=items, positions=case.positions + by, bias=bias)


def clean(case: Case) -> Case:
    """Unseen keys as numbers: the reference multiplies keys that some rows of an item see by 0 for the others."""
    return replace(case, k=case.k.nan_to_num(3.0), v=case.v.nan_to_num(-3.0))


@pytest.mark.parametrize("name", ["cpu", "reference"])
@SHARED_FIXTURE
@given(case=cases(), seed=st.integers(0, 2**32), by=st.sampled_from([0, BLOCK - CHUNK, BLOCK - 2 * CHUNK]))
def test_merging_on_gives_the_bits_of_one_call(
    isa: str,
    threads_kept: None,
    name: str,
    case: Case,
    seed: int,
    by: int,
) -> None:
    """However the items are cut into calls: inside a block, at its edge, rows apart."""
    generator = torch.Generator().manual_seed(seed)
    backend = Backend(name, moved(case, by))
    torch.set_num_threads(1)
    whole = backend.attend()
    items = backend.case.items if name == "reference" else reordered(backend.case.items, generator)
    torch.set_num_threads(2)
    cuts = torch.randint(0, len(items) + 1, (3,), generator=generator).sort().values.tolist()
    left = None
    for begin, end in pairwise([0, *cuts, len(items)]):
        left = backend.partial(items[begin:end], left)
    assert left is not None
    assert torch.equal(backend.finish(left), whole)


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 32), (torch.float32, 20)])
@pytest.mark.parametrize("window", [None, 2500])
def test_blocks_computed_apart_merge_to_the_bits_of_one_call(
    isa: str,
    name: str,
    dtype: torch.dtype,
    dim: int,
    window: int | None,
) -> None:
    """Three blocks, each from nothing; some rows see only two of them; then a fourth piece, merged on."""
    tree = Tree(torch.Generator().manual_seed(dim), 1, 71, False)
    tree.row_counts = [460]
    case = clean(make_case(tree, 4, 2, dim, dtype, window=window))
    keep = torch.tensor([0, 17, 200, 459])
    items = case.items.clone()
    items[:, 3] = len(keep)
    case = replace(case, q=case.q[keep], positions=case.positions[keep], items=items)
    assert case.positions[0] < 2 * BLOCK < case.positions[-1]
    backend = Backend(name, case)
    blocks = [backend.partial(items[items[:, 1] // BLOCK == block]) for block in range(3)]
    total = backend.kernels.empty_running(*case.q.shape, dtype)
    for block in blocks:
        total = backend.kernels.merge_blocks(total, block)
    assert torch.equal(backend.finish(total), backend.attend())
    early = backend.kernels.merge_blocks(blocks[0], backend.partial(items[BLOCK_CHUNKS : BLOCK_CHUNKS + 7]))
    assert torch.equal(backend.finish(backend.partial(items[BLOCK_CHUNKS + 7 :], early)), backend.attend())
    with pytest.raises(ValueError, match="cut at multiples of 2,048"):
        backend.kernels.merge_blocks(early, blocks[1])
    with pytest.raises(ValueError, match="cut at multiples of 2,048"):
        backend.kernels.merge_blocks(blocks[0], total)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_sums_that_are_hardly_numbers_merge_alike(isa: str, threads_kept: None, count: int, flush: bool) -> None:
    """Values at the edge of fp32: kernels of pairs make results below 1e-38 zero while they meet chunks, and keep them
    where blocks meet, on every thread and whatever the caller has set (`flush`)."""
    if flush and isa not in VNNI_ISAS:
        pytest.skip("only kernels of pairs choose the mode themselves")
    torch.set_num_threads(count)
    tree = Tree(torch.Generator().manual_seed(3), 1, 71, False)
    tree.row_counts = [460]
    case = clean(make_case(tree, 4, 2, 32, torch.bfloat16))
    keep = torch.tensor([200, 459])
    items = case.items.clone()
    items[:, 3] = len(keep)
    case = replace(case, q=3 * case.q[keep], v=case.v * 2**-123, positions=case.positions[keep], items=items)
    backend = Backend("cpu", case)
    expected = backend.attend()
    torch.set_flush_denormal(flush)
    try:
        total = backend.kernels.empty_running(*case.q.shape, case.q.dtype)
        for block in range(3):
            total = backend.kernels.merge_blocks(total, backend.partial(items[items[:, 1] // BLOCK == block]))
        pieces = backend.partial(items[40:], backend.partial(items[7:40], backend.partial(items[:7])))
        finished, whole, attended = backend.finish(total), backend.partial(items), backend.attend()
    finally:
        torch.set_flush_denormal(False)
    for left in (total, pieces):
        for one, other in ((left.total, whole.total), (left.block, whole.block)):
            assert torch.equal(one.acc, other.acc) and torch.equal(one.m, other.m) and torch.equal(one.l, other.l)
    acc = whole.total.acc.abs()
    assert ((acc > 0) & (acc < 2**-126)).any()
    assert torch.equal(finished, expected) and torch.equal(attended, expected)
    assert (torch.tensor(2.0**-126) / 2).item() > 0, "the mode of the calling thread has changed"


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 576), (torch.bfloat16, 32), (torch.float32, 20)])
@pytest.mark.parametrize("heads", [(64, 1), (96, 2)])
def test_more_threads_than_kv_heads_share_their_queries(
    isa: str, threads_kept: None, dtype: torch.dtype, dim: int, heads: tuple[int, int]
) -> None:
    """As of latents: one row, whose query heads are many, with a bias and a sink of each; in one call and in two."""
    tree = Tree(torch.Generator().manual_seed(dim), 1, 18, False)
    generator = torch.Generator().manual_seed(1)
    sinks, bias = torch.randn(heads[0], generator=generator), torch.randn(heads[0], 18 * CHUNK, generator=generator)
    case = make_case(tree, *heads, dim, dtype, sinks=sinks, bias=bias)
    backend, items = Backend("cpu", case), case.items
    torch.set_num_threads(1)
    alone = backend.attend()
    for threads in (2, 16):
        torch.set_num_threads(threads)
        check(case)
        assert torch.equal(backend.attend(), alone)
        assert torch.equal(backend.finish(backend.partial(items[7:], backend.partial(items[:7]))), alone)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 32), (torch.float32, 20)])
@pytest.mark.parametrize("window", [None, 2500])
def test_more_threads_than_heads_take_blocks_apart(
    isa: str,
    threads_kept: None,
    dtype: torch.dtype,
    dim: int,
    window: int | None,
) -> None:
    """Few rows on many threads: the kernel merges blocks apart, to the bits of one thread."""
    tree = Tree(torch.Generator().manual_seed(dim), 1, 71, False)
    tree.row_counts = [460]
    case = make_case(tree, 4, 2, dim, dtype, window=window)
    keep = torch.tensor([3, 200, 459])
    items = case.items.clone()
    items[:, 3] = len(keep)
    backend = Backend("cpu", replace(case, q=case.q[keep], positions=case.positions[keep], items=items))
    torch.set_num_threads(1)
    alone = backend.attend()
    torch.set_num_threads(16)
    assert alone.float().std() > 0.01 and torch.equal(backend.attend(), alone)


def test_starts_where_another_state_left_it_alone(isa: str) -> None:
    """A state is a value: merging on from it twice gives the same twice."""
    case = make_case(Tree(torch.Generator().manual_seed(2), 3, 3, True), 4, 2, 32, torch.bfloat16)
    backend = Backend("cpu", case)
    half = backend.partial(case.items[:2])
    once, twice = (backend.finish(backend.partial(case.items[2:], half)) for _ in range(2))
    assert torch.equal(once, twice) and torch.equal(once, backend.attend())


@SHARED_FIXTURE
@given(case=cases())
def test_states_are_those_of_fp64(isa: str, case: Case) -> None:
    """lse in natural logarithms; and two segments merge to the whole. Sinks are no part of a state."""
    case = replace(case, sinks=None)
    backend = Backend("cpu", case)
    whole = cpu.states_of(backend.partial(case.items))
    runs_on = isa in ("amx", "avx512bf16") and case.q.dtype == torch.bfloat16 and case.q.shape[-1] % 16 == 0
    keys, _ = in_fp64(case)
    for row in range(0, len(case.q), 7):
        scores = seen_scores(case, row, keys)
        # Where sums run on (csrc/attention/running.h) a row's only key has its probability in l as it is multiplied,
        # rounded by up to 2^-8.
        error = 2e-5 + (2**-8 if runs_on and len(scores.T) == 1 else 0)
        torch.testing.assert_close(whole.lse[row].double(), scores.logsumexp(-1), rtol=1e-5, atol=error)
    cut = len(case.items) // 2
    near, far = (cpu.states_of(backend.partial(part)) for part in (case.items[:cut], case.items[cut:]))
    merged = cpu.merge_states(near, far)
    torch.testing.assert_close(merged.lse, whole.lse, rtol=2e-6, atol=2e-6)
    # Errors of weights move the output by shares of sum p |v|, which |out| may be far below. Weights are as good as the
    # exponentials, and in a merge as fp32 resolves the lse.
    _, size = truth(case)
    bound = 1e-6 + 2.4e-7 * whole.lse.abs()
    assert ((merged.out - whole.out).abs() <= bound[..., None] * size).all()
    assert torch.equal(whole.out.to(case.q.dtype), backend.attend())


@pytest.mark.parametrize("dim", [32, 128])
def test_what_came_before_changes_no_probability(isa: str, threads_kept: None, dim: int) -> None:
    """A chunk after one with greater scores, and alone: its 64,000 probabilities are rounded to the same numbers."""
    rows, generator = 1000, torch.Generator().manual_seed(dim)
    tree = Tree(generator, 1, 2, False)
    tree.row_counts = [rows]
    case = make_case(tree, 1, 1, dim, torch.bfloat16, positions=torch.full((rows,), 2 * CHUNK - 1))
    bias = torch.zeros(1, 2 * CHUNK)
    bias[:, :CHUNK] = 3.7
    backend = Backend("cpu", replace(case, bias=bias))
    whole = cpu.states_of(backend.partial(case.items))
    merged = cpu.merge_states(*(cpu.states_of(backend.partial(case.items[i : i + 1])) for i in range(2)))
    close(merged, whole, 2e-6)


def close(got: AttnState, want: AttnState, tolerance: float) -> None:
    assert torch.equal(got.lse == -torch.inf, want.lse == -torch.inf)
    torch.testing.assert_close(got.lse, want.lse, rtol=tolerance, atol=tolerance)
    size = want.out.abs().amax(-1, keepdim=True) + 1e-30
    assert ((got.out - want.out).abs() <= tolerance * size).all()


@SHARED_FIXTURE
@given(st.integers(0, 2**32), st.integers(1, 40), st.sampled_from([8, 20, 64, 128]), st.sampled_from([1.0, 40.0, 1e4]))
def test_merge_is_that_of_the_algebra(isa: str, seed: int, rows: int, dim: int, size: float) -> None:
    """In some rows either state is EMPTY, in some both; EMPTY changes no bit of the other."""
    generator = torch.Generator().manual_seed(seed)

    def random() -> AttnState:
        gone = torch.rand(rows, 3, generator=generator) < 0.3
        out = torch.randn(rows, 3, dim, generator=generator).masked_fill(gone[..., None], 0.0)
        return AttnState(out, (size * torch.randn(rows, 3, generator=generator)).masked_fill(gone, -torch.inf))

    left, right = random(), random()
    got, want = cpu.merge_states(left, right), state.merge_states(left, right)
    close(got, want, 1e-6)
    for one, other in ((left, right), (right, left)):
        alone = other.lse == -torch.inf
        assert torch.equal(got.out[alone], one.out[alone]) and torch.equal(got.lse[alone], one.lse[alone])


def test_rows_that_met_nothing_are_empty(isa: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        nothing = cpu.states_of(cpu.empty_running(3, 2, 32, dtype))
        assert not nothing.out.any() and bool((nothing.lse == -torch.inf).all())


def test_refuses_states_that_do_not_fit() -> None:
    case = clean(make_case(Tree(torch.Generator().manual_seed(4), 2, 2, True), 2, 1, 32, torch.bfloat16))
    for name in ("cpu", "reference"):
        backend = Backend(name, case)
        with pytest.raises(ValueError, match="rows, heads and head size"):
            backend.partial(case.items, backend.kernels.empty_running(len(case.q) + 1, 2, 32, torch.bfloat16))
    foreign = state.empty_running(len(case.q), 2, 32, unit=0.5)
    for kernels in (cpu, reference):
        with pytest.raises(ValueError, match=r"counts in 0\.5000 natural logarithms"):
            kernels.partial(case.q, case.pool, case.mask, foreign)
    begun = replace(foreign, block_of=torch.zeros_like(foreign.block_of))
    with pytest.raises(ValueError, match="begins behind the left one's"):
        state.merge_blocks(begun, begun)
    with pytest.raises(ValueError, match="acc must be"):
        half = replace(foreign.total, acc=foreign.total.acc.half())
        cpu.finish(replace(foreign, total=half), torch.float32)
    with pytest.raises(ValueError, match=r"right\.lse must be"):
        good = state.empty(3, 2, 32)
        cpu.merge_states(good, AttnState(good.out, good.lse[:2]))
    before = cpu.isa()
    cpu.use_isa("portable")
    try:
        with pytest.raises(ValueError, match="finish it with avx512bf16"):
            cpu.finish(state.empty_running(3, 2, 32, LOG_2), torch.float32)
    finally:
        cpu.use_isa(before)
