"""Pinned prefixes: chunks that somebody wants to stay in the pool, for a time, whatever else is computed.

A pin holds the whole chunks of its prefix by a table of its own, so that they are never idle. It begins empty and takes
each chunk as it is computed, or restored from a tier; then its time runs.

    begin --> attach, attach, ... --> settle --> (end of its time) or release
                    \\--> drop: the prefix was not computed after all

A soft pin keeps its chunks from idle ones' fate alone: it costs no request its room, and ends as soon as one needs that
(`give_way`). The others are firm: what they hold is reserved, and requests are measured by what that leaves.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headrace.kv.accounts import Account
from headrace.kv.cache import KVCache
from headrace.kv.chunk_table import ChunkTable
from headrace.kv.tree import Node
from headrace.types import CHUNK, InvalidRequest

MOST_PINS = 100
"""Of one tenant."""
MAX_TTL_S = 31 * 86_400.0
MAX_ID = 256


def prompt_to_pin(tokens: Sequence[int]) -> list[int]:
    """The prompt that computes all whole chunks of `tokens`, and leaves the recurrent state behind them: these and one
    token more. Raises InvalidRequest if there is no whole chunk."""
    whole = len(tokens) // CHUNK * CHUNK
    if not whole:
        told = f"a pin holds whole chunks of {CHUNK} tokens, and the prefix has {len(tokens)}: make it longer"
        raise InvalidRequest(told, "prompt", "prefix_too_short")
    return [*tokens[:whole], tokens[whole - 1]]


@dataclass(slots=True, eq=False)
class Pin:
    """ends_s: by the clock; infinite until it is settled. over: it has ended."""

    id: str
    tenant: str
    ttl_s: float
    table: ChunkTable
    soft: bool = False
    ends_s: float = math.inf
    over: bool = False

    @property
    def chunks(self) -> int:
        """That it holds, or will hold."""
        return len(self.table.tokens) // CHUNK

    @property
    def names(self) -> Iterator[bytes]:
        """Of its chunks."""
        return (self.table.digest(chunk) for chunk in range(self.chunks))

    @property
    def whole(self) -> bool:
        return len(self.table.nodes) == self.chunks


class Pins:
    """The pins of one cache. They are memory of the engine: it begins without any.

    most_chunks: that all pins together may hold. changed: may be set to be told that there are more or fewer of them.
    make_way: may be set to be asked about each new firm pin; raises InvalidRequest if it must not be. owned: firmly
    pinned chunks of each account. Nothing here is called but between two steps.
    """

    def __init__(
        self,
        cache: KVCache,
        most_chunks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self.most_chunks = most_chunks
        self.refused = 0
        self._clock = clock
        self._pins: dict[tuple[str, str], Pin] = {}
        self._coming: list[Pin] = []
        self._names: Counter[bytes] = Counter()
        self._firm: Counter[bytes] = Counter()
        self._holders: Counter[Node] = Counter()
        """Of chunks, how many firm pins hold them."""
        self.owned: Counter[Account] = Counter()
        self.changed: Callable[[], None] = lambda: None
        self.make_way: Callable[[Pin], None] = lambda pin: None
        self._next_s = math.inf

    @property
    def chunks(self) -> int:
        """Distinct chunks that pins hold, or wait for."""
        return len(self._names)

    @property
    def firm_chunks(self) -> int:
        """Of these, those of firm pins."""
        return len(self._firm)

    @property
    def awaited(self) -> int:
        """Those of firm pins that none holds yet."""
        return len(self._firm) - len(self._holders)

    @property
    def chunks_of_nobody(self) -> int:
        """Those of firm pins that are of no account, and those that are waited for."""
        return len(self._firm) - self.owned.total()

    def __len__(self) -> int:
        return len(self._pins)

    def is_pinned(self, name: bytes) -> bool:
        return name in self._names

    def is_firm(self, name: bytes) -> bool:
        """Whether a firm pin holds the chunk, or waits for it."""
        return name in self._firm

    @property
    def wait_s(self) -> float | None:
        """Until the next pin ends; None if none will."""
        return max(0.0, self._next_s - self._clock()) if self._pins else None

    def of(self, tenant: str) -> list[Pin]:
        """The tenant's pins, oldest first."""
        self.expire()
        return [pin for pin in self._pins.values() if pin.tenant == tenant]

    def begin(self, pin_id: str, tenant: str, ttl_s: float, table: ChunkTable, soft: bool = False) -> Pin:
        """A pin that holds nothing yet, with an open table of `prompt_to_pin`. Raises InvalidRequest, with the table
        closed, beyond any bound."""
        pin = Pin(pin_id, tenant, ttl_s, table, soft)
        self.cache.pin(table)
        try:
            self._check(pin)
        except InvalidRequest:
            self.cache.close(table)
            self.refused += 1
            raise
        self.changed()
        self._coming.append(pin)
        self._names.update(pin.names)
        if not soft:
            self._firm.update(pin.names)
        return pin

    def _check(self, pin: Pin) -> None:
        if not 0 < len(pin.id) <= MAX_ID:
            raise InvalidRequest(f"the id of a pin has 1 to {MAX_ID} characters", "id")
        if not 0 < pin.ttl_s <= MAX_TTL_S:
            raise InvalidRequest(
                f"ttl_s must be above 0 and at most {MAX_TTL_S:,.0f} seconds, got {pin.ttl_s}", "ttl_s"
            )
        others = [each for each in (*self.of(pin.tenant), *self._coming) if each.tenant == pin.tenant]
        if len(others) >= MOST_PINS and (pin.tenant, pin.id) not in self._pins:
            raise full(f"{MOST_PINS} prefixes are pinned: release one, or wait for one to end")
        if self._too_many(pin):
            told = f"{pin.chunks:,} chunks beside {self.chunks:,} pinned ones, and {self.most_chunks:,} may be pinned"
            raise full(f"{told} (max_pinned_share): release a pin, wait for one to end, or raise --kv-cache-tokens")
        states = self.cache.states
        if states is not None and pin.soft:
            told = "each pin holds a recurrent state, of which sequences need theirs: pin a prefix by name"
            raise InvalidRequest(told, None, "unsupported_parameter")
        if states is not None and 2 * len(self.cache.pinned) > states.total:
            told = f"each pin holds a recurrent state, and there are {states.total}, half of them for pins"
            raise full(f"{told}: release a pin, or raise --recurrent-states")
        if states is not None and len(self.cache.pinned) + len(self.cache.tables) > states.total:
            told = f"each of {len(self.cache.tables)} sequences has a recurrent state, and there are {states.total}"
            raise full(f"{told}: ask again when fewer are running, or raise --recurrent-states")
        if not pin.soft:
            self.make_way(pin)

    def _too_many(self, pin: Pin) -> bool:
        """Whether the pins would hold more than they may; soft ones end for a firm one."""
        if not pin.soft and self.firm_chunks + self.new_firm_chunks(pin) > self.most_chunks:
            return True
        while self.chunks + sum(not self.is_pinned(name) for name in pin.names) > self.most_chunks:
            if pin.soft or not self.give_way():
                return True
        return False

    def new_firm_chunks(self, pin: Pin) -> int:
        """Chunks of the pin that no firm one holds."""
        return sum(not self.is_firm(name) for name in pin.names)

    def attach(self, pin: Pin) -> bool:
        """Holds what is there by now; whether that is all."""
        before = len(pin.table.nodes)
        self.cache.reuse(pin.table)
        for node in pin.table.nodes[before:] if not pin.soft else ():
            self._holders[node] += 1
            if self._holders[node] == 1 and node.account is not None:
                self.owned[node.account] += 1
        return pin.whole

    def settle(self, pin: Pin) -> None:
        """From now on its time runs. It takes the place of a pin of the same tenant and id."""
        self._coming.remove(pin)
        if (old := self._pins.pop((pin.tenant, pin.id), None)) is not None:
            self._let_go(old)
        pin.ends_s = self._clock() + pin.ttl_s
        self._pins[pin.tenant, pin.id] = pin
        self._note_next()

    def drop(self, pin: Pin) -> None:
        """Gives up a pin that has not been settled."""
        self._coming.remove(pin)
        self._let_go(pin)

    def give_way(self) -> bool:
        """Ends the oldest soft pin; whether there was one."""
        pin = next((each for each in (*self._pins.values(), *self._coming) if each.soft), None)
        if pin is None:
            return False
        if pin in self._coming:
            self._coming.remove(pin)
        else:
            del self._pins[pin.tenant, pin.id]
        self._let_go(pin)
        self._note_next()
        return True

    def release(self, pin_id: str, tenant: str) -> Pin:
        """Ends a pin. Raises InvalidRequest if the tenant has none of that id, whoever else has one."""
        self.expire()
        pin = self._pins.pop((tenant, pin_id), None)
        if pin is None:
            raise InvalidRequest(f"there is no pinned prefix {pin_id!r}: it was released, or its time is over", "id",
                                 "not_found")  # fmt: skip
        self._let_go(pin)
        self._note_next()
        return pin

    def expire(self) -> None:
        """Ends the pins whose time is over."""
        now = self._clock()
        if now < self._next_s:
            return
        for key, pin in list(self._pins.items()):
            if pin.ends_s <= now:
                del self._pins[key]
                self._let_go(pin)
        self._note_next()

    def _note_next(self) -> None:
        self._next_s = min((pin.ends_s for pin in self._pins.values()), default=math.inf)

    def _let_go(self, pin: Pin) -> None:
        pin.over = True
        for node in pin.table.nodes if not pin.soft else ():
            self._holders[node] -= 1
            if not self._holders[node]:
                del self._holders[node]
                if node.account is not None:
                    self.owned[node.account] -= 1
        self._names -= Counter(pin.names)
        if not pin.soft:
            self._firm -= Counter(pin.names)
        self.cache.close(pin.table)
        self.changed()

    def told(self, pin: Pin, bytes_per_token: int) -> dict[str, str | int | float]:
        """A pin as plain data. expires_in_s: of one that is over, 0."""
        tokens = pin.chunks * CHUNK
        left = max(0.0, pin.ends_s - self._clock())
        return {"id": pin.id, "tokens": tokens, "chunks": pin.chunks, "bytes": tokens * bytes_per_token,
                "ttl_s": pin.ttl_s, "expires_in_s": left}  # fmt: skip

    def check(self) -> None:
        """Raises AssertionError unless pins, tables and counts agree. For tests."""
        every = [*self._pins.values(), *self._coming]
        assert {pin.table for pin in every} == self.cache.pinned, "pins and pinned tables differ"
        firm = [pin for pin in every if not pin.soft]
        held = Counter(node for pin in firm for node in pin.table.nodes)
        assert held == self._holders, "a pinned chunk is counted wrongly"
        assert Counter(name for pin in every for name in pin.names) == self._names, "a pinned name is counted wrongly"
        assert Counter(name for pin in firm for name in pin.names) == self._firm, "a firm name is counted wrongly"
        assert not any(pin.over for pin in every), "a pin that has ended is kept"
        owned = Counter(node.account for node in held if node.account is not None)
        assert owned == +self.owned, "an account counts other pinned chunks than it has"
        assert all(pin.whole for pin in self._pins.values()), "a pin lacks chunks"


def full(told: str) -> InvalidRequest:
    return InvalidRequest(told, None, "pins_full")
