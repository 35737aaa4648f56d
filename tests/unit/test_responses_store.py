"""The store of responses: never above its bounds, the least recently used makes room, owners see their own."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.server.responses.items import Item
from headrace.server.responses.store import ITEM_BYTES, RESPONSE_BYTES, Owner, ResponseStore

pytestmark = pytest.mark.unit

A, B = ("", None), ("", "salt")


def item(item_id: str, text: str = "") -> Item:
    return {"id": item_id, "type": "message", "text": text}


NAMES = [f"{tenant}{number}" for tenant in "ac" for number in range(12)]


def response(response_id: str, *output: Item) -> dict[str, object]:
    return {"id": response_id, "output": list(output)}


def test_a_response_and_its_conversation_are_found_again() -> None:
    store = ResponseStore(100_000)
    assert store.put(A, response("r1", item("o1", "two")), [item("i1", "one")])
    assert msgspec.json.decode(store.response(A, "r1") or b"") == response("r1", item("o1", "two"))
    assert store.given(A, "r1") == [item("i1", "one")]
    assert store.conversation(A, "r1") == [item("i1", "one"), item("o1", "two")]
    assert store.item(A, "o1") == item("o1", "two")
    assert store.item(A, "o2") is None and store.conversation(A, "r2") is None


def test_another_owner_finds_nothing() -> None:
    store = ResponseStore(100_000)
    store.put(A, response("r1", item("o1")), [])
    for other in (B, ("tenant", None)):
        assert store.response(other, "r1") is None and store.conversation(other, "r1") is None
        assert store.given(other, "r1") is None and store.item(other, "o1") is None
        assert not store.delete(other, "r1")
    assert "r1" in store


def test_the_least_recently_used_makes_room() -> None:
    store = ResponseStore(100_000, most=2)
    store.put(A, response("r1"), [])
    store.put(A, response("r2"), [])
    assert store.response(A, "r1") is not None  # used
    store.put(A, response("r3"), [])
    assert ["r1" in store, "r2" in store, "r3" in store] == [True, False, True]


def test_a_tenant_within_its_share_loses_nothing_to_others() -> None:
    """Of two, whatever the other keeps: by bytes, and by number. The other's oldest ones make room."""
    for store in (ResponseStore(20 * RESPONSE_BYTES), ResponseStore(100_000, most=8)):
        for name in ("a1", "a2", "a3", "a4"):
            assert store.put(("a", None), response(name), [])
        for number in range(40):
            assert store.put(("b", str(number % 3)), response(f"b{number}"), [])
            store.check()
        assert all(f"a{number}" in store for number in (1, 2, 3, 4))
        assert "b39" in store and "b0" not in store


def test_the_tenant_with_more_makes_room_for_the_others() -> None:
    """Even with what it asks to be kept at last, which is told."""
    store, large = ResponseStore(10_000), item("i", "x" * 3_500)
    for number in range(12):
        store.put(("a", None), response(f"a{number}"), [])
    assert store.put(("b", None), response("b"), [large])
    assert not {"a0", "a1", "a2", "a3"} & {name for name in NAMES if name in store} and "a11" in store
    for number in range(4):
        assert store.put(("c", None), response(f"c{number}"), [])
    store.check()
    assert {"a11", "c0", "c3"} <= {name for name in NAMES if name in store} and "b" not in store
    assert not store.put(("b", None), response("b2"), [large]) and "b2" not in store
    store.check()


def test_items_are_counted_once() -> None:
    store = ResponseStore(100_000)
    shared = item("i", "x" * 1000)
    store.put(A, response("r1"), [shared])
    used = store.used
    assert used > 1000 + RESPONSE_BYTES + ITEM_BYTES
    store.put(A, response("r2"), [shared])
    assert store.used - used < 1000
    assert store.delete(A, "r1") and store.item(A, "i") == shared
    assert store.delete(A, "r2") and store.item(A, "i") is None and store.used == 0


def test_one_that_is_too_large_drives_out_nothing() -> None:
    store = ResponseStore(RESPONSE_BYTES + ITEM_BYTES + 200)
    store.put(A, response("r1"), [])
    assert not store.put(A, response("r2"), [item("i", "x" * 200)])
    assert "r1" in store and "r2" not in store
    assert not ResponseStore(0).put(A, response("r1"), [])


def test_one_that_is_larger_than_its_share_drives_out_nothing() -> None:
    """Of two others each has more than it, until they have made room for it."""
    store = ResponseStore(12_000)
    for number in range(8):
        for name in "ac":
            assert store.put((name, None), response(f"{name}{number}"), [])
    before = [name for name in NAMES if name in store]
    assert len(before) == 16 and store.used == 16 * (RESPONSE_BYTES + len(b'{"id":"a0","output":[]}'))
    assert not store.put(("b", None), response("b"), [item("i", "x" * 3_000)])
    assert [name for name in NAMES if name in store] == before
    assert store.put(("b", None), response("b"), [item("i", "x" * 2_500)]) and "b" in store
    store.check()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3_000)), max_size=30))
def test_one_that_is_refused_drives_out_nothing(sizes: list[tuple[str, int]]) -> None:
    """And one that is not is kept. A third of the room is never refused: an item's text lies there twice."""
    store = ResponseStore(6_000)
    for number, (tenant, size) in enumerate(sizes):
        before, used = [str(each) for each in range(number) if str(each) in store], store.used
        kept = store.put((tenant, None), response(str(number), item(f"i{number}", "x" * size)), [])
        assert kept == (str(number) in store)
        assert kept or (store.used, before) == (used, [each for each in before if each in store])
        assert kept or 2 * size > 600
        store.check()


OWNERS = st.sampled_from([A, B])
IDS = st.integers(0, 5).map(str)


class Storing(RuleBasedStateMachine):
    """Beside it a list of what is kept, the least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.store = ResponseStore(6_000, most=4)
        self.order: list[tuple[Owner, str]] = []
        self.made = 0

    @rule(owner=OWNERS, texts=st.lists(st.integers(0, 900), max_size=3), before=IDS)
    def put(self, owner: Owner, texts: list[int], before: str) -> None:
        given = self.store.conversation(owner, before)
        self._used(owner, before)
        self.made += 1
        name = str(self.made % 6)
        if any(each == name for _, each in self.order):
            return  # ids are never given twice
        items = [item(f"{self.made}.{n}", "x" * size) for n, size in enumerate(texts)]
        if self.store.put(owner, response(name, *items), given or []):
            self.order.append((owner, name))
            dropped = len(self.order) - len(self.store)
            self.order = self.order[dropped:]

    @rule(owner=OWNERS, name=IDS)
    def get(self, owner: Owner, name: str) -> None:
        assert (self.store.response(owner, name) is not None) == ((owner, name) in self.order)
        self._used(owner, name)

    @rule(owner=OWNERS, name=IDS)
    def delete(self, owner: Owner, name: str) -> None:
        assert self.store.delete(owner, name) == ((owner, name) in self.order)
        self.order = [each for each in self.order if each != (owner, name)]

    def _used(self, owner: Owner, name: str) -> None:
        if (owner, name) in self.order:
            self.order.remove((owner, name))
            self.order.append((owner, name))

    @invariant()
    def bounded(self) -> None:
        self.store.check()
        assert self.store.used <= 6_000 and len(self.store) <= 4
        assert all(name in self.store for _, name in self.order) and len(self.store) == len(self.order)


TestStoring = Storing.TestCase
TestStoring.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
