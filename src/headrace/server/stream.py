"""Server-sent events, and the watch on a client that may leave at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.server.errors import ClientGone, as_api_error
from headrace.server.job import aclose, cancel

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def sse(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def sse_error(error: BaseException) -> bytes:
    """The OpenAI clients raise on an event of this name."""
    return b"event: error\n" + sse(as_api_error(error).body())


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; the moment the client is gone `work` is cancelled and ClientGone raised.

    The request's body must have been read: from then on `receive` has nothing to tell but the end.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await cancel(task, watch)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `events`, each one whole server-sent event, and closes them when done or when the client goes."""

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter is nginx's
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await unless_gone(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            await aclose(self.events)

    async def _send_all(self, send: Send) -> None:
        async for event in self.events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
