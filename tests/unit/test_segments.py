"""Segments of the prefix tree in pages: together they are the tree as it was, and each tenant sees its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.kv import segments
from headrace.kv.pool import SlotPool
from headrace.kv.segments import Cursor, Numbered, Segment
from headrace.kv.tree import Node, PrefixTree

pytestmark = pytest.mark.unit

ROOMY = 400


@dataclass
class Grown:
    """A tree made of (tenant, place) pairs: a node below the one at that place, or a root. Tenants of a node are its
    parent's; below those of nobody, and of roots, they may be any."""

    tree: PrefixTree = field(default_factory=lambda: PrefixTree(SlotPool(ROOMY)))
    made: list[Node] = field(default_factory=list)

    def grow(self, tenant: int, place: int) -> Node:
        live = [node for node in self.made if self.tree.nodes.get(node.digest or b"") is node]
        parent = live[place % len(live)] if live and place % 7 else None
        slot = self.tree.take_slot()
        assert slot is not None
        node = Node(slot, None, None, None)
        node.tenant = parent.tenant if parent is not None and parent.tenant else bytes([tenant]) * (16 if tenant else 0)
        self.tree.insert(node, len(self.made).to_bytes(32, "little"), parent)
        self.made.append(node)
        return node

    def evict(self, place: int) -> None:
        """A leaf, whichever: more orders than that of the least recent use."""
        leaves = [node for node in self.tree.nodes.values() if not node.children]
        if leaves:
            node = leaves[place % len(leaves)]
            if node.refs:
                self.tree.release(node)
            if node.refs == 0 and node.digest in self.tree.nodes:
                self.tree._remove(node)

    def change(self, changes: list[tuple[bool, int, int]]) -> None:
        for grows, tenant, place in changes:
            if grows and len(self.tree.nodes) < ROOMY // 2:
                self.grow(tenant, place)
            else:
                self.evict(place)
            self.tree.segments.check(self.tree.nodes)


def chunks_of(segment: Segment, there: set[bytes]) -> list[bytes]:
    """Names of a segment's chunks, by the tree as it is: the run of children that were there when the listing began."""
    node, names = segment.first, []
    for _ in range(segment.chunks):
        assert node.digest is not None
        names.append(node.digest)
        following = node.onward
        node = following if following is not None and following.digest in there else node
    assert len(set(names)) == segment.chunks
    return names


Changes = st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 10**6)), max_size=25)
Grows = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10**6)), max_size=60)


