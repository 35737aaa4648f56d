"""What may be asked of a running engine beside requests: calls, each answered between two steps.

A new call is a record here, a line in `EngineCall`, and a handler in engine.call_handlers.
"""

from __future__ import annotations

from typing import Any

import msgspec


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    """Forget the cached chunks that no sequence holds. Answer: how many they were."""


EngineCall = ResetPrefixCache


class Refused(msgspec.Struct, frozen=True):
    """A call that cannot be served: an InvalidRequest."""

    told: str
    param: str | None = None
    code: str | None = None


Answer = Any
"""Plain data that msgpack has: numbers, texts, bytes, lists and dicts of them."""
