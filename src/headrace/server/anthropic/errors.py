"""Errors in Anthropic's shape, and which requests want them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MESSAGES = "/v1/messages"
MODELS = "/v1/models"

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status; another 4xx is an invalid_request_error, another 5xx an api_error."""


def speaks(path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request is answered in Anthropic's shapes: one for messages, or for models by Anthropic's client."""
    if path == MESSAGES or path.startswith(f"{MESSAGES}/"):
        return True
    return (path == MODELS or path.startswith(f"{MODELS}/")) and has_version(headers)


def has_version(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the header anthropic-version is there, which Anthropic's clients send with each request."""
    return any(name == b"anthropic-version" for name, _ in headers)


NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Details by which the client's tool runner knows that it has to send all messages; it then asks again."""


def error_body(status: int, message: str, request_id: str, param: str | None = None) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    if param == "thread":
        error["details"] = NO_THREADS
    return {"type": "error", "error": error, "request_id": request_id}
