"""The cache by examples: what is shared, kept, waited for and kept apart."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kv.accounts import mark_of
from headrace.kv.cache import KVCache
from headrace.kv.chunk_table import ChunkTable
from headrace.kv.pool import SlotPool
from headrace.types import CHUNK, chunks_for


def filled(cache: KVCache, tokens: list[int], **options: Any) -> ChunkTable:
    """A table with all of its tokens cached."""
    table = cache.open(tokens, **options)
    cache.reuse(table)
    assert cache.extend(table, len(tokens) - table.length)
    cache.commit()
    return table


def sentence(chunks: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(1000) for _ in range(chunks * CHUNK + 1)]


def test_prefix_survives_its_last_request_and_lru_leaves_go_first() -> None:
    cache = KVCache(6)
    cache.close(filled(cache, sentence(2, seed=1)))
    cache.close(filled(cache, sentence(2, seed=2)))
    assert len(cache.tree.idle) == 4
    third = filled(cache, sentence(2, seed=3))
    assert cache.reuse(cache.open(sentence(2, seed=1)))[0] == CHUNK, "the leaf of the oldest went, its parent stayed"
    assert cache.reuse(cache.open(sentence(2, seed=2)))[0] == 2 * CHUNK
    assert third.length == 2 * CHUNK + 1
    cache.check()


def test_whom_tiers_count_a_chunk_for() -> None:
    """A tenant once, with all its salts; without a name the salt; nobody for what is public."""
    cache = KVCache(40)

    def payers(seed: int, **options: Any) -> list[bytes]:
        return [node.payer for node in filled(cache, sentence(2, seed), public_tokens=CHUNK, **options).nodes[:2]]

    assert payers(0) == payers(1, tenant="acme") == [b"", b""]
    one, two = payers(2, salt="a"), payers(3, salt="b")
    assert one[0] == two[0] == b"" and len({one[1], two[1], b""}) == 3
    for salt in ("a", "b"):
        assert payers(4, salt=salt, tenant="acme") == [b"", mark_of("acme")]


def test_last_token_is_always_left_to_compute() -> None:
    cache = KVCache(10)
    prompt = sentence(3)[:-1]
    cache.close(filled(cache, prompt))
    assert cache.reuse(cache.open(prompt)) == (2 * CHUNK, False)


def test_waits_for_the_chunk_not_for_the_request() -> None:
    cache = KVCache(40)
    prompt = sentence(8)
    writer, reader = cache.open(prompt), cache.open(list(prompt))
    cache.extend(writer, 3 * CHUNK + 10)
    assert cache.reuse(reader) == (3 * CHUNK, True), "complete chunks at once, then wait for the fourth"
    cache.extend(writer, 2 * CHUNK)
    assert cache.reuse(reader) == (2 * CHUNK, True)
    cache.close(writer)
    assert cache.reuse(reader) == (0, False), "the writer is gone: the reader writes on"
    assert cache.extend(reader, len(prompt) - reader.length)
    cache.check()


def test_twins_that_fill_the_same_chunk_while_decoding_end_up_sharing_it() -> None:
    cache = KVCache(40)
    one, two = filled(cache, sentence(1)), filled(cache, sentence(1))
    for table in (one, two):
        for _ in range(CHUNK - 1):
            table.tokens.append(5)
            cache.extend(table, 1)
    cache.commit()
    assert one.slots.tolist() == two.slots.tolist()
    assert cache.used == 2 and cache.unshared == 4
    cache.check()


@pytest.mark.parametrize(("public", "shared"), [(0, 0), (63, 0), (64, 1), (200, 3), (100000, 4)])
def test_salt_separates_tenants_after_the_public_prefix(public: int, shared: int) -> None:
    cache = KVCache(40)
    prompt = sentence(4)
    filled(cache, prompt, salt="a", public_tokens=public)
    other = cache.open(list(prompt), salt="b", public_tokens=public)
    assert cache.reuse(other)[0] == shared * CHUNK
    same = cache.open(list(prompt), salt="a", public_tokens=public)
    assert cache.reuse(same)[0] == 4 * CHUNK
    plain = cache.open(list(prompt))
    assert cache.reuse(plain)[0] == shared * CHUNK


def test_identity_and_namespace_separate() -> None:
    cache = KVCache(40)
    filled(cache, sentence(2))
    assert cache.reuse(cache.open(sentence(2), namespace="length 129"))[0] == 0
    other = KVCache(40, identity=b"another model")
    assert other.open(sentence(2)).digest(0) != cache.open(sentence(2)).digest(0)


TABLES = st.tuples(
    st.lists(st.sampled_from([0, 1]), min_size=1, max_size=4),
    st.integers(0, 63),
    st.sampled_from([{}, {"salt": "a"}, {"salt": "b"}, {"salt": "a", "public_tokens": 128}, {"namespace": "length 9"}]),
)


@given(st.lists(TABLES, min_size=2, max_size=5), st.sets(st.integers(0, 4)))
def test_names_are_those_of_a_table_alone(tables: list[tuple[list[int], int, dict[str, Any]]], ended: set[int]) -> None:
    """Whatever table was opened before, and whether it is still open."""
    cache = KVCache(40)
    for number, (chunks, rest, keywords) in enumerate(tables):
        tokens = [kind * 1000 + i for kind in chunks for i in range(CHUNK)] + [7] * rest
        table, alone = cache.open(list(tokens), **keywords), KVCache(40).open(list(tokens), **keywords)
        table.tokens.extend([5] * CHUNK)
        alone.tokens.extend([5] * CHUNK)
        names = [alone.digest(chunk) for chunk in range(len(chunks) + 1)]
        assert [table.digest(chunk) for chunk in range(len(chunks) + 1)] == names
        if number in ended:
            cache.close(table)


@pytest.mark.parametrize("held", range(7))
@pytest.mark.parametrize("cached", range(7))
def test_a_table_costs_what_no_other_holds(held: int, cached: int) -> None:
    """Of 7 chunks `cached` are in the tree, and some of them, or more, are held by another table."""
    cache, tokens = KVCache(40), list(range(6 * CHUNK + 5))
    cache.close(filled(cache, tokens[: cached * CHUNK + 1]))
    filled(cache, tokens[: held * CHUNK + 1])
    assert cache.cost(cache.open(tokens)) == 7 - held


def test_no_sharing_when_off() -> None:
    cache = KVCache(40)
    filled(cache, sentence(2), shares=False)
    second = filled(cache, sentence(2), shares=False)
    assert second.length and cache.used == 6 and not cache.tree.nodes
    assert chunks_for(len(sentence(2))) == 3


def test_pool_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="kv_cache_tokens"):
        SlotPool(0)
    pool = SlotPool(2)
    slot = pool.take()
    assert slot is not None
    pool.give(slot)
    with pytest.raises(ValueError, match="twice"):
        pool.give(slot)


def test_a_mark_names_its_chunk_and_those_behind_it() -> None:
    cache, prompt = KVCache(60), sentence(4)
    one, other = bytes([1] * 16), bytes([2] * 16)

    def names(**options: Any) -> list[bytes]:
        table = cache.open(list(prompt), **options)
        return [table.digest(chunk) for chunk in range(4)]

    plain = names()
    for start in range(4):
        marked = names(mark=(one, start))
        assert [mine == its for mine, its in zip(marked, plain, strict=True)] == [chunk < start for chunk in range(4)]
        assert marked == names(mark=(one, start)) and marked[start] != names(mark=(other, start))[start]
        assert names() == plain, "names are borrowed from the table before, and not those behind a mark"
    assert len({tuple(names(salt=salt, mark=(mark, 0))) for salt in "ab" for mark in (one, other)}) == 4
    salted = names(salt="a", mark=(one, 2))
    assert salted != names(salt="a") and salted[:2] == names(salt="a")[:2] and salted[2] != names(mark=(one, 2))[2]


MARK = bytes(range(16))


def test_chunks_of_a_mark_are_met_by_it_alone() -> None:
    cache, prompt = KVCache(60), sentence(4)
    cache.close(filled(cache, list(prompt), mark=(MARK, 2)))
    assert cache.reuse(cache.open(list(prompt))) == (2 * CHUNK, False)
    assert cache.reuse(cache.open(list(prompt), mark=(MARK, 2))) == (4 * CHUNK, False)
    assert cache.reuse(cache.open(list(prompt), mark=(MARK, 0))) == (0, False)
    cache.check()
