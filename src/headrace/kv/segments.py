"""The tree in segments: runs of one tenant's chunks without a fork, listed in pages.

    chunks 0 - 1 - 2 --+-- 3 - 4         three segments: 0 to 2, 3 to 4, and 5
                       +-- 5

A listing shows the tree as it was when its first page was made, less what has left since: each chunk in one segment,
and none twice, however the tree grows or shrinks between two pages. For that each tenant has a clock that ticks with
its chunks. A node notes when it entered, and the first node of a segment when it became that; a page looks at what was
there at the listing's time. A segment never becomes part of another: two may stand in a row where a fork has gone.

What is known of one tenant, its clock included, does not depend on any other's chunks.
"""

from __future__ import annotations

import secrets
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from headrace.kv.node import Node

LONGEST = 1024
"""Chunks of a segment: longer runs are several, so that a page's work is bounded."""

WORK = 4_000
"""Nodes that one page looks at, about: a millisecond or two. A page has one segment at least."""

TELLING = 20
"""What it costs to tell a segment, in nodes looked at."""

T = TypeVar("T")


class Numbered(Generic[T]):
    """Items by ascending numbers. `after` finds its beginning by a binary search, wherever it is."""

    def __init__(self) -> None:
        self._items: dict[int, T] = {}
        self._order = array("Q")
        """All numbers, and some that have been removed: at most an eighth."""

    def __len__(self) -> int:
        return len(self._items)

    def add(self, number: int, item: T) -> None:
        """number: above all others."""
        self._items[number] = item
        self._order.append(number)

    def remove(self, number: int) -> None:
        del self._items[number]
        if len(self._order) > len(self._items) * 9 // 8 + 64:
            self._order = array("Q", self._items)

    def after(self, number: int) -> Iterator[tuple[int, T | None]]:
        """Items of greater numbers in order; None for one that has been removed."""
        order, items = self._order, self._items
        for place in range(bisect_right(order, number), len(order)):
            yield order[place], items.get(order[place])


class Group:
    """The chunks of one tenant, while there are any. number: of the group, later ones have greater; epoch: a random
    name, which says nothing of other tenants. clock: of its last event. heads: first nodes of segments, by the time at
    which they became that."""

    def __init__(self, mark: bytes, number: int) -> None:
        self.mark, self.number = mark, number
        self.epoch = secrets.randbits(62)
        self.clock = 0
        self.heads: Numbered[Node] = Numbered()

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def begin(self, node: Node) -> None:
        """The node is the first of a segment from now on."""
        node.begins = self.tick()
        self.heads.add(node.begins, node)


class Cursor(NamedTuple):
    """Where a listing stands: in which group, at which time of it the listing came there, behind which segment."""

    epoch: int
    number: int
    time: int
    place: int = 0


class Segment(NamedTuple):
    """first: its first node; chunks: of it; parent: the first node of the segment before it, if it is to be told.
    children: segments that follow. hits: how often a chunk of it was attached to a sequence, all chunks together.
    stored: chunks that a tier below has been given."""

    first: Node
    chunks: int
    parent: Node | None
    children: int
    hits: int
    stored: int


