"""Prompts that wait in the engine's queue, as the server's process counts them: all their tokens, and the new ones.

Which tokens are new is an estimate, since the tree is in the engine's process: a chunk counts as new the first time
it is seen, and again once MOST_CHUNKS or a pool's worth of others have been. It costs a hash per chunk of an
accepted prompt, and nothing of a refused one.

The queue's limits are shared: where it is full, a tenant still has a place that has less in it than its weight's share
among the tenants that wait. So n tenants have at most 1 + 1/2 + ... + 1/n times the limits waiting.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from headrace.kv.tree import chain, token_array
from headrace.types import CHUNK, Request

MOST_CHUNKS = 65_536
"""Chunks that are remembered: some 10 MiB."""
MOST_NAMED = 2048
"""Chunks of one prompt that are looked at, 131,072 tokens, in about 3 ms; the tokens after them count as new."""

ROOT = bytes(32)


@dataclass(slots=True)
class Waiting:
    """What waits of one tenant."""

    weight: float = 1.0
    requests: int = 0
    tokens: int = 0
    new_tokens: int = 0


class WaitingPrompts:
    """tokens: of the prompts that wait. new_tokens: those of them that have to be computed, about.

    chunks: of the pool; 0 where nothing is shared.
    """

    def __init__(self, chunks: int) -> None:
        self.tokens = 0
        self.new_tokens = 0
        self._most = min(chunks, MOST_CHUNKS)
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._waiting: dict[str, tuple[str, int, int]] = {}
        self._tenants: dict[str, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        tokens = len(request.prompt_token_ids)
        new = tokens - self._shared(request) if self._most else tokens
        self._waiting[request.request_id] = request.tenant, tokens, new
        self._tenants.setdefault(request.tenant, Waiting()).weight = request.weight
        self._count(request.tenant, 1, tokens, new)

    def leave(self, request_id: str) -> None:
        """It waits no more; without effect where it does not."""
        if (left := self._waiting.pop(request_id, None)) is not None:
            tenant, tokens, new = left
            self._count(tenant, -1, -tokens, -new)
            if not self._tenants[tenant].requests:
                del self._tenants[tenant]

    def _count(self, tenant: str, requests: int, tokens: int, new: int) -> None:
        own = self._tenants[tenant]
        own.requests += requests
        for each in (own, self):
            each.tokens += tokens
            each.new_tokens += new

    def of(self, tenant: str) -> Waiting:
        """What waits of a tenant."""
        return self._tenants.get(tenant) or Waiting()

    def share(self, tenant: str, weight: float) -> float:
        """A tenant's part of all weights, among those that have something waiting and itself."""
        return weight / (weight + sum(each.weight for name, each in self._tenants.items() if name != tenant))

    def is_full(self, request: Request, most_requests: int, most_tokens: int) -> bool:
        """Whether there is no place for a request: the limits are reached, and it is not within its tenant's share."""
        tokens, own = len(request.prompt_token_ids), self.of(request.tenant)
        if len(self) < most_requests and (not len(self) or self.tokens + tokens <= most_tokens):
            return False
        if not own.requests:
            return False  # the first of a tenant always has a place
        share = self.share(request.tenant, request.weight)
        return own.requests + 1 > share * most_requests or own.tokens + tokens > share * most_tokens

    def told(self, tenant: str) -> str:
        """'512 requests with 9,000 prompt tokens are waiting, 800 of them new'; of a tenant beside others, its own."""
        own = self.of(tenant)
        others = "" if own.requests == len(self) else f" of this tenant, {len(self):,} in all,"
        told = f"{own.requests:,} requests{others} with {own.tokens:,} prompt tokens are waiting"
        return f"{told}, {own.new_tokens:,} of them new"

    def clear(self) -> None:
        self._waiting.clear()
        self._tenants.clear()
        self.tokens = self.new_tokens = 0

    def _shared(self, request: Request) -> int:
        """Tokens of the prompt's beginning that were seen before; all of its chunks count as seen from now on. At least
        one token is left to compute, as in KVCache.reuse."""
        ids = request.prompt_token_ids
        tokens = token_array(ids[: MOST_NAMED * CHUNK])
        salt, private_from = _tenant(request)
        name, shared, known = ROOT, 0, True
        for chunk in range((min(len(ids), len(tokens) + 1) - 1) // CHUNK):
            name = chain(name, tokens[chunk * CHUNK : (chunk + 1) * CHUNK], salt if chunk == private_from else b"")
            known = known and name in self._seen
            shared += CHUNK * known
            self._seen[name] = None
            self._seen.move_to_end(name)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)
        return shared


def _tenant(request: Request) -> tuple[bytes, int]:
    """What names a tenant's chunks, and the first private one; (b"", -1) without a salt (see KVCache.open)."""
    if request.cache_salt is None:
        return b"", -1
    mark = hashlib.sha256(request.cache_salt.encode("utf-8", "surrogatepass")).digest()[:16]
    return mark, request.public_prefix_tokens // CHUNK
