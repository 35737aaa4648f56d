"""AttnState, merge and the reference backend against plain softmax in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.attention.plan import Span, build
from headrace.kernels import reference
from headrace.kernels.records import Mask, Pool
from headrace.kernels.state import (
    AttnState,
    Partial,
    empty,
    empty_partial,
    empty_running,
    merge_partials,
    merge_states,
    normalise,
)
from headrace.types import BLOCK_CHUNKS, CHUNK

HEADS, DIM = 2, 8


def softmax_state(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttnState:
    """Plain attention of q [T, H, D] over keys k, v [n, H, D] in fp64, all visible."""
    scores = torch.einsum("thd,nhd->thn", q.double(), k.double())
    lse = torch.logsumexp(scores, -1) if len(k) else torch.full(scores.shape[:2], -torch.inf, dtype=torch.float64)
    out = torch.einsum("thn,nhd->thd", torch.softmax(scores, -1), v.double())
    return AttnState(out.float(), lse.float())


def close(left: AttnState, right: AttnState, tolerance: float = 1e-5) -> None:
    assert torch.equal(left.lse == -torch.inf, right.lse == -torch.inf)
    torch.testing.assert_close(left.out, right.out, rtol=tolerance, atol=tolerance)
    seen = left.lse > -torch.inf
    torch.testing.assert_close(left.lse[seen], right.lse[seen], rtol=tolerance, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 1000), st.sampled_from([1.0, 30.0]))
def test_merged_segments_are_the_whole(sizes: list[int], seed: int, size: float) -> None:
    """Any cut into segments, empty ones too, in any order of merging; large scores do not overflow."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(3, HEADS, DIM, generator=g) * size
    k, v = torch.randn(sum(sizes), HEADS, DIM, generator=g), torch.randn(sum(sizes), HEADS, DIM, generator=g)
    parts = [softmax_state(q, kk, vv) for kk, vv in zip(k.split(sizes), v.split(sizes), strict=True)]
    left, right = empty(3, HEADS, DIM), empty(3, HEADS, DIM)
    for part in parts:
        left = merge_states(left, part)
    for part in reversed(parts):
        right = merge_states(part, right)
    close(left, softmax_state(q, k, v), 1e-4)
    close(right, softmax_state(q, k, v), 1e-4)


def test_empty_is_neutral_to_the_bit() -> None:
    q, k = torch.randn(3, HEADS, DIM), torch.randn(5, HEADS, DIM)
    state, nothing = softmax_state(q, k, k), empty(3, HEADS, DIM)
    for merged in (merge_states(state, nothing), merge_states(nothing, state)):
        assert torch.equal(merged.out, state.out) and torch.equal(merged.lse, state.lse)
    both = merge_states(nothing, nothing)
    assert torch.equal(both.out, nothing.out) and torch.equal(both.lse, nothing.lse)
    partial = Partial(state.out, state.lse, torch.ones(3, HEADS))
    merged = merge_partials(partial, empty_partial(3, HEADS, DIM))
    assert all(torch.equal(a, b) for a, b in [(merged.acc, partial.acc), (merged.m, partial.m), (merged.l, partial.l)])
    close(normalise(empty_partial(3, HEADS, DIM)), nothing)


def pools(tokens: int, kv_heads: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Keys and values [tokens, Hk, D] and the pools that hold them in slots 0, 1, ...; unwritten places are large."""
    g = torch.Generator().manual_seed(seed)
    chunks = -(-tokens // CHUNK)
    k, v = (torch.randn(tokens, kv_heads, DIM, generator=g).to(dtype) for _ in range(2))
    pool_k = torch.full((chunks, kv_heads, DIM, CHUNK), 1e4, dtype=dtype)
    pool_v = torch.full((chunks, kv_heads, CHUNK, DIM), 1e4, dtype=dtype)
    for t in range(tokens):
        pool_k[t // CHUNK, :, :, t % CHUNK] = k[t]
        pool_v[t // CHUNK, :, t % CHUNK] = v[t]
    return k, v, pool_k, pool_v


def truth(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: list[int],
    scale: float,
    window: int | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention in fp64, row by row."""
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    rows = []
    for row, position in zip(q.double(), positions, strict=True):
        low = 0 if window is None else max(0, position - window + 1) if window > 0 else position // -window * -window
        scores = torch.einsum("hd,nhd->hn", row, k[low : position + 1]) * scale
        if bias is not None:
            scores = scores + bias[:, low : position + 1].double()
        rows.append(torch.einsum("hn,nhd->hd", torch.softmax(scores, -1), v[low : position + 1]))
    return torch.stack(rows)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 30, 64, 100, -1, -50, -128])
