"""The index against a plain model: the budget, the quotas and the order of use."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.offload.tiers.index import TOUCHES, BlobEntry, Index, choose, put_quota

TENANTS = [b"a", b"b", b"c", b"d", b"e"]
NAMES = [bytes([number]) * 33 for number in range(24)]
BUDGET = 100


class Model(RuleBasedStateMachine):
    """ready: blobs by use, the least recently used first. reserved: those being written. own: quotas that differ from
    the common one."""

    @initialize(quota=st.sampled_from([0.0, 0.2, 0.25, 0.5, 1.0]))
    def start(self, quota: float) -> None:
        self.own: dict[bytes, float] = {}
        self.index = Index(":memory:", BUDGET, quota, own=self.own)
        self.common = quota
        self.ready: list[BlobEntry] = []
        self.reserved: dict[bytes, BlobEntry] = {}

    @rule(tenant=st.sampled_from(TENANTS[:3]), share=st.sampled_from([None, 0.0, 0.1, 0.4, 0.7]))
    def agree(self, tenant: bytes, share: float | None) -> None:
        put_quota(self.own, tenant, share)

    def beyond(self, use: Counter[bytes], tenant: bytes) -> int:
        """Bytes that it has above its quota."""
        return use[tenant] - int(self.own.get(tenant, self.common) * BUDGET)

    def use(self) -> Counter[bytes]:
        use: Counter[bytes] = Counter()
        for entry in [*self.ready, *self.reserved.values()]:
            use[entry.tenant] += entry.size
        return use

    def mark(self, name: bytes) -> None:
        entry = next(entry for entry in self.ready if entry.name == name)
        self.ready.remove(entry)
        self.ready.append(entry)

    def names(self) -> set[bytes]:
        return {entry.name for entry in self.ready}

    @rule(name=st.sampled_from(NAMES), tenant=st.sampled_from(TENANTS), size=st.integers(0, 60))
    def reserve(self, name: bytes, tenant: bytes, size: int) -> None:
        room = self.index.reserve(name, tenant, size)
        if name in self.names():
            assert room == (False, True, ())
            self.mark(name)
        elif name in self.reserved:
            assert room == (False, False, ())
        elif room.granted:
            self.take(room.victims, BlobEntry(name, tenant, size))
            self.reserved[name] = BlobEntry(name, tenant, size)
        else:
            self.check_refused(tenant, size)

    def take(self, victims: Any, new: BlobEntry) -> None:
        """Each victim was its tenant's oldest, was needed, and went by the rule."""
        for victim in victims:
            use = self.use() + Counter({new.tenant: new.size})
            assert sum(use.values()) > BUDGET, "more went than was needed"
            assert victim == next(entry for entry in self.ready if entry.tenant == victim.tenant), "not the oldest"
            givers = {entry.tenant for entry in self.ready}
            beyond = {tenant: self.beyond(use, tenant) for tenant in {*givers, new.tenant}}
            assert beyond[victim.tenant] == max(beyond[tenant] for tenant in givers)
            if victim.tenant != new.tenant and beyond[victim.tenant] <= 0:
                assert beyond[new.tenant] <= 0, "taken from one within the quota by one above"
            self.ready.remove(victim)
        assert sum(self.use().values()) + new.size <= BUDGET

    def check_refused(self, tenant: bytes, size: int) -> None:
        """What may go is not enough, or would come from tenants within their quota for one above."""
        use = self.use()
        fixed = sum(entry.size for entry in self.reserved.values())
        if fixed + size <= BUDGET:
            assert self.beyond(use, tenant) + size > 0 or sum(e.size for e in self.reserved.values()) > 0
            left = self.without_what_may_go(tenant)
            assert left + size > BUDGET

    def without_what_may_go(self, tenant: bytes) -> int:
        """Bytes left once the tenant gave all and the others all above their quotas, blob by blob."""
        use = self.use()
        for entry in self.ready:
            if entry.tenant == tenant or self.beyond(use, entry.tenant) > 0:
                use[entry.tenant] -= entry.size
        return sum(use.values())

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        entry = self.reserved.pop(data.draw(st.sampled_from(sorted(self.reserved))))
        self.index.commit(entry)
        self.ready.append(entry)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.reserved)))
        del self.reserved[name]
        self.index.cancel([name])

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=6))
    def has(self, names: list[bytes]) -> None:
        assert self.index.has(names) == [name in self.names() for name in names]
        for name in [name for place, name in enumerate(names) if name not in names[place + 1 :]][::-1]:
            if name in self.names():
                self.mark(name)

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=3))
    def remove(self, names: list[bytes]) -> None:
        gone = self.index.remove(names)
        assert {entry.name for entry in gone} == set(names) & self.names()
        self.ready = [entry for entry in self.ready if entry.name not in names]

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "index"):
            self.index.check()
            assert set(self.index.entries()) == set(self.ready)
            assert set(self.index.reserved()) == set(self.reserved)
            blobs = Counter(entry.tenant for entry in [*self.ready, *self.reserved.values()])
            assert self.index.usage() == {tenant: (self.use()[tenant], count) for tenant, count in blobs.items()}

    def teardown(self) -> None:
        if hasattr(self, "index"):
            self.index.close()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(
    puts=st.lists(st.tuples(st.sampled_from([b"b", b"c"]), st.integers(1, 25)), max_size=60),
    mine=st.lists(st.integers(1, 10), max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_a_quota_is_safe(puts: list[tuple[bytes, int]], mine: list[int]) -> None:
    """While all quotas fit into the budget, nobody within the quota loses anything to anybody."""
    index = Index(":memory:", BUDGET, 0.25)
    kept = []
    for number, size in enumerate(mine):
        if sum(entry.size for entry in kept) + size <= 25:
            kept.append(BlobEntry(b"mine %d" % number, b"a", size))
            assert index.reserve(*kept[-1]).granted
            index.commit(kept[-1])
    for number, (tenant, size) in enumerate(puts):
        entry = BlobEntry(b"%d" % number, tenant, size)
        assert index.reserve(*entry).granted
        index.commit(entry)
        assert all(index.find([entry.name]) for entry in kept)
    index.close()


def oldest(blobs: dict[bytes, list[int]]) -> Any:
    return lambda tenant: iter([BlobEntry(b"%d" % n, tenant, size) for n, size in enumerate(blobs.get(tenant, []))])


@pytest.mark.parametrize(
    ("use", "tenant", "size", "victims"),
    [
        ({}, b"a", 100, []),
        ({b"a": 90}, b"a", 10, []),
        ({b"a": 90}, b"a", 20, [b"a"]),
        ({b"a": 60, b"b": 40}, b"c", 10, [b"a"]),  # the largest user gives
        ({b"a": 75, b"b": 25}, b"b", 10, [b"a"]),  # both above, the new blob counted
        ({b"a": 25, b"b": 25, b"c": 25, b"d": 25}, b"a", 10, [b"a"]),  # who goes above the quota gives
        ({b"a": 25, b"b": 25, b"c": 25, b"d": 25}, b"e", 10, [b"d"]),  # more tenants than quotas fit: the largest
        ({b"a": 80, b"b": 20}, b"a", 90, None),  # b keeps what is within its quota
        ({b"a": 90, b"b": 10}, b"b", 95, None),
        ({b"a": 90, b"b": 10}, b"b", 85, None),  # a, with 20 left, would go further below its quota
        ({b"a": 90, b"b": 10}, b"b", 80, [b"b"] + [b"a"] * 7),
    ],
)
def test_who_gives(use: dict[bytes, int], tenant: bytes, size: int, victims: list[bytes] | None) -> None:
    blobs = {one: [10] * (amount // 10) for one, amount in use.items()}
    chosen = choose(use, tenant, size, 100, 25, {}, oldest(blobs))
    assert (None if chosen is None else [entry.tenant for entry in chosen]) == victims


@pytest.mark.parametrize(
    ("quotas", "use", "tenant", "victims"),
    [
        ({b"a": 70}, {b"a": 70, b"b": 30}, b"c", [b"b"]),  # a, the largest, is within its own
        ({b"a": 70}, {b"a": 80, b"b": 20}, b"c", [b"a"]),
        ({b"a": 10}, {b"a": 50, b"b": 50}, b"c", [b"a"]),  # as large as b, and further above
        ({b"a": 70, b"b": 30}, {b"a": 70, b"b": 30}, b"c", [b"b"]),  # quotas take it all: none is nearer than c to its
        ({b"a": 70, b"b": 30, b"c": 0}, {b"a": 70, b"b": 30}, b"c", None),
    ],
)
def test_whose_own_quota_is_kept(
    quotas: dict[bytes, int], use: dict[bytes, int], tenant: bytes, victims: list[bytes] | None
) -> None:
    blobs = {one: [10] * (amount // 10) for one, amount in use.items()}
    chosen = choose(use, tenant, 10, 100, 25, quotas, oldest(blobs))
    assert (None if chosen is None else [entry.tenant for entry in chosen]) == victims


def test_too_large() -> None:
    index = Index(":memory:", 10, 0.25)
    assert index.reserve(b"x", b"", 11) == (False, False, ())
    assert index.reserve(b"x", b"", 10).granted
    assert not index.reserve(b"y", b"", 1).granted, "what is being written must not go"


def test_left_by_a_process_that_ended() -> None:
    index = Index(":memory:", 10, 0.25)
    assert index.reserve(b"x", b"", 10).granted
    assert not index.reserve(b"x", b"", 10).granted
    assert index.reserve(b"x", b"", 10, alone=True).granted


def test_what_is_there_is_not_cancelled() -> None:
    index = Index(":memory:", 10, 0.25)
    index.adopt([(BlobEntry(b"x", b"", 1), 1)])
    index.cancel([b"x"])
    assert index.has([b"x"]) == [True]


def test_all_of_a_change_or_nothing() -> None:
    def found() -> Iterator[tuple[BlobEntry, int]]:
        yield BlobEntry(b"x", b"", 1), 1
        raise OSError("the directory went away")

    index = Index(":memory:", 10, 0.25)
    with pytest.raises(OSError, match="went away"):
        index.adopt(found())
    assert index.entries() == [] and index.usage() == {}
    assert index.reserve(b"y", b"", 10).granted


def test_many_names() -> None:
    """More than one statement takes, and more uses than are remembered."""
    index = Index(":memory:", 10**6, 0.25)
    entries = [BlobEntry(b"%d" % number, b"", 1) for number in range(TOUCHES + 10)]
    index.adopt((entry, number) for number, entry in enumerate(entries))
    names = [entry.name for entry in entries]
    assert all(index.has(names)) and not index._touched
    assert set(index.remove(names[:1500])) == set(entries[:1500])
    assert set(index.find(names).values()) == set(entries[1500:])
    index.check()


def test_survives(tmp_path: Path) -> None:
    path = str(tmp_path / "index.sqlite")
    first = Index(path, 100, 0.25)
    for number in range(10):
        first.reserve(b"%d" % number, b"a", 10)
        first.commit(BlobEntry(b"%d" % number, b"a", 10))
    first.has([b"0"])
    first.close()
    second = Index(path, 50, 0.25)
    assert {entry.name for entry in second.trim()} == {b"1", b"2", b"3", b"4", b"5"}
    second.check()
    second.close()


def test_use_goes_on_where_the_clock_is_behind(tmp_path: Path) -> None:
    """Uses of another day, which the clock has not reached again."""
    path = str(tmp_path / "index.sqlite")
    first = Index(path, 20, 0.25)
    first.adopt([(BlobEntry(b"future", b"", 10), 2**62)])
    first.close()
    second = Index(path, 20, 0.25)
    for name in (b"x", b"y"):
        second.reserve(name, b"", 10)
        second.commit(BlobEntry(name, b"", 10))
    assert second.has([b"future", b"x", b"y"]) == [False, True, True]


def test_sums_are_read_again_only_after_another_has_changed_them(tmp_path: Path) -> None:
    """As many tenants as blobs must not make each write look at all of them."""
    index, other = (Index(str(tmp_path / "index.sqlite"), 10, 0.25) for _ in range(2))
    read: list[str] = []
    index._db.set_trace_callback(lambda said: read.append(said) if said.startswith("SELECT * FROM tenants") else None)
    for number in range(20):
        entry = BlobEntry(b"%d" % number, b"tenant %d" % number, 1)
        assert index.reserve(*entry).granted
        index.commit(entry)
        assert index.total() == (min(10, number + 1),) * 2
    assert len(read) == 1
    assert other.reserve(b"x", b"another", 1).granted
    assert index.usage()[b"another"] == (1, 1) and len(read) == 2
    index.check()


def test_sums_of_a_change_that_was_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(":memory:", 10, 0.25)
    index.adopt([(BlobEntry(b"x", b"a", 8), 1)])
    with monkeypatch.context() as patch, pytest.raises(sqlite3.OperationalError, match="full"):
        patch.setattr(index, "_insert", Mock(side_effect=sqlite3.OperationalError("full")))
        index.reserve(b"y", b"b", 5)
    index.check()
    assert index.total() == (8, 1)


def test_held_by_another(tmp_path: Path) -> None:
    """Reading goes on; a change gives up after the time-out."""
    path = str(tmp_path / "index.sqlite")
    index = Index(path, 10, 0.25, timeout_s=0.05)
    index.reserve(b"x", b"", 1)
    index.commit(BlobEntry(b"x", b"", 1))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert index.has([b"x"]) == [True]
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        index.reserve(b"y", b"", 1)
    other.execute("ROLLBACK")
    assert index.reserve(b"y", b"", 1).granted


def test_threads() -> None:
    index = Index(":memory:", 50, 0.25)

    def work(tenant: bytes) -> None:
        for number in range(100):
            entry = BlobEntry(b"%s%d" % (tenant, number), tenant, 1 + number % 7)
            if index.reserve(*entry).granted:
                index.commit(entry)

    with ThreadPoolExecutor(len(TENANTS)) as pool:
        list(pool.map(work, TENANTS))
    index.check()
    assert not index.reserved()


def test_two_that_make_it_at_once(tmp_path: Path) -> None:
    """Neither sees the half of the other's tables."""
    for number in range(20):
        path = str(tmp_path / f"{number}.sqlite")
        with ThreadPoolExecutor(4) as pool:
            for index in pool.map(lambda _, path=path: Index(path, 10, 0.25, timeout_s=20.0), range(4)):
                index.close()
