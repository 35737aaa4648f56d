"""The call TreePage: a page of the prefix tree's segments as plain data."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Generator
from typing import Any

from headrace.engine.calls import Answer, TreePage
from headrace.engine.core import EngineCore
from headrace.kv.pins import Pins
from headrace.kv.segments import Cursor, Segment
from headrace.kv.tree import Node, tenant_mark
from headrace.types import CHUNK

BLIND = secrets.token_bytes(16)
"""Keys the ids of segments where all tenants' are told: what is known of one's own chunks finds nobody else's."""


def tree_page(core: EngineCore, call: TreePage) -> Generator[None, None, Answer]:
    """One piece of a millisecond or two, however large the tree is: between two steps there is one page at most."""
    yield
    segments, after = core.cache.tree.segments, None if call.after is None else Cursor(*call.after)
    if call.everything:
        found, cursor = segments.page_of_all(after, call.limit)
    else:
        found, cursor = segments.page(tenant_mark(call.salt), after, call.limit)
    chunk_bytes, now = core.loaded.capacity.kv_bytes_per_token * CHUNK, time.monotonic()
    listed = [told(each, core.pins, chunk_bytes, now, call.everything) for each in found]
    return {"segments": listed, "after": None if cursor is None else list(cursor)}


def told(segment: Segment, pins: Pins, chunk_bytes: int, now: float, blind: bool) -> dict[str, Any]:
    """tokens, of which the pool has `bytes`, behind the `start` first ones of a sequence. parent: id of the segment
    that has those, if it is told. holders: running sequences and pins that hold the segment's beginning. hits: how
    often that was attached; reused_tokens: tokens attached, each time counted. idle_s: since its last use.
    stored_tokens: those which a tier below has too. owner: the same for segments under the same salt, None for those
    that all share."""
    first = segment.first
    return {
        "id": _named(first, blind),
        "parent": None if segment.parent is None else _named(segment.parent, blind),
        "owner": _hidden(first.tenant) if first.tenant and blind else None,
        "private": bool(first.tenant),
        "start": first.number * CHUNK,
        "tokens": segment.chunks * CHUNK,
        "chunks": segment.chunks,
        "bytes": segment.chunks * chunk_bytes,
        "children": segment.children,
        "holders": first.refs,
        "hits": first.hits,
        "reused_tokens": segment.hits * CHUNK,
        "pinned_tokens": _pinned(segment, pins) * CHUNK,
        "stored_tokens": segment.stored * CHUNK,
        "idle_s": round(max(0.0, now - first.used), 3),
    }


def _pinned(segment: Segment, pins: Pins) -> int:
    """Chunks at its beginning that pins hold."""
    node: Node | None = segment.first
    count = 0
    while count < segment.chunks and node is not None and pins.is_pinned(node.digest or b""):
        count, node = count + 1, node.onward
    return count


def _named(first: Node, blind: bool) -> str:
    assert first.digest is not None, "segments are of named chunks"
    return _hidden(first.digest) if blind else first.digest[:16].hex()


def _hidden(name: bytes) -> str:
    return hashlib.blake2b(name, digest_size=16, key=BLIND).hexdigest()
