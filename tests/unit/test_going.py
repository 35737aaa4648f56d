"""Which steps go on from the one before. (tests/unit/test_scheduler.py asks the same of whole runs.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.engine.decode_fast_path import DecodeFastPath
from headrace.engine.sequence import SequenceState, Slice
from headrace.kernels.model_step import Greatest
from headrace.kv.cache import KVCache
from headrace.types import Request, SamplingParams


class Echo:
    """A ModelStep that says what it was given."""

    def run_next(self, tokens: list[int]) -> Greatest:
        return Greatest([0.0] * len(tokens), tokens)


def decoding(cache: KVCache, number: int) -> SequenceState:
    """A sequence of 11 tokens, the last one of them not in the cache."""
    sequence = SequenceState(Request(str(number), list(range(number, number + 11)), SamplingParams()), 0, number)
    sequence.table = cache.open(sequence.tokens)
    assert cache.extend(sequence.table, 10, None)
    return sequence


def slices(cache: KVCache, sequences: list[SequenceState]) -> list[Slice]:
    """A step of one token each."""
    for each in sequences:
        assert each.table is not None and cache.grow(each.table)
    return [Slice(each, each.computed - 1, 1) for each in sequences]


def sampled(sequences: list[SequenceState]) -> None:
    for each in sequences:
        each.tokens.append(each.order * 1000 + len(each.tokens))


@pytest.fixture
def start() -> tuple[KVCache, list[SequenceState], DecodeFastPath]:
    cache = KVCache(40)
    sequences = [decoding(cache, 100), decoding(cache, 200)]
    going = DecodeFastPath(Echo(), slices(cache, sequences), [1, 0])  # type: ignore[arg-type]
    sampled(sequences)
    return cache, sequences, going


def test_steps_that_go_on(start: tuple[KVCache, list[SequenceState], DecodeFastPath]) -> None:
    cache, sequences, going = start
    for step in range(5):
        parts = slices(cache, sequences)
        tokens = going.tokens(parts)
        assert tokens == [200_011 + step, 100_011 + step]
        greatest, of = going.run(tokens, parts)
        assert greatest.tokens == tokens and of == [(parts[1], range(1)), (parts[0], range(1, 2))]
        sampled(sequences)


def other_order(cache: KVCache, parts: list[Slice]) -> list[Slice]:
    return parts[::-1]


def one_fewer(cache: KVCache, parts: list[Slice]) -> list[Slice]:
    return parts[:1]


def two_tokens(cache: KVCache, parts: list[Slice]) -> list[Slice]:
    return [parts[0], parts[1]._replace(length=2)]


def not_the_next(cache: KVCache, parts: list[Slice]) -> list[Slice]:
    parts[0].sequence.tokens.append(7)
    return [parts[0]._replace(start=parts[0].start + 1), parts[1]]


def not_the_last(cache: KVCache, parts: list[Slice]) -> list[Slice]:
    parts[0].sequence.tokens.append(7)
    return parts


def another_like_it(cache: KVCache, parts: list[Slice]) -> list[Slice]:
    twin = decoding(cache, 300)
    sampled([twin])
    assert twin.table is not None and parts[0].sequence.table is not None
    cache.grow(twin.table)
    cache.grow(twin.table)
    assert twin.table.changes == parts[0].sequence.table.changes
    return [Slice(twin, parts[0].start, 1), parts[1]]


def other_chunk(cache: KVCache, parts: list[Slice]) -> list[Slice]:
    table = parts[0].sequence.table
    assert table is not None
    table.replace(0, table.nodes[0])
    return parts


@pytest.mark.parametrize(
    "change", [other_order, one_fewer, two_tokens, not_the_next, not_the_last, another_like_it, other_chunk]
)
def test_steps_that_do_not(
    start: tuple[KVCache, list[SequenceState], DecodeFastPath], change: Callable[[KVCache, list[Slice]], Any]
) -> None:
    cache, sequences, going = start
    assert going.tokens(change(cache, slices(cache, sequences))) is None


def test_the_end_of_a_chunk(start: tuple[KVCache, list[SequenceState], DecodeFastPath]) -> None:
    cache, sequences, going = start
    for _ in range(53):
        parts = slices(cache, sequences)
        tokens = going.tokens(parts)
        assert tokens is not None
        going.run(tokens, parts)
        sampled(sequences)
    for each in sequences:
        assert each.table is not None and not cache.grow(each.table) and cache.extend(each.table, 1, None)
    assert going.tokens([Slice(each, each.computed - 1, 1) for each in sequences]) is None
