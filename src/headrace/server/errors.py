"""Refusals. Every one leaves as OpenAI-shaped JSON: {"error": {"message", "type", "param", "code"}}, but in Anthropic's
shape on Anthropic's routes."""

from __future__ import annotations

import logging
import math
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from headrace.logs import fields, short_id
from headrace.server.anthropic.errors import error_body, speaks
from headrace.server.request_ids import SCOPE as REQUEST_ID
from headrace.types import EngineDead, InvalidRequest, Overloaded

log = logging.getLogger("headrace.server")

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


RETRY_S = 5
"""Seconds, where the time is not known: a model loads, or something outside starts a server again."""


class ApiError(Exception):
    """An answer other than 2xx. `param` names the field at fault (None: the whole request). One that may be asked again
    (429, 503) says when: where `headers` have no Retry-After, after RETRY_S."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        if status in (429, 503):
            headers = {"Retry-After": str(RETRY_S), **(headers or {})}
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ClientGone(Exception):
    """The client closed its connection: nobody is left to answer."""


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code or "invalid_value")


def broken_off(reason: object) -> ApiError:
    """An answer that the engine has aborted: its grammar or its logits cannot go on. The same request would fail again,
    so OpenAI's and Anthropic's clients are told not to repeat it."""
    told = f"the answer was aborted: {reason or 'by the server'}"
    return ApiError(500, told, None, "aborted", {"x-should-retry": "false"})


def as_api_error(error: BaseException, request_id: str) -> ApiError:
    """The answer that an exception of any layer becomes. What a fault inside says goes to the log, not to clients."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return invalid(str(error), error.param, error.code)
    if isinstance(error, Overloaded):
        wait = str(max(1, math.ceil(error.retry_after_s)))
        return ApiError(429, str(error), None, "overloaded", {"Retry-After": wait})
    if isinstance(error, EngineDead):
        return ApiError(503, f"the engine has failed: {error}", None, "engine_dead")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), None, None, dict(error.headers or {}))
    log.error("internal error in %s", short_id(request_id), exc_info=error, extra=fields(request_id=request_id))
    return ApiError(500, "internal error; the server's log has the details", None, "internal_error")


class JsonReply(Response):
    """JSON by msgspec: fast, and never NaN or Infinity."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_reply(told: ApiError, scope: Scope) -> JsonReply:
    """In the shape that the request's client knows."""
    if not speaks(scope["path"], scope["headers"]):
        return JsonReply(told.body(), status_code=told.status, headers=told.headers)
    body = error_body(told.status, told.message, scope[REQUEST_ID], told.param)
    return JsonReply(body, status_code=told.status, headers=told.headers)


async def _handle(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone | ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        what = "unknown route" if error.status_code == 404 else "method not allowed"
        headers = {"Allow": ", ".join(_methods(request))} if error.status_code == 405 else {}
        error = ApiError(error.status_code, f"{what}: {request.method} {request.url.path}", headers=headers)
    told = as_api_error(error, request.scope[REQUEST_ID])
    refusals = request.app.state.headrace.refusals
    refusals.note(told, request.method, request.url.path, request.scope[REQUEST_ID])
    return error_reply(told, request.scope)


def _methods(request: Request) -> list[str]:
    """Of all routes with this path; the framework tells those of the first."""
    matching = (route for route in request.app.state.routes if route.matches(request.scope)[0] != Match.NONE)
    return sorted({method for route in matching for method in getattr(route, "methods", None) or ()})


def install_handlers(app: FastAPI) -> None:
    """Faults of our own are none of these: the guard answers them, where no framework raises them again."""
    for kind in (ApiError, ClientGone, ClientDisconnect, HTTPException, InvalidRequest, Overloaded, EngineDead):
        app.add_exception_handler(kind, _handle)
