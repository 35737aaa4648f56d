"""Ring pass-Q's states are those of one rank to the bit, whoever owns which chunk."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import AttentionSpec
from headrace.parallel.messages import StepGroup, StepPart
from headrace.parallel.split_blocks import split_blocks, stretches
from headrace.types import BLOCK_CHUNKS, CHUNK, chunks_for
from tests.support.loopback_ranks import zigzag
from tests.support.pass_q import PassQ

SPEC = AttentionSpec(layers=1, heads=4, kv_heads=2, head_dim=32, scale=0.2, windows=(None,))
TOKENS, SLOTS = 5000, 80


def placed(owners: list[int], slots: int = SLOTS) -> list[int]:
    """Slots of chunks on these ranks, from each rank's first on."""
    return [owner * slots + owners[:chunk].count(owner) for chunk, owner in enumerate(owners)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_prompt(size: int, dtype: Any) -> None:
    torch.manual_seed(1)
    shape = ((TOKENS, SPEC.heads, 32), (TOKENS, SPEC.kv_heads, 32), (TOKENS, SPEC.kv_heads, 32))
    new = [torch.randn(each).to(dtype) for each in shape]
    chunks = range(chunks_for(TOKENS))
    for owners in ([chunk // BLOCK_CHUNKS % size for chunk in chunks], [chunk // 9 % size for chunk in chunks]):
        part = StepPart([0] * TOKENS, 0, placed(owners), *zigzag(0, TOKENS, size), TOKENS)
        case = PassQ(size, SLOTS, StepGroup("ring-q", [part]), SPEC, new)
        assert torch.equal(case.found(), case.truth())


def sequences(random: Random, size: int) -> list[StepPart]:
    """That share chunks as those of a tree do. Owners change often or seldom; new tokens begin anywhere."""
    used = [0] * size

    def grown(slots: list[int], count: int) -> list[int]:
        owner, stays = random.randrange(size), random.choice([1, 3, 20])
        for _ in range(count):
            owner = random.randrange(size) if random.randrange(stays) == 0 else owner
            used[owner] += 1
            slots = [*slots, owner * SLOTS + used[owner] - 1]
        return slots

    parts: list[StepPart] = []
    for _ in range(random.randint(1, 4)):
        other = random.choice([part.slots[: part.start // CHUNK] for part in parts] or [[]])
        shared = other[: random.randint(0, len(other))]
        start = CHUNK * len(shared) + random.choice([0, 5, CHUNK - 1, CHUNK, 700, 2100])
        count = random.choice([1, 1, 2, 70, 200])
        slots = grown(shared, chunks_for(start + count) - len(shared))
        if max(used) > SLOTS:
            break
        bounds = sorted([start, *(random.randint(start, start + count) for _ in range(size - 1)), start + count])
        parts.append(StepPart([0] * count, start, slots, bounds, random.sample(range(size), size), count))
    return parts


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(2, 4),
    window=st.sampled_from([None, 40, 900]),
    kv=st.sampled_from([None, torch.int8]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    backend=st.sampled_from(["cpu", "cpu", "cpu", "reference"]),
)
def test_whoever_owns_the_chunks(seed: int, size: int, window: int | None, kv: Any, dtype: Any, backend: str) -> None:
    """Several sequences with common chunks, decoded or prefilled by any ranks."""
    parts = sequences(Random(seed), size)
    count = sum(len(part.tokens) for part in parts)
    g = torch.Generator().manual_seed(seed)
    new = [torch.randn(count, heads, 32, generator=g).to(dtype) for heads in (SPEC.heads, *[SPEC.kv_heads] * 2)]
    cached = [torch.randn(size * SLOTS * CHUNK, SPEC.kv_heads, 32, generator=g).to(dtype) for _ in range(2)]
    spec = replace(SPEC, windows=(window,))
    case = PassQ(size, SLOTS, StepGroup("ring-q", parts), spec, new, cached, kv, backend)
    assert torch.equal(case.found(), case.truth())


def test_stretches_are_counted_in_each_block() -> None:
    owners = np.array([0] * 3 + [1] * 40 + [0, 1] * 12 + [2], dtype=np.int32)
    numbers = stretches(owners).tolist()
    assert numbers[:BLOCK_CHUNKS] == [0] * 3 + [1] * 29
    assert numbers[BLOCK_CHUNKS : 2 * BLOCK_CHUNKS] == [0] * 11 + list(range(1, 22))
    assert numbers[2 * BLOCK_CHUNKS :] == [0, 1, 2, 3]


def test_only_split_blocks_are_named() -> None:
    whole = [0] * BLOCK_CHUNKS + [1] * BLOCK_CHUNKS + [2] * 3
    slots = [placed(whole), placed([*whole, 1]), placed([0, 1])]
    parts = [StepPart([0], CHUNK * len(each) - 1, each, [], []) for each in slots]
    assert split_blocks(StepGroup("ring-q", parts), SLOTS) == {1: {2}, 2: {0}}
