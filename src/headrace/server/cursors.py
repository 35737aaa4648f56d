"""Cursors of paged listings: plain data that a client hands back unread, and cannot make up or use elsewhere."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets

import msgspec

Place = tuple[int, int, int, int]
"""What a cursor holds: engine.calls.TreePage.after."""

TAG = 12
"""Bytes that tell a cursor of ours."""


class Cursors:
    """Those of one server. `of`: whose listing it is, with its parameters."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def sealed(self, place: Place, of: tuple[str | None, ...]) -> str:
        told = msgspec.msgpack.encode(place)
        return base64.urlsafe_b64encode(self._tag(told, of) + told).decode().rstrip("=")

    def opened(self, cursor: str, of: tuple[str | None, ...]) -> Place:
        """Raises ValueError for what is no cursor of this listing."""
        try:
            raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), b"-_", validate=True)
            if hmac.compare_digest(raw[:TAG], self._tag(raw[TAG:], of)):
                return msgspec.msgpack.decode(raw[TAG:], type=Place)
        except (binascii.Error, UnicodeError, ValueError):
            pass
        raise ValueError("it is not the `next` of a page of this listing; leave it out to begin anew")

    def _tag(self, told: bytes, of: tuple[str | None, ...]) -> bytes:
        return hmac.digest(self._key, msgspec.json.encode(of) + b"\0" + told, hashlib.sha256)[:TAG]
