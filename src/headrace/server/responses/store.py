"""Responses that are kept for the next turn: in memory. The least recently used of the tenant that has most make room.

An item is kept once, however many responses hold it: a conversation of many turns costs its items once and a list of
their ids a turn. All of it belongs to an owner, and to any other owner does not exist. Of T tenants one that has at
most a T-th of the room loses nothing to others.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from headrace.server.answer_memory import Owner
from headrace.server.answer_places import TOKENS
from headrace.server.responses.items import Item

MOST = 10_000
"""Responses that are kept, however small."""

RESPONSE_BYTES = 700
ITEM_BYTES = 500
LISTED_BYTES = 16
"""What a response, an item and an item's place in a list cost beside their JSON."""


@dataclass(slots=True)
class _Kept:
    """holders: responses that list the item. tokens: of the answer that begins with it, int32."""

    owner: Owner
    raw: bytes
    tokens: bytes = b""
    holders: int = 0

    @property
    def size(self) -> int:
        return len(self.raw) + len(self.tokens) + ITEM_BYTES


@dataclass(frozen=True, slots=True)
class _Entry:
    owner: Owner
    raw: bytes
    input_ids: tuple[str, ...]
    output_ids: tuple[str, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        return self.input_ids + self.output_ids

    @property
    def size(self) -> int:
        return len(self.raw) + RESPONSE_BYTES + LISTED_BYTES * (len(self.input_ids) + len(self.output_ids))


class _Tenant:
    """ids of its responses, the least recently used first; used: bytes of them and of their items."""

    def __init__(self) -> None:
        self.ids: OrderedDict[str, None] = OrderedDict()
        self.used = 0


class ResponseStore:
    """Invariants: `used` is the size of all entries and items, at most `limit`; an item has as many holders as entries
    list it, and at least one; a tenant is known as long as it has a response."""

    def __init__(self, limit: int, most: int = MOST) -> None:
        """limit: bytes; 0 keeps nothing. most: responses."""
        self.limit, self.most = limit, most
        self.used = 0
        self._entries: dict[str, _Entry] = {}
        self._items: dict[str, _Kept] = {}
        self._tenants: dict[str, _Tenant] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._entries

    def put(self, owner: Owner, response: dict[str, Any], given: Sequence[Item], answer: Sequence[int] = ()) -> bool:
        """Keeps a response that has ended, with the items that it was given and the tokens of its answer; False, before
        anything makes room, for one that would not fit if nobody else had more than it takes."""
        output: list[Item] = response["output"]
        items = [*given, *[{**item, TOKENS: answer} for item in output[:1]], *output[1:]]
        kept = {item["id"]: _kept(owner, item) for item in items}
        entry = _Entry(
            owner,
            msgspec.json.encode(response),
            tuple(item["id"] for item in given),
            tuple(item["id"] for item in output),
        )
        if not self.most or not self._fits(owner, entry.size + sum(each.size for each in kept.values())):
            return False
        self._entries[response["id"]] = entry
        self._tenants.setdefault(owner[0], _Tenant()).ids[response["id"]] = None
        self._add(owner, entry.size)
        for item_id in entry.ids:
            self._hold(item_id, kept[item_id])
        tenants = self._tenants.values()
        while self.used > self.limit:
            self._drop_oldest(max(tenants, key=lambda each: each.used))
        while len(self._entries) > self.most:
            self._drop_oldest(max(tenants, key=lambda each: len(each.ids)))
        return response["id"] in self._entries

    def _fits(self, owner: Owner, size: int) -> bool:
        """Whether so many bytes of a tenant stay while others make room, down to as many each."""
        others = (min(each.used, size) for name, each in self._tenants.items() if name != owner[0])
        return size + sum(others) <= self.limit

    def response(self, owner: Owner, response_id: str) -> bytes | None:
        """Its JSON; None if it is not kept for this owner."""
        entry = self._find(owner, response_id)
        return None if entry is None else entry.raw

    def given(self, owner: Owner, response_id: str) -> list[Item] | None:
        """The items of its input; None if it is not kept for this owner."""
        entry = self._find(owner, response_id)
        return None if entry is None else [self._item(item_id) for item_id in entry.input_ids]

    def conversation(self, owner: Owner, response_id: str) -> list[Item] | None:
        """The items of its input and of its output; None if it is not kept for this owner. Those that begin an answer
        have its tokens (`token_ids`)."""
        entry = self._find(owner, response_id)
        return None if entry is None else [self._with_tokens(item_id) for item_id in entry.ids]

    def item(self, owner: Owner, item_id: str) -> Item | None:
        """With the tokens of the answer that it begins; None if it is not kept for this owner."""
        kept = self._items.get(item_id)
        return None if kept is None or kept.owner != owner else self._with_tokens(item_id)

    def delete(self, owner: Owner, response_id: str) -> bool:
        """False if it is not kept for this owner. Items that other responses hold stay."""
        if self._find(owner, response_id) is None:
            return False
        self._drop(response_id)
        return True

    def check(self) -> None:
        """Asserts the invariants."""
        held: dict[str, int] = {}
        for entry in self._entries.values():
            for item_id in entry.ids:
                held[item_id] = held.get(item_id, 0) + 1
                assert self._items[item_id].owner == entry.owner
        assert held == {item_id: kept.holders for item_id, kept in self._items.items()}
        sizes: Counter[str] = Counter()
        parts: list[_Entry | _Kept] = [*self._entries.values(), *self._items.values()]
        for each in parts:
            sizes[each.owner[0]] += each.size
        assert self.used == sizes.total() <= self.limit
        assert sizes == {name: tenant.used for name, tenant in self._tenants.items()}
        ids = [(name, response_id) for name, tenant in self._tenants.items() for response_id in tenant.ids]
        assert sorted(ids) == sorted((entry.owner[0], response_id) for response_id, entry in self._entries.items())
        assert len(ids) <= self.most

    def _find(self, owner: Owner, response_id: str) -> _Entry | None:
        entry = self._entries.get(response_id)
        if entry is None or entry.owner != owner:
            return None
        self._tenants[owner[0]].ids.move_to_end(response_id)
        return entry

    def _item(self, item_id: str) -> Item:
        item: Item = msgspec.json.decode(self._items[item_id].raw)
        return item

    def _with_tokens(self, item_id: str) -> Item:
        tokens = np.frombuffer(self._items[item_id].tokens, np.int32)
        return {**self._item(item_id), TOKENS: tokens.tolist()} if len(tokens) else self._item(item_id)

    def _hold(self, item_id: str, new: _Kept) -> None:
        kept = self._items.get(item_id)
        if kept is None:
            kept = self._items[item_id] = new
            self._add(kept.owner, kept.size)
        kept.holders += 1

    def _add(self, owner: Owner, size: int) -> None:
        self.used += size
        self._tenants[owner[0]].used += size

    def _drop_oldest(self, tenant: _Tenant) -> None:
        self._drop(next(iter(tenant.ids)))

    def _drop(self, response_id: str) -> None:
        entry = self._entries.pop(response_id)
        tenant = self._tenants[entry.owner[0]]
        del tenant.ids[response_id]
        self._add(entry.owner, -entry.size)
        for item_id in entry.ids:
            kept = self._items[item_id]
            kept.holders -= 1
            if not kept.holders:
                del self._items[item_id]
                self._add(kept.owner, -kept.size)
        if not tenant.ids:
            del self._tenants[entry.owner[0]]


def _kept(owner: Owner, item: Item) -> _Kept:
    shown = {name: value for name, value in item.items() if name != TOKENS}
    return _Kept(owner, msgspec.json.encode(shown), np.array(item.get(TOKENS, ()), np.int32).tobytes())