class Segments:
    """The segments of all tenants. `enter` and `leave` follow the tree."""

    def __init__(self) -> None:
        self._groups: dict[bytes, Group] = {}
        self._numbered: Numbered[Group] = Numbered()
        self._count = 0

    def enter(self, node: Node) -> None:
        """A node has got its name and its place."""
        group = self._groups.get(node.tenant) or self._new_group(node.tenant)
        node.entered = group.tick()
        parent = node.parent
        if parent is None or parent.tenant != node.tenant:
            group.begin(node)
            return
        parent.alike += 1
        if parent.alike == 1 and node.number % LONGEST:
            parent.onward = node
            return
        if parent.onward is not None and not parent.onward.begins:
            group.begin(parent.onward)
        group.begin(node)

    def _new_group(self, mark: bytes) -> Group:
        self._count += 1
        group = self._groups[mark] = Group(mark, self._count)
        self._numbered.add(group.number, group)
        return group

    def leave(self, node: Node) -> None:
        """A node without children leaves the tree."""
        group, parent = self._groups[node.tenant], node.parent
        if node.begins:
            group.heads.remove(node.begins)
        if parent is not None and parent.tenant == node.tenant:
            parent.alike -= 1
            if parent.onward is node:
                parent.onward = None
        if not len(group.heads):
            del self._groups[group.mark]
            self._numbered.remove(group.number)

    def page(self, mark: bytes, after: Cursor | None, limit: int) -> tuple[list[Segment], Cursor | None]:
        """Segments of one tenant behind a cursor, and the cursor of the next page, None where there is none."""
        group = self._groups.get(mark)
        if group is None or (after is not None and after.epoch != group.epoch):
            return [], None  # all that the listing was about has left
        cursor = after or Cursor(group.epoch, 0, group.clock)
        page = _Page(limit)
        done = page.take(group, cursor.time, cursor.place, alone=True)
        return page.segments, None if done else cursor._replace(place=page.place)

    def page_of_all(self, after: Cursor | None, limit: int) -> tuple[list[Segment], Cursor | None]:
        """`page` of all tenants, one after the other. A tenant's time is that at which the listing comes to it."""
        page = _Page(limit)
        for number, group in self._numbered.after(after.number - 1 if after is not None else 0):
            page.work += 1
            if group is None:
                continue
            here = after is not None and after.epoch == group.epoch
            time, place = (after.time, after.place) if after is not None and here else (group.clock, 0)
            if not page.take(group, time, place, alone=False):
                return page.segments, Cursor(group.epoch, number, time, page.place)
        return page.segments, None

    def check(self, nodes: dict[bytes, Node]) -> None:
        """Raises AssertionError unless segments and tree agree."""
        heads = {id(node) for group in self._groups.values() for _, node in group.heads.after(0) if node is not None}
        assert heads == {id(node) for node in nodes.values() if node.begins}, "segments of nodes that are not there"
        assert set(self._groups) == {node.tenant for node in nodes.values()}, "a tenant without chunks"
        for node in nodes.values():
            parent, alike = node.parent, [each for each in node.children.values() if each.tenant == node.tenant]
            assert node.number == (0 if parent is None else parent.number + 1), "a wrong number of chunks before it"
            assert node.alike == len(alike), "a node counts other children than it has"
            assert node.onward is None or node.onward in alike, "a run goes on with a chunk that has left"
            goes_on = (
                parent is not None and parent.tenant == node.tenant and parent.onward is node and parent.alike == 1
            )
            assert node.begins or goes_on, "a chunk is in no segment"


class _Page:
    """What one page has found. place: behind which the next one begins. work: nodes looked at."""

    def __init__(self, limit: int) -> None:
        self.segments: list[Segment] = []
        self.place = 0
        self.work = 0
        self._limit = limit
        self._found: dict[tuple[int, bool], Node] = {}
        """First nodes of segments, by one of their nodes, and by whether another group asks."""

    def take(self, group: Group, time: int, place: int, alone: bool) -> bool:
        """Takes in segments of a group behind `place`; whether those were its last. alone: nothing is told that has to
        do with other groups."""
        self.place = place
        for begins, first in group.heads.after(place):
            if begins > time:
                break
            if len(self.segments) == self._limit or (self.segments and self.work > WORK):
                return False
            self.work += 1
            if first is not None:
                self.segments.append(self._segment(first, time, alone))
                self.place = begins
        return True

    def _segment(self, first: Node, time: int, alone: bool) -> Segment:
        chunks = hits = stored = below = 0
        node, last = first, first
        while True:
            chunks, hits, stored = chunks + 1, hits + node.hits, stored + node.stored
            below += len(node.children)
            last = node
            if node.onward is None or node.onward.entered > time or _is_first(node.onward, time):
                break
            node = node.onward
        self.work += TELLING + chunks
        children = last.alike if alone else below - (chunks - 1)
        return Segment(first, chunks, self._parent(first, time, alone), children, hits, stored)

    def _parent(self, first: Node, time: int, alone: bool) -> Node | None:
        """The first node of the segment before that of `first`."""
        before = first.parent
        if before is None or (alone and before.tenant != first.tenant):
            return None
        other = before.tenant != first.tenant  # and its clock is another: as it is now
        found = self._found.get((id(before), other))
        if found is None:
            found = before
            while not (found.begins if other else _is_first(found, time)):
                assert found.parent is not None, "every run has a first node"
                found = found.parent
                self.work += 1
            self._found[id(before), other] = found
        return found


def _is_first(node: Node, time: int) -> bool:
    return 0 < node.begins <= time
