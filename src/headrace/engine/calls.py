"""What may be asked of a running engine beside requests: calls, each answered between two steps.

A new call is a record here, a line in `EngineCall`, and a handler in engine.call_handlers.
"""

from __future__ import annotations

from typing import Any

import msgspec


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    """Forget the cached chunks that no sequence holds. Answer: how many they were."""


class TreePage(msgspec.Struct, tag=True, frozen=True):
    """Segments of the prefix tree (kv.segments): those under one salt, or with `everything` those of all tenants.

    after: a cursor of an earlier answer. Answer: {"segments": a list of engine.cache_tree.told, "after": the cursor of
    the next page, None behind the last}.
    """

    salt: str | None = None
    everything: bool = False
    after: tuple[int, int, int, int] | None = None
    limit: int = 100


EngineCall = ResetPrefixCache | TreePage


class Refused(msgspec.Struct, frozen=True):
    """A call that cannot be served: an InvalidRequest."""

    told: str
    param: str | None = None
    code: str | None = None


Answer = Any
"""Plain data that msgpack has: numbers, texts, bytes, lists and dicts of them."""
