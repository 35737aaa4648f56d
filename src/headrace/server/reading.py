"""Places for requests that are read and tokenized, before the engine's own queue bounds what waits."""

from __future__ import annotations

from asyncio import Semaphore
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.server.tenants import Tenant
from headrace.types import Overloaded

AT_ONCE = 4
"""Requests of one tenant that are rendered and tokenized at a time. Threads take what comes first: of each tenant of a
file another one meets no more there. Who has the one key, or needs none, has no others to wait for."""


class ReadingPlaces:
    """At most `most` requests at once. Where all places are taken, a tenant still gets its weight's share of them among
    those that have any, as in the engine's queue: bodies that one sends slowly shut nobody else out."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._taken: Counter[Tenant] = Counter()
        self._turns: dict[Tenant, Semaphore] = {}

    def __len__(self) -> int:
        return self._taken.total()

    @contextmanager
    def place(self, tenant: Tenant, retry_after_s: Callable[[Tenant], float]) -> Iterator[None]:
        """Raises Overloaded where there is none."""
        if self._is_full(tenant):
            raise Overloaded(f"{len(self)} requests are being read", retry_after_s(tenant))
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]
                self._turns.pop(tenant, None)

    def turn(self, tenant: Tenant) -> Semaphore:
        """Held by a request with a place while it is rendered and tokenized."""
        return self._turns.setdefault(tenant, Semaphore(AT_ONCE if tenant.name else self.most))

    def _is_full(self, tenant: Tenant) -> bool:
        own = self._taken[tenant]
        if len(self) < self.most or not own:
            return False  # the first of a tenant always has a place
        weight = tenant.rules.weight
        total = weight + sum(each.rules.weight for each in self._taken if each is not tenant)
        return (own + 1) * total > weight * self.most
