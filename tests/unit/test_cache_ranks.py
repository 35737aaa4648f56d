"""Owners of chunks: where a cache of several ranks puts them, and that a cache of one rank does what it always did."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kv.cache import KVCache
from headrace.kv.chunk_table import ChunkTable, Owners
from headrace.kv.pool import SlotPool
from headrace.kv.tree import PrefixTree
from headrace.types import BLOCK_CHUNKS, CHUNK


def cache_of(per_rank: int, ranks: int, block: int = BLOCK_CHUNKS) -> KVCache:
    cache = KVCache(per_rank * ranks, ranks=ranks)
    cache.block_chunks = block
    return cache


def sentence(chunks: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(1000) for _ in range(chunks * CHUNK)]


def filled(cache: KVCache, tokens: list[int], owners: Owners | None = None, **options: Any) -> ChunkTable:
    """A table with all of its tokens cached; the last one is always computed."""
    table = cache.open(tokens, shares=options.pop("shares", True))
    cache.reuse(table)
    assert cache.extend(table, len(tokens) - table.length, owners, **options)
    cache.commit()
    cache.check()
    return table


def owners_of(table: ChunkTable) -> list[int]:
    return [table.owner(chunk) for chunk in range(len(table.nodes))]


def on(rank: int) -> Owners:
    return lambda chunk: rank


def test_pool_gives_each_rank_its_part() -> None:
    pool = SlotPool(6, ranks=3)
    assert [pool.rank_of(slot) for slot in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [pool.take(1), pool.take(1), pool.take(1)] == [2, 3, None]
    assert [pool.free_of(rank) for rank in range(3)] == [2, 0, 2] and pool.free == 4
    assert [pool.take() for _ in range(5)] == [0, 4, 1, 5, None], "where most are free"
    pool.give(3)
    assert pool.take(0) is None and pool.take(1) == 3
    pool.check(set(range(6)))


@pytest.mark.parametrize(("total", "ranks", "message"), [(7, 2, "equal parts"), (8, 0, "at least one rank")])
def test_pool_refuses_parts_that_cannot_be(total: int, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCache(total, ranks=ranks)


def test_new_tables_begin_where_most_can_be_had_and_take_turns() -> None:
    cache = cache_of(100, 3)
    assert [filled(cache, sentence(2, seed)).owner(0) for seed in range(6)] == [0, 1, 2, 0, 1, 2]
    filled(cache, sentence(1, seed=6), on(0))
    filled(cache, sentence(1, seed=7), on(1))
    assert filled(cache, sentence(1, seed=8)).owner(0) == 2
    assert [cache.available_on(rank) for rank in range(3)] == [95, 95, 95] and cache.available == 285


def test_new_tables_take_what_is_free_before_what_is_idle() -> None:
    cache = cache_of(4, 3)
    first = []
    for seed in range(6):
        table = filled(cache, sentence(2, seed))
        first.append(table.owner(0))
        cache.close(table)
    assert first == [0, 1, 2, 0, 1, 2] and not cache.tree.evictions and not cache.pool.free
    for seed in range(6, 9):
        table = filled(cache, sentence(2, seed))
        first.append(table.owner(0))
        cache.close(table)
    assert first[6:] == [0, 1, 2], "in turn where all is equal"


def test_a_table_stays_on_its_rank_while_that_has_room_for_a_block_and_then_rotates() -> None:
    cache = cache_of(10, 3, block=4)
    held = filled(cache, sentence(1, seed=1), on(2), shares=False)
    table = filled(cache, sentence(20), shares=False)
    assert owners_of(table) == [0] * 8 + [1] * 4 + [2] * 4 + [1] * 4 and not cache.displaced
    assert held.owner(0) == 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_owners_and_place_are_asked_at_the_first_chunk_of_a_block(ranks: int) -> None:
    cache = cache_of(3 * BLOCK_CHUNKS, ranks)
    asked: list[int] = []

    def last(chunk: int) -> int:
        asked.append(chunk)
        return ranks - 1

    table = filled(cache, sentence(2 * BLOCK_CHUNKS + 1), last)
    assert owners_of(table) == [ranks - 1] * (2 * BLOCK_CHUNKS + 1)
    assert asked == ([0, 32, 64] if ranks > 1 else []), "with one rank there is nothing to ask"
    other = cache.open(sentence(1, seed=1))
    other.place = on(0)
    assert cache.extend(other, 10, last if ranks == 2 else None)
    assert other.owner(0) == (1 if ranks == 2 else 0), "owners go before place"


def test_owners_for_each_chunk() -> None:
    cache = cache_of(20, 2)
    table = filled(cache, sentence(6), lambda chunk: chunk % 2, by_block=False)
    assert owners_of(table) == [0, 1, 0, 1, 0, 1] and not cache.displaced


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_does_not_exist_is_refused_before_anything_changes(rank: int) -> None:
    cache = cache_of(40, 2)
    table = cache.open(sentence(40))
    with pytest.raises(ValueError, match="ranks 0 to 1"):
        cache.extend(table, 40 * CHUNK, lambda chunk: rank if chunk else 0)
    assert table.length == 0 and not table.nodes and cache.available == 80


def test_a_block_that_was_begun_stays_where_it_is() -> None:
    cache = cache_of(100, 2)
    first = filled(cache, sentence(3), on(1))
    other = filled(cache, sentence(2) + sentence(4, seed=5), on(0))
    assert owners_of(other) == [1] * 6, "a fork inside a block, whatever was asked"
    assert first.slots[:2].tolist() == other.slots[:2].tolist()


def test_a_shared_prefix_is_held_once_whatever_rank_owns_it() -> None:
    cache = cache_of(20, 4, block=2)
    tables = [filled(cache, [*sentence(6), seed], on(seed % 4)) for seed in range(8)]
    assert len({tuple(table.slots[:6].tolist()) for table in tables}) == 1
    assert [table.owner(6) for table in tables] == [seed % 4 for seed in range(8)]
    assert cache.used == 6 + 8 and cache.unshared == 7 * 8


def test_the_oldest_of_a_rank_leaves_with_its_descendants_and_nothing_else() -> None:
    cache = cache_of(4, 2, block=2)
    cache.close(filled(cache, sentence(6, seed=1), lambda chunk: chunk // 2 % 2))  # ranks 0 0 1 1 0 0
    cache.close(filled(cache, sentence(1, seed=2), on(1)))
    keeper = filled(cache, sentence(2, seed=3), on(0), shares=False)
    assert cache.tree.evictions == 2, "the chunks of the third block are leaves"
    filled(cache, sentence(1, seed=4), on(0), shares=False)
    assert cache.tree.evictions == 5, "the second chunk goes after its two descendants on the other rank"
    assert cache.reuse(cache.open(sentence(6, seed=1)))[0] == CHUNK
    assert cache.reuse(cache.open([*sentence(1, seed=2), 0]))[0] == CHUNK, "nobody else was touched"
    assert owners_of(keeper) == [0, 0] and not cache.displaced


def test_a_twin_on_another_rank_is_not_taken_where_the_block_goes_on() -> None:
    cache = cache_of(10, 2, block=2)
    one, two = cache.open(sentence(3)), cache.open(sentence(3))
    for table, rank in ((one, 0), (two, 1)):
        table.tokens, known = table.tokens[:10], table.tokens
        assert cache.extend(table, 10, on(rank))
        table.tokens = known
    for table, count in ((one, CHUNK - 10), (two, 2 * CHUNK - 10)):
        assert cache.extend(table, count)
        cache.commit()
        cache.check()
    assert owners_of(one) == [0] and owners_of(two) == [1, 1] and not cache.displaced
    assert cache.reuse(one) == (0, False), "two keeps its block to itself"
    assert cache.extend(one, 2 * CHUNK) and owners_of(one) == [0, 0, 0]


def test_displaced_only_when_the_rank_has_nothing_left() -> None:
    cache = cache_of(3, 2)
    filled(cache, sentence(2, seed=1), on(0), shares=False)
    table = filled(cache, sentence(4, seed=2), on(0), shares=False)
    assert owners_of(table) == [0, 1, 1, 1] and cache.displaced == 1, "what follows stays with the displaced chunk"
    assert cache.available == 0 and not cache.extend(cache.open(sentence(1, seed=3)), 1)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 4),
    per_rank=st.integers(1, 12),
    block=st.sampled_from([1, 2, 5, 32]),
    cuts=st.lists(st.integers(1, 200), max_size=8),
    owner=st.sampled_from([None, 0, 3]),
)
def test_capacity_grows_with_ranks(ranks: int, per_rank: int, block: int, cuts: list[int], owner: int | None) -> None:
    """Every chunk of every rank can be filled, by one sequence or several, over a cache full of what others left."""
    cache = cache_of(per_rank, ranks, block)
    total = per_rank * ranks
    cache.close(filled(cache, sentence(total, seed=1)))
    assert cache.available == total and len(cache.tree.idle) == total
    left = total
    for seed, size in enumerate([*cuts, total], start=2):
        size = min(size, left)
        left -= size
        if size:
            filled(cache, sentence(size, seed), None if owner is None else on(owner % ranks))
    assert cache.available == 0 and cache.used == total
    assert sorted(slot for table in cache.tables for slot in table.slots.tolist()) == list(range(total))
    assert not cache.tree.idle and cache.tree.evictions == total


class PlainTree(PrefixTree):
    """One rank, as plain as can be: the oldest idle chunk without children, looked for among all."""

    def __init__(self, pool: SlotPool) -> None:
        super().__init__(pool)
        self.stack = list(range(pool.total - 1, -1, -1))
        self.idle: OrderedDict[bytes, Any] = OrderedDict()

    def take_slot(self, rank: int | None = None, account: Any = None) -> int | None:
        if not self.stack and self.idle:
            parents = {id(node.parent) for node in self.nodes.values()}
            self._remove(next(node for node in self.idle.values() if id(node) not in parents))
        if not self.stack:
            return None
        slot = self.stack.pop()
        self.pool._free[0].remove(slot)
        self.pool._is_free[slot] = 0
        self.pool.free -= 1
        return slot

    def _remove(self, node: Any) -> None:
        super()._remove(node)
        self.stack.append(node.slot)


@pytest.mark.parametrize("seed", range(20))
def test_one_rank_takes_the_same_slots_as_a_plain_model(seed: int) -> None:
    rng = random.Random(seed)
    caches = [KVCache(16), KVCache(16)]
    caches[1].tree = caches[1]._names.tree = PlainTree(caches[1].pool)
    live: list[tuple[ChunkTable, ChunkTable]] = []
    for _ in range(300):
        act = rng.random()
        if act < 0.3 or not live:
            blocks = [rng.randrange(3) for _ in range(rng.randrange(5))]
            tokens = [block for block in blocks for _ in range(CHUNK)] + [7] * rng.randint(1, CHUNK)
            live.append((caches[0].open(list(tokens)), caches[1].open(list(tokens))))
        elif act < 0.5:
            for cache, table in zip(caches, live.pop(rng.randrange(len(live))), strict=True):
                cache.close(table)
        else:
            _advance(caches, rng.choice(live), rng.randint(1, 200), rng.choice([0, 0, 2]))
        assert [a.slots.tolist() for a, _ in live] == [b.slots.tolist() for _, b in live]
        assert list(caches[0].tree.idle) == list(caches[1].tree.idle)
    assert caches[0].tree.evictions, "the cache was full at times"


def _advance(caches: list[KVCache], pair: tuple[ChunkTable, ChunkTable], wish: int, grow: int) -> None:
    for cache, table in zip(caches, pair, strict=True):
        table.tokens.extend([3] * grow)
        _, blocked = cache.reuse(table)
        count = min(wish, len(table.tokens) - table.length, cache.room(table))
        if count and not blocked:
            assert cache.extend(table, count)
        cache.commit()
        cache.check()
