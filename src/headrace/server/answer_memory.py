"""--replay-answers: the tokens of answers that were given lately, found again by the conversation that they ended.

Text of an owner (a tenant and a cache_salt) finds answers of this owner alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from headrace.server.replay import Known

Owner = tuple[str, str | None]
"""The tenant, and the cache_salt of its requests."""

Asked = tuple[int, bytes]
"""The rendered conversation that was answered: its bytes and its digest."""

MOST_ANSWERS, MOST_OWN_TOKENS = 2048, 1 << 20
"""Of one owner: answers, and their tokens (4 bytes each)."""
MOST_OWNERS, MOST_TOKENS = 4096, 8 << 20
"""Of all."""

MOST_ALIKE = 4
"""Answers to one conversation."""


class _Own:
    """Answers of one owner, the least recently used first. tokens: of all of them."""

    def __init__(self) -> None:
        self.answers: OrderedDict[Asked, list[NDArray[np.int32]]] = OrderedDict()
        self.tokens = 0

    def add(self, asked: Asked, tokens: NDArray[np.int32]) -> None:
        before = self.answers.pop(asked, [])
        others = [each for each in before if not np.array_equal(each, tokens)]
        self.answers[asked] = alike = [tokens, *others][:MOST_ALIKE]
        self.tokens += sum(map(len, alike)) - sum(map(len, before))

    def drop_oldest(self) -> None:
        """Forgets the conversation used least recently; of the only one its oldest answer."""
        if len(self.answers) == 1 and len(alike := next(iter(self.answers.values()))) > 1:
            self.tokens -= len(alike.pop())
            return
        _, alike = self.answers.popitem(last=False)
        self.tokens -= sum(map(len, alike))


class AnswerMemory:
    """Bounded: of one owner the answers used least recently make room, of all owners the one that asked least recently.
    tokens: of all owners."""

    def __init__(self) -> None:
        self.tokens = 0
        self._owners: OrderedDict[Owner, _Own] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(own.answers) for own in self._owners.values())

    def add(self, owner: Owner, asked: str, tokens: Sequence[int]) -> None:
        """An answer has been given to this rendered conversation."""
        if not tokens or len(tokens) > MOST_OWN_TOKENS:
            return
        own = self._owners.setdefault(owner, _Own())
        self._owners.move_to_end(owner)
        raw, before = asked.encode("utf-8", "surrogatepass"), own.tokens
        own.add((len(raw), _digest(raw)), np.array(tokens, np.int32))
        while len(own.answers) > MOST_ANSWERS or own.tokens > MOST_OWN_TOKENS:
            own.drop_oldest()
        self.tokens += own.tokens - before
        while self.tokens > MOST_TOKENS or len(self._owners) > MOST_OWNERS:
            _, oldest = self._owners.popitem(last=False)
            self.tokens -= oldest.tokens

    def find(self, owner: Owner, rendered: str) -> list[Known]:
        """Answers to conversations that this one begins with, of several to one the latest first."""
        own = self._owners.get(owner)
        if own is None:
            return []
        self._owners.move_to_end(owner)
        raw = rendered.encode("utf-8", "surrogatepass")
        hashed, at, found = blake2b(digest_size=16), 0, []
        for length in sorted({length for length, _ in own.answers if length <= len(raw)}):
            hashed.update(raw[at:length])
            at = length
            alike = own.answers.get(asked := (length, hashed.digest()))
            if alike:
                own.answers.move_to_end(asked)
                start = len(raw[:length].decode("utf-8", "surrogatepass"))
                found += [Known(start, tokens.tolist()) for tokens in alike]
        return found


def _digest(raw: bytes) -> bytes:
    return blake2b(raw, digest_size=16).digest()
