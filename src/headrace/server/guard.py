"""What every request meets first: the key, the engine's readiness, the limit on the body's size."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.server.errors import ApiError, ClientGone, as_api_error, error_reply
from headrace.server.state import ServerState

MAX_BODY_BYTES = 32 * 2**20
"""A million token ids take 7 MiB of JSON, a million tokens of text about 5."""

DISCARD_BYTES = 8 * MAX_BODY_BYTES
"""So much of a body too large is read and thrown away: a client that still sends would not see the answer."""


class Guard:
    """/health passes always. The rest needs the key, then a living engine (but /metrics also tells of a dead one)."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app, self.state = app, state
        key = state.config.server.api_key
        self.key = None if key is None else _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        reply = _Reply(send, self.state)
        try:
            if scope["path"] != "/health":
                self._check(scope)
            await self.app(scope, _limited(receive), reply.send)
        except Exception as error:
            if reply.started:
                raise
            told = as_api_error(error)
            self.state.refusals.note(told, scope["method"], scope["path"])
            await error_reply(told, scope)(scope, receive, reply.send)

    def _check(self, scope: Scope) -> None:
        if self.key is not None and not hmac.compare_digest(self.key, _digest(_bearer(scope))):
            raise ApiError(401, "missing or wrong API key", None, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
        if self.state.phase == "loading":
            raise ApiError(503, "the model is still loading", None, "loading", {"Retry-After": "5"})
        if self.state.phase in ("restarting", "failed") and scope["path"] != "/metrics":
            raise self._away()

    def _away(self) -> ApiError:
        if self.state.phase == "failed":
            return ApiError(503, str(self.state.reason), None, "engine_dead")
        wait = {"Retry-After": str(self.state.retry_after_s)}
        return ApiError(503, f"{self.state.reason}; it is being started again", None, "restarting", wait)


class _Reply:
    """`send` that counts errors, and knows whether an answer has begun."""

    def __init__(self, send: Send, state: ServerState) -> None:
        self._send, self._state = send, state
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            if message["status"] >= 400:
                self._state.metrics.refused.labels(str(message["status"])).inc()
        await self._send(message)


def _digest(key: bytes) -> bytes:
    """Equal lengths, so that the comparison tells nothing about the key's."""
    return hashlib.sha256(key).digest()


def _bearer(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return bytes(value[7:].strip())
    return b""


def _limited(receive: Receive) -> Receive:
    """`receive` that raises ApiError 413 once the body has more than MAX_BODY_BYTES."""
    seen = 0

    async def limited() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen <= MAX_BODY_BYTES:
            return message
        await _discard(message, receive)
        raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes", None, "body_too_large")

    return limited


async def _discard(message: Any, receive: Receive) -> None:
    thrown = 0
    while message["type"] == "http.request" and message.get("more_body") and thrown < DISCARD_BYTES:
        thrown += len(message.get("body", b""))
        message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