@pytest.mark.parametrize("biased", [False, True])
def test_reference_agrees_with_plain_attention(kv_heads: int, window: int | None, biased: bool) -> None:
    k, v, pool_k, pool_v = pools(200, kv_heads, torch.float32)
    plan = build([Span(np.arange(4, dtype=np.int32), 120, 80)])
    q = torch.randn(80, 4, DIM)
    bias = torch.randn(4, 200) if biased else None
    items, positions = torch.from_numpy(plan.items_within(window)), torch.from_numpy(plan.positions)
    got = reference.attend(q, Pool(pool_k, pool_v), Mask(items, positions, scale=0.3, window=window, bias=bias))
    want = truth(q, k, v, plan.positions.tolist(), 0.3, window, bias)
    assert (got - want).abs().max() < 2e-6


@pytest.mark.parametrize("cut", [0, 1, 7, 32, 40])
def test_partial_states_of_two_segments_merge_to_the_whole(cut: int) -> None:
    _, _, pool_k, pool_v = pools(2600, 2, torch.bfloat16)
    plan = build([Span(np.arange(41, dtype=np.int32), 2560, 40)])
    q, positions = torch.randn(40, 4, DIM).bfloat16(), torch.from_numpy(plan.positions)
    near, far = (torch.from_numpy(items) for items in (plan.items[:cut], plan.items[cut:]))
    pool = Pool(pool_k, pool_v)
    parts = [reference.partial(q, pool, Mask(part, positions, scale=0.3)) for part in (near, far)]
    whole = reference.partial(q, pool, Mask(torch.from_numpy(plan.items), positions, scale=0.3))
    close(merge_states(*map(reference.states_of, parts)), reference.states_of(whole), 1e-6)


def test_bf16_error_is_that_of_rounding_probabilities() -> None:
    k, v, pool_k, pool_v = pools(3000, 2, torch.bfloat16)
    plan = build([Span(np.arange(47, dtype=np.int32), 2990, 10)])
    q = torch.randn(10, 4, DIM).bfloat16()
    mask = Mask(torch.from_numpy(plan.items), torch.from_numpy(plan.positions), scale=0.35)
    got = reference.attend(q, Pool(pool_k, pool_v), mask)
    want = truth(q, k, v, plan.positions.tolist(), 0.35, None, None)
    relative = ((got - want).norm() / want.norm()).item()
    assert relative < 4e-3, relative


def test_merges_chunks_into_blocks_and_blocks_into_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canonical order, spelled out: the rows must give these very bits."""
    rows, chunks = 3, 2 * BLOCK_CHUNKS + 5
    parts = [
        Partial(torch.randn(rows, HEADS, DIM), torch.randn(rows, HEADS), torch.rand(rows, HEADS)) for _ in range(chunks)
    ]
    running = reference.RunningRows(empty_running(rows, HEADS, DIM))
    for index, part in enumerate(parts):
        running.add(0, rows, index * CHUNK, part)
    total = empty_partial(rows, HEADS, DIM)
    for first in range(0, chunks, BLOCK_CHUNKS):
        block = empty_partial(rows, HEADS, DIM)
        for part in parts[first : first + BLOCK_CHUNKS]:
            block = merge_partials(block, part)
        total = merge_partials(total, block)
    assert torch.equal(reference.states_of(running.state()).out, normalise(total).out)
    assert torch.equal(reference.states_of(running.state()).lse, normalise(total).lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_shared(dtype: torch.dtype) -> None:
    _, _, pool_k, pool_v = pools(900, 2, dtype)
    q = torch.randn(40, 4, DIM).to(dtype)
    own = [np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9 + i % 5], dtype=np.int32) for i in range(40)]
    spans = [Span(own[i], 10 * CHUNK + i % 64, 1) for i in range(40)]
    together = run(spans, q, pool_k, pool_v)
    for i in range(40):
        assert torch.equal(run(spans[i : i + 1], q[i : i + 1], pool_k, pool_v)[0], together[i])


def run(spans: list[Span], q: torch.Tensor, pool_k: torch.Tensor, pool_v: torch.Tensor) -> torch.Tensor:
    plan = build(spans)
    mask = Mask(torch.from_numpy(plan.items), torch.from_numpy(plan.positions), scale=0.3)
    return reference.attend(q, Pool(pool_k, pool_v), mask)
