"""What every request meets first: the key, the engine's readiness, the limit on the body's size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.server.errors import ApiError, ClientGone, as_api_error, error_reply
from headrace.server.request_ids import SCOPE, id_header, new_id
from headrace.server.state import ServerState
from headrace.server.tenants import Tenant
from headrace.types import Overloaded

MAX_BODY_BYTES = 32 * 2**20
"""A million token ids take 7 MiB of JSON, a million tokens of text about 5."""

DISCARD_BYTES = 8 * MAX_BODY_BYTES
"""So much of a body too large is read and thrown away: a client that still sends would not see the answer."""


TENANT = "headrace.tenant"
"""Where the scope of a request that has passed holds its Tenant."""


class Guard:
    """/health passes always. The rest needs a key, then a living engine (but /metrics also tells of a dead one), and
    what is posted a place within the limits of the key's tenant, as long as it is answered."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app, self.state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope[SCOPE] = new_id()
        _to_origin_form(scope)
        reply = _Reply(send, scope, self.state)
        try:
            _check_framing(scope)
            _check_announced(scope)
            if scope["path"] != "/health":
                tenant = self._check(scope)
            else:
                tenant = self.state.keys.anybody
            scope[TENANT] = tenant
            if scope["method"] == "POST":
                reply.tenant = tenant
            with self._place(scope, tenant):
                await self.app(scope, _limited(receive), reply.send)
        except Exception as error:
            if reply.started:
                raise
            told = as_api_error(error, scope[SCOPE])
            self.state.refusals.note(told, scope["method"], scope["path"], scope[SCOPE])
            await error_reply(told, scope)(scope, receive, reply.send)

    def _check(self, scope: Scope) -> Tenant:
        tenant = self.state.keys.tenant(_presented(scope))
        if tenant is None:
            raise ApiError(401, "missing or wrong API key", None, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
        if self.state.phase == "loading":
            raise ApiError(503, "the model is still loading", None, "loading")
        if self.state.phase in ("restarting", "failed") and scope["path"] != "/metrics":
            raise self._away()
        if scope["path"] == "/metrics" and tenant.name and not tenant.rules.metrics:
            told = "this key may not read /metrics: it tells of all tenants; set metrics = true for its tenant"
            raise ApiError(403, told, None, "not_allowed")
        return tenant

    def _place(self, scope: Scope, tenant: Tenant) -> AbstractContextManager[None]:
        """For a request that may cost something. While the queue is half full, a tenant beyond its share of requests
        gets no more, so that the rest of the queue is left to the others."""
        if scope["method"] != "POST":
            return nullcontext()
        keys = self.state.keys
        if keys.tenants and self.state.half_full and keys.beyond_share(tenant):
            tenant.counts["limited", "weight"] += 1
            who = f"tenant {tenant.name}" if tenant.name else "this key"
            raise Overloaded(f"{who} has its share of all requests under way (weight), and the queue is half full",
                             self.state.retry_after_of(tenant))  # fmt: skip
        return tenant.request()

    def _away(self) -> ApiError:
        if self.state.phase == "failed":
            return ApiError(503, str(self.state.reason), None, "engine_dead")
        wait = {"Retry-After": str(self.state.retry_after_s)}
        return ApiError(503, f"{self.state.reason}; it is being started again", None, "restarting", wait)


class _Reply:
    """`send` that counts errors, tells the request's id and where the limits of its tenant stand, and knows whether an
    answer has begun."""

    def __init__(self, send: Send, scope: Scope, state: ServerState) -> None:
        self._send, self._scope, self._state = send, scope, state
        self.started = False
        self.tenant: Tenant | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            if message["status"] >= 400:
                self._state.metrics.refused.labels(str(message["status"])).inc()
            told = [] if self.tenant is None else self.tenant.standing()
            message = {**message, "headers": [*message["headers"], id_header(self._scope), *told]}
        await self._send(message)


def _to_origin_form(scope: Scope) -> None:
    """The path of a target that names the server too, as clients send it to a proxy (RFC 9112, 3.2.2)."""
    if "://" in scope["path"] and not scope["path"].startswith("/"):
        scope["path"] = urlsplit(scope["path"]).path or "/"
        scope["raw_path"] = scope["path"].encode("utf-8", "surrogatepass")


def _check_framing(scope: Scope) -> None:
    """Raises ApiError for a body whose end two headers tell: a proxy that goes by the other one would take what follows
    for the next request (RFC 9112, 6.1)."""
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
        told = "content-length and transfer-encoding tell the end of one body: send one of them"
        raise ApiError(400, told, None, "invalid_framing", {"Connection": "close"})


def _check_announced(scope: Scope) -> None:
    """Raises ApiError 413 where a client asks whether to send a body that is too large, which then is not sent."""
    headers = dict(scope["headers"])
    asks = headers.get(b"expect", b"").lower() == b"100-continue"
    if asks and int(headers.get(b"content-length", 0)) > MAX_BODY_BYTES:
        raise _too_large({"Connection": "close"})


def _too_large(headers: dict[str, str] | None = None) -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes", None, "body_too_large", headers)


def _presented(scope: Scope) -> Iterator[bytes]:
    """Keys that come with a request: OpenAI's clients send a bearer, Anthropic's x-api-key, and some both."""
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            yield bytes(value[7:].strip())
        elif name == b"x-api-key":
            yield bytes(value.strip())


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
        raise _too_large()

    return limited


async def _discard(message: Any, receive: Receive) -> None:
    thrown = 0
    while message["type"] == "http.request" and message.get("more_body") and thrown < DISCARD_BYTES:
        thrown += len(message.get("body", b""))
        message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