@pytest.mark.parametrize("everything", [False, True], ids=["one-tenant", "all"])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    grows=Grows,
    changes=st.lists(Changes, max_size=6),
    limit=st.integers(1, 7),
    longest=st.integers(2, 6),
    work=st.integers(1, 60),
)
def test_pages_together_are_the_tree_as_it_was(
    everything: bool,
    grows: list[tuple[int, int]],
    changes: list[list[tuple[bool, int, int]]],
    limit: int,
    longest: int,
    work: int,
) -> None:
    """However it changes between two pages: nothing twice, nothing left out that is still there, no page empty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "LONGEST", longest)
        patch.setattr(segments, "WORK", work)
        grown = Grown()
        for tenant, place in grows:
            grown.grow(tenant, place)
        tree = grown.tree
        wanted = {digest for digest, node in tree.nodes.items() if everything or node.tenant == b""}
        seen: list[bytes] = []
        cursor: Cursor | None = None
        for turn in range(len(tree.nodes) + sum(map(len, changes)) + 1):  # all that may come is listed of later tenants
            there = set(wanted) if not everything else set(tree.nodes)
            found, cursor = (
                tree.segments.page_of_all(cursor, limit) if everything else tree.segments.page(b"", cursor, limit)
            )
            assert len(found) <= limit and (found or cursor is None)
            for segment in found:
                assert 1 <= segment.chunks <= longest
                seen += chunks_of(segment, there)
            if cursor is None:
                break
            grown.change(changes[turn] if turn < len(changes) else [])
        else:
            pytest.fail("the listing does not end")
        assert len(set(seen)) == len(seen), "a chunk was told twice"
        assert {name for name in wanted if name in tree.nodes} <= set(seen), "a chunk that is there was left out"
        assert everything or set(seen) <= wanted


def tree_of(*paths: str) -> Grown:
    """Each path: letters are chunks, the same beginnings are shared. Capitals are public, small ones of a tenant."""
    grown = Grown()
    for path in paths:
        parent = None
        for end in range(1, len(path) + 1):
            name = path[:end].encode()
            node = grown.tree.find(name)
            if node is None:
                slot = grown.tree.take_slot()
                assert slot is not None
                node = Node(slot, None, None, None)
                node.tenant = path[end - 1].encode() * 16 if path[end - 1].islower() else b""
                node.tenant = parent.tenant if parent is not None and parent.tenant else node.tenant
                grown.tree.insert(node, name, parent)
            parent = node
    grown.tree.segments.check(grown.tree.nodes)
    return grown


def name_of(node: Node) -> str:
    assert node.digest is not None
    return node.digest.decode()


def shown(found: list[Segment]) -> dict[str, tuple[int, str | None, int]]:
    """Name of the first chunk -> chunks, name of the parent, children."""
    return {
        name_of(each.first): (
            each.chunks,
            None if each.parent is None else name_of(each.parent),
            each.children,
        )
        for each in found
    }


def test_a_run_without_a_fork_is_one_segment() -> None:
    tree = tree_of("ABCDE", "ABCXY", "ABCZ", "Q").tree
    found, after = tree.segments.page(b"", None, 10)
    assert after is None
    assert shown(found) == {
        "A": (3, None, 3), "ABCD": (2, "A", 0), "ABCX": (2, "A", 0), "ABCZ": (1, "A", 0), "Q": (1, None, 0),
    }  # fmt: skip


def test_a_tenant_learns_nothing_of_others() -> None:
    """The same listing, cursors too, whether or not others share the public beginning, fork it or extend it."""

    def listing(grown: Grown, mark: bytes) -> Any:
        pages, cursor = [], None
        while True:
            found, cursor = grown.tree.segments.page(mark, cursor, 1)
            pages.append((shown(found), cursor and (cursor.time, cursor.place)))
            if cursor is None:
                return pages

    alone = tree_of("ABCaaa", "ABCaab")
    crowd = tree_of("ABCbbb", "ABCaaa", "ABCDE", "ABx", "Azz", "yyy", "ABCaab", "ABCbbc")
    assert listing(alone, b"a" * 16) == listing(crowd, b"a" * 16)
    assert [told for told, _ in listing(alone, b"a" * 16)] == [
        {"ABCa": (2, None, 2)}, {"ABCaaa": (1, "ABCa", 0)}, {"ABCaab": (1, "ABCa", 0)},
    ]  # fmt: skip
    public, of_none = tree_of("ABC"), tree_of("ABCaaa", "ABb", "Acc", "ABCdd")
    assert listing(public, b"") == listing(of_none, b"") == [({"A": (3, None, 0)}, None)]
    assert listing(crowd, b"?" * 16) == [({}, None)]


def test_all_tenants_and_what_they_hang_on() -> None:
    found, _ = tree_of("ABCaaa", "ABbb", "ABCaac").tree.segments.page_of_all(None, 10)
    assert shown(found) == {
        "A": (3, None, 2), "ABCa": (2, "A", 2), "ABCaaa": (1, "ABCa", 0), "ABCaac": (1, "ABCa", 0), "ABb": (2, "A", 0),
    }  # fmt: skip


def test_hits_and_last_use() -> None:
    tree = tree_of("ABC").tree
    first, second = (tree.find(name) for name in (b"A", b"AB"))
    assert first is not None and second is not None
    tree.now = 5.0
    tree.hold(first)
    tree.hold(first)
    tree.hold(second)
    (found,), _ = tree.segments.page(b"", None, 10)
    assert (found.first.hits, found.hits, found.first.used) == (2, 3, 5.0)


def test_a_cursor_of_what_has_left_entirely() -> None:
    grown = tree_of("AB", "AC", "AD")
    _, cursor = grown.tree.segments.page(b"", None, 1)
    for place in range(4):
        grown.evict(place)
    assert not grown.tree.nodes
    assert grown.tree.segments.page(b"", cursor, 1) == ([], None)
    again = tree_of("AB", "AC", "AD").tree
    assert again.segments.page(b"", cursor, 1) == ([], None), "another life of the tenant's chunks"


@given(st.lists(st.integers(0, 5), max_size=300), st.integers(0, 300))
def test_numbered(removed: list[int], after: int) -> None:
    numbered: Numbered[str] = Numbered()
    there: dict[int, str] = {}
    for number, gap in enumerate(removed, start=1):
        numbered.add(number, str(number))
        there[number] = str(number)
        if gap and there:
            gone = sorted(there)[gap % len(there)]
            numbered.remove(gone)
            del there[gone]
    found = {number: item for number, item in numbered.after(after) if item is not None}
    assert found == {number: item for number, item in there.items() if number > after}
    assert len(numbered._order) <= len(there) * 9 // 8 + 65 and len(numbered) == len(there)
