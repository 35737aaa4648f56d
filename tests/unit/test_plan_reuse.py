"""Which steps follow the one before. (tests/unit/test_scheduler.py asks the same of whole runs.)"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.attention.plan import Planner, TableRows
from headrace.kv.cache import KVCache
from headrace.kv.chunk_table import ChunkTable
from headrace.types import CHUNK

pytestmark = pytest.mark.unit


def decoding(cache: KVCache, number: int) -> ChunkTable:
    """The table of a sequence with 10 tokens in the cache and one to come."""
    table = cache.open(list(range(number, number + 11)))
    assert cache.extend(table, 10, None)
    return table


def rows(cache: KVCache, tables: list[ChunkTable]) -> list[TableRows]:
    """A step of one token each."""
    for table in tables:
        assert cache.grow(table)
        table.tokens.append(7)
    return [TableRows(table, table.length - 1, 1) for table in tables]


Start = tuple[KVCache, list[ChunkTable], Planner]


@pytest.fixture
def start() -> Start:
    cache, planner = KVCache(40), Planner()
    tables = [decoding(cache, 100), decoding(cache, 200)]
    assert planner.plan(rows(cache, tables)).steps == 0
    return cache, tables, planner


def test_steps_that_follow(start: Start) -> None:
    cache, tables, planner = start
    for step in range(1, 6):
        planned = planner.plan(rows(cache, tables))
        assert planned.steps == step
        assert planned.plan.positions.tolist() == [10 + step, 10 + step]
        assert planned.plan.row_offsets.tolist() == [10 + step, 10 + step]
        assert planned.plan.items is planned.first.items


def other_order(cache: KVCache, parts: list[TableRows]) -> list[TableRows]:
    return parts[::-1]


def one_fewer(cache: KVCache, parts: list[TableRows]) -> list[TableRows]:
    return parts[:1]


def two_tokens(cache: KVCache, parts: list[TableRows]) -> list[TableRows]:
    return [parts[0], parts[1]._replace(rows=2)]


def not_the_next(cache: KVCache, parts: list[TableRows]) -> list[TableRows]:
    return [parts[0]._replace(start=parts[0].start + 1), parts[1]]


def another_like_it(cache: KVCache, parts: list[TableRows]) -> list[TableRows]:
    twin = decoding(cache, 300)
    twin.tokens.append(7)
    assert cache.grow(twin) and twin.changes == parts[0].table.changes
    return [parts[0]._replace(table=twin), parts[1]]


def other_chunk(cache: KVCache, parts: list[TableRows]) -> list[TableRows]:
    table = parts[0].table
    assert isinstance(table, ChunkTable)
    table.replace(0, table.nodes[0])
    return parts


def no_rows(cache: KVCache, parts: list[TableRows]) -> list[TableRows]:
    return []


CHANGES = [other_order, one_fewer, two_tokens, not_the_next, another_like_it, other_chunk, no_rows]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_steps_that_do_not(start: Start, change: Callable[[KVCache, list[TableRows]], list[TableRows]]) -> None:
    cache, tables, planner = start
    assert planner.plan(change(cache, rows(cache, tables))).steps == 0


def test_a_step_of_several_rows_is_not_followed() -> None:
    cache, planner = KVCache(40), Planner()
    table = decoding(cache, 100)
    planner.plan([TableRows(table, 0, 10)])
    assert [planner.plan(rows(cache, [table])).steps for _ in range(3)] == [0, 1, 2]


def test_the_end_of_a_chunk(start: Start) -> None:
    cache, tables, planner = start
    for step in range(1, 54):
        assert planner.plan(rows(cache, tables)).steps == step
    for table in tables:
        assert table.length == CHUNK and not cache.grow(table) and cache.extend(table, 1, None)
    assert planner.plan([TableRows(table, table.length - 1, 1) for table in tables]).steps == 0


def test_a_table_with_a_chunk_to_spare_is_not_followed() -> None:
    cache, planner = KVCache(40), Planner()
    table = cache.open(list(range(2 * CHUNK)))
    assert cache.extend(table, CHUNK + 1, None)
    assert [planner.plan([TableRows(table, CHUNK + n, 1)]).steps for n in (-2, -1, 0, 1)] == [0, 0, 0, 1]
