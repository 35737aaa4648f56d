"""A tenant: whose requests they are, which cached chunks they may meet, and how much they may ask for."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from headrace.server.errors import ApiError
from headrace.server.keyfile import Rules
from headrace.server.rates import Bucket

BUSY_S = 1.0
"""Nobody knows when a request under way will have ended."""


def salt_of(tenant: str, client: str | None) -> str:
    """The engine's salt for a tenant's salt and what a client asks for within it. No two pairs have the same."""
    return "tenant:" + hashlib.sha256(msgspec.json.encode([tenant, client])).hexdigest()


def spoken(seconds: float) -> str:
    """A time as OpenAI writes it: 120ms, 7.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"


class Tenant:
    """One of the file, under its `rules`; or, with the name "", whoever asks with the one key or without any.

    salted: salts that clients send are wrapped, so that they cannot be those of a tenant. under_way: its requests that
    are not answered yet. counts: since it is known, by (what, which).
    """

    def __init__(
        self, name: str, rules: Rules, salted: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self.salted = name, salted
        self.under_way = 0
        self.counts: Counter[tuple[str, str]] = Counter()
        self._clock = clock
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.follow(rules)

    def follow(self, rules: Rules) -> None:
        """Other rules from now on; what was spent stays spent."""
        self.rules = rules
        self._requests = self._bucket(self._requests, rules.requests_per_minute)
        self._tokens = self._bucket(self._tokens, rules.tokens_per_minute)

    def _bucket(self, old: Bucket | None, per_minute: int | None) -> Bucket | None:
        if per_minute is None:
            return None
        if old is None:
            return Bucket(per_minute, self._clock)
        old.change(per_minute)
        return old

    def salt(self, client: str | None) -> str | None:
        """The engine's salt for requests with the client's cache_salt."""
        if self.name:
            return salt_of(self.rules.salt or self.name, client)
        return salt_of("", client) if self.salted and client is not None else client

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request as long as it lasts. Raises ApiError 429 at its beginning where a limit is reached."""
        most = self.rules.max_concurrent_requests
        if most is not None and self.under_way >= most:
            raise self._over("max_concurrent_requests", f"{most:,} requests are under way", BUSY_S)
        if self._requests is not None:
            if wait_s := self._requests.wait_s(1):
                used = f"its {self._requests.per_minute:,} requests per minute are used up"
                raise self._over("requests_per_minute", used, wait_s)
            self._requests.spend(1)
        self.under_way += 1
        self.counts["requests", ""] += 1
        try:
            yield
        finally:
            self.under_way -= 1

    def standing(self) -> list[tuple[bytes, bytes]]:
        """Headers, as OpenAI names them, that tell what is left of the limits by the minute."""
        told: list[tuple[bytes, bytes]] = []
        for what, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                left = max(0, math.floor(bucket.level))
                values = {"limit": f"{bucket.per_minute:.0f}", "remaining": str(left), "reset": spoken(bucket.full_s)}
                told += [(f"x-ratelimit-{name}-{what}".encode(), value.encode()) for name, value in values.items()]
        return told

    def take(self, tokens: int) -> None:
        """A prompt of so many tokens is about to go to the engine. Raises ApiError 429 where tokens are used up."""
        if self._tokens is not None:
            if wait_s := self._tokens.wait_s(tokens):
                used = f"its {self._tokens.per_minute:,} tokens per minute are used up"
                raise self._over("tokens_per_minute", used, wait_s)
            self._tokens.spend(tokens)

    def settle(self, taken: int, prompt: int, cached: int, output: int) -> None:
        """What a request that took so many tokens has really had: those of its answers too, and cached ones for
        nothing."""
        if self._tokens is not None:
            self._tokens.spend(prompt - cached + output - taken)
        for kind, count in (("prompt", prompt), ("cached", cached), ("output", output)):
            self.counts["tokens", kind] += count

    def _over(self, limit: str, why: str, wait_s: float) -> ApiError:
        self.counts["limited", limit] += 1
        seconds = max(1, math.ceil(wait_s))
        told = f"tenant {self.name}: {why} ({limit}); try again in {seconds} s"
        return ApiError(429, told, None, "rate_limit_exceeded", {"Retry-After": str(seconds)})


ANYBODY = Tenant("", Rules(), salted=False)
"""Whoever asks a server without a file of keys. Nothing is limited or counted by it."""
