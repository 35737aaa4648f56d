"""What may be asked of a running engine beside requests: calls, each answered between two steps.

A new call is a record here, a line in `EngineCall`, and a handler in engine.call_handlers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    """Forget the cached chunks that no sequence holds. Answer: how many they were."""


class SaveSession(msgspec.Struct, tag=True, frozen=True):
    """Save what is cached of these tokens under a name; salt and public_tokens as those of a Request. Answer: as of
    LoadSession."""

    name: str
    tenant: str
    tokens: list[int]
    salt: str | None = None
    public_tokens: int = 0
    to: Literal["file", "tier"] = "file"


class ReadSession(msgspec.Struct, tag=True, frozen=True):
    """Answer: {tokens: the session's, to: where its chunks are}."""

    name: str
    tenant: str


class LoadSession(msgspec.Struct, tag=True, frozen=True):
    """Bring the chunks of a session back into the pool; salt and public_tokens as for saving it. Answer: {tokens,
    saved_tokens, restored_tokens, bytes, seconds, why}."""

    name: str
    tenant: str
    salt: str | None = None
    public_tokens: int = 0


class ListSessions(msgspec.Struct, tag=True, frozen=True):
    """Answer: [{name, bytes, saved: seconds since 1970}]."""

    tenant: str


class DeleteSession(msgspec.Struct, tag=True, frozen=True):
    name: str
    tenant: str


SessionCall = SaveSession | ReadSession | LoadSession | ListSessions | DeleteSession

EngineCall = ResetPrefixCache | SessionCall


class Refused(msgspec.Struct, frozen=True):
    """A call that cannot be served: an InvalidRequest."""

    told: str
    param: str | None = None
    code: str | None = None


Answer = Any
"""Plain data that msgpack has: numbers, texts, bytes, lists and dicts of them."""
