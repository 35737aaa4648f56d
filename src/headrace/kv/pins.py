"""Pinned prefixes: chunks that somebody wants to stay in the pool, for a time, whatever else is computed.

A pin holds the whole chunks of its prefix by a table of its own, so that they are never idle. It begins empty and takes
each chunk as it is computed, or restored from a tier; then its time runs.

    begin --> attach, attach, ... --> settle --> (end of its time) or release
                    \\--> drop: the prefix was not computed after all
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    """ends_s: by the clock; infinite until it is settled."""

    id: str
    tenant: str
    ttl_s: float
    table: ChunkTable
    ends_s: float = math.inf

    @property
    def chunks(self) -> int:
        """That it holds, or will hold."""
        return len(self.table.tokens) // CHUNK

    @property
    def whole(self) -> bool:
        return len(self.table.nodes) == self.chunks


class Pins:
    """The pins of one cache. They are memory of the engine: it begins without any.

    most_chunks: that all pins together may hold. most_states: recurrent states that they may hold, each its own.
    chunks_by_account: distinct chunks that are pinned. Nothing here is called but between two steps.
    """

    def __init__(
        self,
        cache: KVCache,
        most_chunks: int,
        most_states: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self.most_chunks, self.most_states = most_chunks, most_states
        self.refused = 0
        self._clock = clock
        self._pins: dict[tuple[str, str], Pin] = {}
        self._coming: list[Pin] = []
        self._holders: Counter[Node] = Counter()
        self._next_s = math.inf

    @property
    def chunks(self) -> int:
        """Distinct chunks that pins hold, or wait for."""
        return len(self._holders) + sum(pin.chunks - len(pin.table.nodes) for pin in self._coming)

    def __len__(self) -> int:
        return len(self._pins)

    def is_pinned(self, node: Node) -> bool:
        return node in self._holders

    @property
    def wait_s(self) -> float:
        """Until the next pin ends; infinite if none will."""
        return max(0.0, self._next_s - self._clock())

    def of(self, tenant: str) -> list[Pin]:
        """The tenant's pins, oldest first."""
        self.expire()
        return [pin for pin in self._pins.values() if pin.tenant == tenant]

    def begin(self, pin_id: str, tenant: str, ttl_s: float, table: ChunkTable) -> Pin:
        """A pin that holds nothing yet, with an open table of `prompt_to_pin`. Raises InvalidRequest, with the table
        closed, beyond any bound."""
        pin = Pin(pin_id, tenant, ttl_s, table)
        self.cache.pin(table)
        try:
            self._check(pin)
        except InvalidRequest:
            self.cache.close(table)
            self.refused += 1
            raise
        self._coming.append(pin)
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
            raise _full(f"{MOST_PINS} prefixes are pinned: release one, or wait for one to end")
        if self.chunks + self.new_chunks(pin) > self.most_chunks:
            told = (
                f"{pin.chunks:,} chunks, beside {self.chunks:,} that are pinned, are more than the {self.most_chunks:,}"
            )
            raise _full(f"{told} that may be (max_pinned_share): release a pin, wait for one to end, shorten the prefix, "
                        "or raise --kv-cache-tokens")  # fmt: skip
        if self.cache.states is not None and len(self._pins) + len(self._coming) >= self.most_states:
            told = f"{self.most_states} prefixes can be pinned beside the states of running sequences"
            raise _full(f"{told}: release one, or raise --recurrent-states")

    def new_chunks(self, pin: Pin) -> int:
        """Chunks of the pin that no other one holds."""
        found = (self.cache.tree.find(pin.table.digest(chunk)) for chunk in range(pin.chunks))
        return sum(node is None or not self.is_pinned(node) for node in found)

    def attach(self, pin: Pin) -> bool:
        """Holds what is there by now; whether that is all."""
        before = len(pin.table.nodes)
        self.cache.reuse(pin.table)
        self._holders.update(pin.table.nodes[before:])
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
        for node in pin.table.nodes:
            self._holders[node] -= 1
            if not self._holders[node]:
                del self._holders[node]
        self.cache.close(pin.table)

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
        held = Counter(node for pin in every for node in pin.table.nodes)
        assert held == self._holders, "a pinned chunk is counted wrongly"
        assert all(pin.whole for pin in self._pins.values()), "a pin lacks chunks"


def _full(told: str) -> InvalidRequest:
    return InvalidRequest(told, None, "pins_full")
