"""The tree, the pool and the tables: every operation by a Hypothesis state machine, and mutants that it must catch.

Examples are in test_cache_sharing.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace.kv.cache import KVCache
from headrace.kv.chunk_table import ChunkTable
from headrace.kv.partial import PartialMatches, words
from headrace.kv.placement import Placement
from headrace.kv.pool import SlotPool
from headrace.kv.tree import Node, PrefixTree
from headrace.types import CHUNK, chunks_for

POOL = 24


class CacheMachine(RuleBasedStateMachine):
    """Sequences over a tiny alphabet of whole chunks, so that prefixes meet often, in a pool that is often full, of one
    rank or several, with blocks of few chunks.

    `content` plays the memory: what each slot's tokens are. A table must find its own tokens in its slots at any time,
    which a chunk shared wrongly, freed early or evicted in use would break.
    """

    ranks = st.sampled_from([1, 2, 3, 4])

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(POOL)
        self.live: list[ChunkTable] = []
        self.parked: list[ChunkTable] = []
        self.content: dict[int, list[int]] = {}

    def fresh(self, tokens: list[int], salt: str | None, public: int) -> ChunkTable:
        table = self.cache.open(tokens, salt=salt, public_tokens=public)
        self.live.append(table)
        return table

    @initialize(data=st.data(), block=st.sampled_from([1, 2, 3, 32]), tails=st.booleans())
    def start(self, data: st.DataObject, block: int, tails: bool) -> None:
        self.cache = KVCache(POOL, ranks=data.draw(self.ranks))
        self.cache.block_chunks = block
        if tails:
            self.cache.tree.partial = PartialMatches()

    @rule(
        blocks=st.lists(st.integers(0, 2), min_size=0, max_size=6),
        tail=st.integers(1, CHUNK),
        salt=st.sampled_from([None, None, "a", "b"]),
        public=st.sampled_from([0, 64, 100]),
    )
    def join(self, blocks: list[int], tail: int, salt: str | None, public: int) -> None:
        tokens = [token for block in blocks for token in [block] * CHUNK] + [7] * tail
        self.fresh(tokens, salt, public)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), rank=st.integers(0, 3))
    def place(self, data: st.DataObject, rank: int) -> None:
        self.pick(data).place = None if rank == 3 else lambda chunk: rank % self.cache.ranks

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """n > 1: another sequence with the same prompt."""
        self.fresh(list(self.pick(data).tokens), None, 0)

    def pick(self, data: st.DataObject) -> ChunkTable:
        return self.live[data.draw(st.integers(0, len(self.live) - 1))]

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        wish=st.integers(1, 400),
        grow=st.sampled_from([0, 0, 1, 3]),
        owner=st.sampled_from([None, None, 0, 1, 2, 3]),
    )
    def extend(self, data: st.DataObject, wish: int, grow: int, owner: int | None) -> None:
        """A step: reuse, then prefill a part, or decode tokens."""
        table = self.pick(data)
        table.tokens.extend([3] * grow)
        _, blocked = self.cache.reuse(table)
        if blocked:
            assert self.writer_of_next(table) in self.live, "waits for a chunk that nobody writes"
            return
        count = min(wish, len(table.tokens) - table.length, self.cache.room(table))
        before = table.length
        if count:
            self.enlarge(table, count, owner)
            self.write(table, before)
        self.cache.commit()

    def enlarge(self, table: ChunkTable, count: int, owner: int | None = None) -> None:
        """`room` is a promise, on all ranks together; a chunk is displaced by a rank only that has nothing left."""
        displaced = self.cache.displaced
        block, ranks = self.cache.block_chunks, self.cache.ranks
        assert self.cache.extend(
            table, count, None if owner is None else lambda chunk: (owner + chunk // block) % ranks
        )
        left = [self.cache.available_on(rank) for rank in range(self.cache.ranks)]
        assert sum(left) == self.cache.available
        assert self.cache.displaced == displaced or 0 in left, "displaced although its rank had something left"
        assert ranks > 1 or not self.cache.displaced

    def write(self, table: ChunkTable, start: int) -> None:
        for position in range(start, table.length):
            slot = table.slots[position // CHUNK]
            rows = self.content.setdefault(int(slot), [-1] * CHUNK)
            rows[position % CHUNK] = table.tokens[position]

    def writer_of_next(self, table: ChunkTable) -> Any:
        node = self.cache.tree.find(table.digest(table.length // CHUNK))
        return node.writer if node else None

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def extend_beyond_room(self, data: st.DataObject) -> None:
        table = self.pick(data)
        before = table.length
        table.tokens.extend([4] * (self.cache.room(table) + 1 - (len(table.tokens) - table.length)))
        assert not self.cache.extend(table, self.cache.room(table) + 1)
        assert table.length == before

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Finished, or aborted at any moment: half a chunk written or none at all."""
        table = self.pick(data)
        self.live.remove(table)
        self.cache.close(table)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Leaves and joins again with all its tokens, to be computed anew."""
        table = self.pick(data)
        self.live.remove(table)
        self.cache.close(table)
        self.fresh(list(table.tokens), None, 0)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        """Ended: what is complete is held until it is stored below."""
        table = self.pick(data)
        self.live.remove(table)
        held = [node for node in table.nodes if node.digest is not None and node.complete]
        self.cache.park(table)
        assert all(node.refs for node in held)
        if table in self.cache.parked:
            self.parked.append(table)

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def stored(self, data: st.DataObject) -> None:
        self.cache.close(self.parked.pop(data.draw(st.integers(0, len(self.parked) - 1))))

    @precondition(lambda self: self.live and self.cache.ranks == 1)
    @rule(
        data=st.data(),
        wish=st.integers(1, 4),
        late=st.integers(0, 64),
        end=st.sampled_from(["confirmed", "half lost", "preempted", "never attached"]),
    )
    def bring_back(self, data: st.DataObject, wish: int, late: int, end: str) -> None:
        """Chunks come from a tier; a step computes on, and only then turns out whether they are right."""
        table = self.pick(data)
        self.cache.reuse(table)
        first = table.length // CHUNK
        count = min(wish, (len(table.tokens) - 1) // CHUNK - first)
        if table.length % CHUNK or not table.shares or count < 1 or self.writer_of_next(table) is not None:
            return
        nodes = self.cache.take_loose([0] * count)
        if nodes is None:
            assert count > self.cache.available
            return
        self.cache.check()
        if end == "never attached":
            self.cache.free_loose(nodes)
            return
        before = table.length
        self.cache.attach(table, nodes)
        self.cache.check()
        more = min(late, len(table.tokens) - table.length, self.cache.room(table))
        if more:
            self.enlarge(table, more)
        self.write(table, before)
        if end == "preempted":
            self.cache.free_loose(self.cache.detach(table, first, count))
            assert table.length == before
        elif end == "half lost":
            self.cache.truncate(table, first + count // 2)
            self.cache.confirm(table, first, count // 2)
        else:
            self.cache.confirm(table, first, count)
        self.cache.commit()
        if end == "confirmed":
            named = all(node.digest is not None for node in table.nodes[:first])
            assert not named or all(node.digest for node in table.nodes[: first + count]), "a chunk got no name"

    @rule(count=st.integers(1, POOL))
    def evict(self, count: int) -> None:
        """A private sequence takes what it can get, and goes."""
        room = min(count, self.cache.available)
        if room:
            table = self.cache.open([9] * room * CHUNK, shares=False)
            self.enlarge(table, room * CHUNK)
            self.cache.commit()
            self.cache.close(table)

    @invariant()
    def holds(self) -> None:
        self.cache.check()
        for table in self.live + self.parked:
            for position in range(0, table.length):
                found = self.content[int(table.slots[position // CHUNK])][position % CHUNK]
                assert found == table.tokens[position], "a sequence reads another's tokens"

    @invariant()
    def rows_are_there(self) -> None:
        """Of every chunk that a prompt may copy from."""
        for node in self.cache.tree.nodes.values():
            if node.place is not None:
                assert node.words == words(self.content[node.slot][: node.rows]), "other rows are copied"

    @invariant()
    def blocks_have_one_owner(self) -> None:
        size = self.cache.block_chunks
        for table in self.live:
            owners = [table.owner(chunk) for chunk in range(len(table.nodes))]
            assert owners == [self.cache.pool.rank_of(slot) for slot in table.slots.tolist()]
            for start in range(0, len(owners), size):
                assert self.cache.displaced or len(set(owners[start : start + size])) == 1, "a block has two owners"

    def teardown(self) -> None:
        for table in self.live + self.parked:
            self.cache.close(table)
        self.cache.check()
        self.cache.tree.clear()
        assert self.cache.pool.free == POOL and not self.cache.tree.nodes


CacheMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheMachine = CacheMachine.TestCase


class OneRankMachine(CacheMachine):
    ranks = st.just(1)


class RanksMachine(CacheMachine):
    ranks = st.sampled_from([2, 3, 4])


def _dropped_refcount(tree: PrefixTree, node: Node) -> None:
    """Mutant of PrefixTree.hold: shares without counting."""
    if node.refs == 0:
        del tree.idle[node.digest or b""]
        node.refs = 1


def _shared_partial_chunk(cache: KVCache, table: ChunkTable) -> tuple[int, bool]:
    """Mutant of KVCache.reuse: attaches a chunk that another sequence is still writing."""
    chunk = table.length // CHUNK
    while not table.length % CHUNK and chunk < (len(table.tokens) - 1) // CHUNK:
        node = cache.tree.find(table.digest(chunk))
        if node is None:
            break
        cache.tree.hold(node)
        table.append(node)
        table.length += CHUNK
        chunk += 1
    return 0, False


def _first_idle_wrong(tree: PrefixTree, node: Node) -> None:
    """Mutant of PrefixTree.release: what was let go last is evicted first, so parents go before children."""
    node.refs -= 1
    if node.refs == 0:
        if node.digest is None or not node.complete:
            tree._remove(node)
        else:
            tree.idle[node.digest] = node
            tree.idle.move_to_end(node.digest, last=False)


def _leaking_pool(pool: SlotPool, slot: int) -> None:
    """Mutant of SlotPool.give: now and then a slot is lost."""
    if slot % 5:
        pool._is_free[slot] = 1
        pool._free[0].append(slot)
        pool.free += 1


def _evicted_with_children(tree: PrefixTree, node: Node) -> None:
    """Mutant of PrefixTree._evict: the oldest of a rank goes alone, though it may have children on other ranks."""
    tree._remove(node)
    tree.evictions += 1


def _rank_not_minded(tree: PrefixTree, rank: int | None = None, account: Any = None) -> int | None:
    """Mutant of PrefixTree.take_slot: the rank asked for counts only while it has slots free."""
    slot = tree.pool.take(rank)
    if slot is None:
        slot = tree.pool.take()
    if slot is None and tree.idle:
        tree._evict(next(iter(tree.idle.values())))
        slot = tree.pool.take()
    return slot


def _block_not_minded(placement: Placement, table: ChunkTable, end: int, ask: Any, block: int) -> dict[int, int]:
    """Mutant of Placement.asked: asks in the midst of a block too."""
    return {chunk: ask(chunk) for chunk in range(len(table.nodes), chunks_for(end))}


def _given_to_another_rank(pool: SlotPool, slot: int) -> None:
    """Mutant of SlotPool.give: returns the slot to the next rank."""
    pool._is_free[slot] = 1
    pool._free[(slot // pool.per_rank + 1) % pool.ranks].append(slot)
    pool.free += 1


MUTANTS = [
    (OneRankMachine, PrefixTree, "hold", _dropped_refcount),
    (OneRankMachine, KVCache, "reuse", _shared_partial_chunk),
    (OneRankMachine, PrefixTree, "release", _first_idle_wrong),
    (OneRankMachine, SlotPool, "give", _leaking_pool),
    (RanksMachine, PrefixTree, "_evict", _evicted_with_children),
    (RanksMachine, PrefixTree, "take_slot", _rank_not_minded),
    (RanksMachine, Placement, "asked", _block_not_minded),
    (RanksMachine, SlotPool, "give", _given_to_another_rank),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("machine", "owner", "name", "mutant"), MUTANTS, ids=[m[3].__name__[1:] for m in MUTANTS])
def test_mutants_are_caught(
    machine: type[CacheMachine], owner: type, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    relaxed = settings(
        # The first that fails ends it, after some hundred: what is drawn depends on the modules that are loaded.
        max_examples=3000,
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
        phases=_generate_only(),
    )
    with pytest.raises((AssertionError, KeyError, ValueError)):
        run_state_machine_as_test(machine, settings=relaxed)


def _generate_only() -> tuple[Any, ...]:
    from hypothesis import Phase

    return (Phase.generate,)
