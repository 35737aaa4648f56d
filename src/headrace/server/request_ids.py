"""The id of a request, by which its reply and the log's lines about it are brought together."""

from __future__ import annotations

from uuid import uuid4

from starlette.types import Scope

from headrace.server.anthropic.errors import speaks

SCOPE = "headrace.request_id"
"""Where the scope of a request holds it: that of its job once there is one, which the log has too."""


def new_id() -> str:
    return f"req_{uuid4().hex}"


def id_header(scope: Scope) -> tuple[bytes, bytes]:
    """By the name under which the request's client looks for it."""
    name = b"request-id" if speaks(scope["path"], scope["headers"]) else b"x-request-id"
    return name, scope[SCOPE].encode()
