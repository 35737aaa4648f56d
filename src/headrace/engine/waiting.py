"""Prompts that wait in the engine's queue, as the server's process counts them: all their tokens, and the new ones.

Which tokens are new is an estimate, since the tree is in the engine's process: a chunk counts as new the first time
it is seen, and again once MOST_CHUNKS or a pool's worth of others have been. It costs a hash per chunk of an
accepted prompt, and nothing of a refused one.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from headrace.kv.tree import chain, token_array
from headrace.types import CHUNK, Request

MOST_CHUNKS = 65_536
"""Chunks that are remembered: some 10 MiB."""
MOST_NAMED = 2048
"""Chunks of one prompt that are looked at, 131,072 tokens, in about 3 ms; the tokens after them count as new."""

ROOT = bytes(32)


class WaitingPrompts:
    """tokens: of the prompts that wait. new_tokens: those of them that have to be computed, about.

    chunks: of the pool; 0 where nothing is shared.
    """

    def __init__(self, chunks: int) -> None:
        self.tokens = 0
        self.new_tokens = 0
        self._most = min(chunks, MOST_CHUNKS)
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._waiting: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        tokens = len(request.prompt_token_ids)
        new = tokens - self._shared(request) if self._most else tokens
        self._waiting[request.request_id] = tokens, new
        self.tokens += tokens
        self.new_tokens += new

    def leave(self, request_id: str) -> None:
        """It waits no more; without effect where it does not."""
        tokens, new = self._waiting.pop(request_id, (0, 0))
        self.tokens -= tokens
        self.new_tokens -= new

    def clear(self) -> None:
        self._waiting.clear()
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
