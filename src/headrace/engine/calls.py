"""What may be asked of a running engine beside requests: calls, each answered between two steps.

A new call is a record here, a line in `EngineCall`, and a handler in engine.call_handlers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.errors import InvalidRequest


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    """Forget the cached chunks that nobody holds: pinned ones stay. Answer: how many they were."""


class TreePage(msgspec.Struct, tag=True, frozen=True):
    """Segments of the prefix tree (kv.segments): those under one salt, or with `everything` those of all tenants.

    after: a cursor of an earlier answer. Answer: {"segments": a list of engine.cache_tree.told, "after": the cursor of
    the next page, None behind the last}.
    """

    salt: str | None = None
    everything: bool = False
    after: tuple[int, int, int, int] | None = None
    limit: int = 100


class PinPrefix(msgspec.Struct, tag=True, frozen=True):
    """Hold the whole chunks of a prefix for `ttl_s` seconds, so that they cannot be evicted. Under an `id` that the
    tenant has already it takes the place of that pin, whose time it so extends.

    after: the id of the request that computes them, which must have been sent before: the answer comes when it has
    ended. Such a request has `kv.pins.prompt_to_pin(tokens)` for its prompt and the same salt; empty: they are
    computed. Refused if they are not, or with no room for them. soft: it ends as soon as a request needs the room.
    adapter, adapter_start: as of a Request. Answer: a Pin as `kv.pins.Pins.told` has it.
    """

    id: str
    tokens: list[int]
    ttl_s: float
    tenant: str = ""
    salt: str | None = None
    public_prefix_tokens: int = 0
    after: str = ""
    adapter: str = ""
    adapter_start: int = 0
    soft: bool = False


class ReleasePrefix(msgspec.Struct, tag=True, frozen=True):
    """End a pin of the tenant. Refused with the code not_found if it has none of that id. Answer: the Pin as it was."""

    id: str
    tenant: str = ""


class ListPrefixes(msgspec.Struct, tag=True, frozen=True):
    """Answer: a list of the tenant's Pins, oldest first."""

    tenant: str = ""


class SaveSession(msgspec.Struct, tag=True, frozen=True):
    """Save what is cached of these tokens under a name; salt, public_tokens and adapter as those of a Request. Answer:
    as of LoadSession."""

    name: str
    tenant: str
    tokens: list[int]
    salt: str | None = None
    public_tokens: int = 0
    to: Literal["file", "tier"] = "file"
    adapter: str = ""


class ReadSession(msgspec.Struct, tag=True, frozen=True):
    """salt: as for saving it. Answer: {tokens: the session's, to: where its chunks are, adapter: whose, by name; empty:
    the model's}."""

    name: str
    tenant: str
    salt: str | None = None


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

EngineCall = ResetPrefixCache | TreePage | PinPrefix | ReleasePrefix | ListPrefixes | SessionCall


class Refused(msgspec.Struct, frozen=True):
    """An InvalidRequest between processes: a call or a request that cannot be served."""

    told: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def by(cls, error: InvalidRequest) -> Refused:
        return cls(str(error), error.param, error.code)

    @property
    def error(self) -> InvalidRequest:
        return InvalidRequest(self.told, self.param, self.code)


Answer = Any
"""Plain data that msgpack has: numbers, texts, bytes, lists and dicts of them."""
