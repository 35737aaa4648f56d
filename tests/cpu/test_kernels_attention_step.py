"""Append and attend of a step in one call: the bits of the two calls, and the same refusals.

T: rows; Hq, Hkv: query and KV heads; D: head size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels import cpu
from headrace.kernels.cpu_step import Step
from headrace.kernels.records import Mask, Pool, StepInputs

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason())),
]
HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 32, 5


def pool_of(dtype: torch.dtype) -> Pool:
    g = torch.Generator().manual_seed(0)
    k = torch.randn(SLOTS, KV_HEADS, DIM, 64, generator=g).to(dtype)
    v = torch.randn(SLOTS, KV_HEADS, 64, DIM, generator=g).to(dtype)
    return cpu.arrange(Pool(k, v))


def indices() -> dict[str, Any]:
    """Two sequences: one at positions 70 and 71 of slots 3 and 1, one at position 5 of slot 4."""
    items = torch.tensor([[3, 0, 0, 2], [1, 64, 0, 2], [4, 0, 2, 3]], dtype=torch.int32)
    return dict(
        items={None: items, 7: items[1:]},
        positions=torch.tensor([70, 71, 5]),
        slots=torch.tensor([1, 1, 4], dtype=torch.int32),
        offsets=torch.tensor([6, 7, 5], dtype=torch.int32),
    )


def step(dtype: torch.dtype = torch.float32, **changed: Any) -> Step:
    facts: dict[str, Any] = dict(heads=HEADS, shape=(SLOTS, KV_HEADS, DIM), dtype=dtype, scale=0.2)
    return Step(StepInputs(**indices() | facts | changed))


def rows(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v; q and v are views, rows apart by different lengths."""
    g = torch.Generator().manual_seed(1)
    wide = torch.randn(3, HEADS + 2 * KV_HEADS, DIM, generator=g).to(dtype)
    q, k, _ = wide.split((HEADS, KV_HEADS, KV_HEADS), 1)
    return q, k.contiguous(), torch.randn(3, 7, DIM, generator=g).to(dtype)[:, 1 : 1 + KV_HEADS]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_two_calls(isa: str, dtype: torch.dtype, window: int | None, biased: bool) -> None:
    bias = torch.randn(HEADS, 100, generator=torch.Generator().manual_seed(2)) if biased else None
    q, k, v = rows(dtype)
    ours, theirs, at = pool_of(dtype), pool_of(dtype), indices()
    cpu.append(theirs, k, v, at["slots"], at["offsets"])
    want = cpu.attend(q, theirs, Mask(at["items"][window], at["positions"], scale=0.2, window=window, bias=bias))
    assert torch.equal(step(dtype, bias=bias)(ours, q, k, v, window), want)
    assert torch.equal(ours.k, theirs.k) and torch.equal(ours.v, theirs.v)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(slots=torch.tensor([1, 5, 4], dtype=torch.int32)), "row 1 goes to slot 5"),
        (dict(offsets=torch.tensor([1, 64, 4], dtype=torch.int32)), "offset 64"),
        (dict(items={None: torch.tensor([[5, 0, 0, 1]], dtype=torch.int32)}), "items"),
        (dict(items={None: torch.tensor([[0, 0, 0, 4]], dtype=torch.int32)}), "items"),
        (dict(items={None: torch.tensor([[0, 0, 0, 1]])}), "items must be"),
        (dict(positions=torch.tensor([1, 2])), "slots must be"),
        (dict(positions=torch.tensor([1, 2, 3], dtype=torch.int32)), "positions must be"),
        (dict(bias=torch.zeros(HEADS, 71)), "bias covers 71 keys"),
        (dict(bias=torch.zeros(HEADS, 80).double()), "bias must be"),
        (dict(dtype=torch.float16), "float16"),
    ],
)
def test_indices_that_do_not_fit(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step(**changed)


@pytest.mark.parametrize("biased", [False, True])
def test_the_next_step_gives_the_bits_of_a_new_one(isa: str, biased: bool) -> None:
    bias = torch.randn(HEADS, 100, generator=torch.Generator().manual_seed(2)) if biased else None
    places = dict(positions=torch.tensor([72, 73, 6]), offsets=torch.tensor([8, 9, 6], dtype=torch.int32))
    ours, theirs, at = pool_of(torch.bfloat16), pool_of(torch.bfloat16), rows(torch.bfloat16)
    moved, new = step(torch.bfloat16, bias=bias), step(torch.bfloat16, bias=bias, **places)
    for name, wrong in (("positions", places["positions"] + 92), ("offsets", places["offsets"] + 60)):
        if name == "offsets" or biased:
            with pytest.raises(ValueError, match=r"covers 100 keys|offset 68"):
                moved.go_on(**places | {name: wrong})
    with pytest.raises(ValueError, match="positions must be"):
        moved.go_on(places["positions"][:2], places["offsets"])
    old = step(torch.bfloat16, bias=bias)
    for window in (None, 7):
        assert torch.equal(moved(ours, *at, window), old(theirs, *at, window)), "a refusal changed something"
    moved.go_on(**places)
    for window in (None, 7):
        assert torch.equal(moved(ours, *at, window), new(theirs, *at, window))
    assert torch.equal(ours.k, theirs.k) and torch.equal(ours.v, theirs.v)


def test_items_that_have_left_a_window_change_nothing(isa: str) -> None:
    """Two rows see 7 keys back: first some of the chunk before theirs, then none of it."""
    items, ours, theirs = indices()["items"][None], pool_of(torch.bfloat16), pool_of(torch.bfloat16)
    here = dict(positions=torch.tensor([66, 67, 5]), offsets=torch.tensor([2, 3, 5], dtype=torch.int32))
    there = dict(positions=torch.tensor([70, 71, 6]), offsets=torch.tensor([6, 7, 6], dtype=torch.int32))
    moved, at = step(torch.bfloat16, items={7: items}, **here), rows(torch.bfloat16)
    without = step(torch.bfloat16, items={7: items[1:]}, **here)
    assert not torch.equal(moved(ours, *at, 7), without(theirs, *at, 7))
    moved.go_on(**there)
    new = step(torch.bfloat16, items={7: items[1:]}, **there)
    assert torch.equal(moved(ours, *at, 7), new(theirs, *at, 7))


def test_tensors_that_do_not_fit() -> None:
    pool, (q, k, v) = pool_of(torch.float32), rows(torch.float32)
    run = step()
    for bad in (replace(pool, k=pool.k[:4]), replace(pool, v=pool.v.bfloat16())):
        with pytest.raises(ValueError, match="_pool must be"):
            run(bad, q, k, v, None)
    for name, wrong in (("q", (q[:2], k, v)), ("q", (q.double(), k, v)), ("k", (q, q, v)), ("v", (q, k, v[:, :1]))):
        with pytest.raises(ValueError, match=f"^{name} must be"):
            run(pool, *wrong, None)
    with pytest.raises(ValueError, match="each row must be contiguous"):
        run(pool, q.transpose(0, 1).contiguous().transpose(0, 1), k, v, None)
