"""Server-sent events, what a silent stream says meanwhile, and the watch on a client that may leave at any moment."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.server.errors import ClientGone, as_api_error
from headrace.server.job import aclose, cancel

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip."""

NOTE_S = 1.0
"""Seconds between two notes about an answer that has not begun."""


def sse(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def sse_error(error: BaseException, request_id: str) -> bytes:
    """The OpenAI clients raise on an event of this name."""
    return b"event: error\n" + sse(as_api_error(error, request_id).body())


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


Note = Callable[[], bytes | None]
"""What there is to tell of an answer that has not begun: a server-sent event, None for nothing new."""

End = Callable[[], Awaitable[None]]


class EventStream(Response):
    """Sends `events`, each one whole server-sent event, until they are done or the client goes. Then awaits `end`, once
    and in any case.

    After keepalive_s without an event it sends a comment (0: never); until the first event also what `note` says, every
    NOTE_S.
    """

    def __init__(
        self, events: AsyncIterator[bytes], end: End, keepalive_s: float = 0.0, note: Note | None = None
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter is nginx's
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self.events, self.end = events, end
        self._keepalive_s, self._note = keepalive_s or math.inf, note
        self._sent_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with suppress(ClientGone):
                await unless_gone(receive, self._send_all(send))
        finally:
            await aclose(self.events)
            await self.end()

    async def _send_all(self, send: Send) -> None:
        silent = self._keepalive_s == math.inf and self._note is None
        clock = None if silent else asyncio.create_task(self._keep_alive(send))
        try:
            async for event in self.events:
                self._sent_s, self._note = time.monotonic(), None
                await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            if clock is not None:
                await cancel(clock)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        """Runs beside the events, so that they pay nothing for it."""
        while (wait_s := self._wait_s()) < math.inf:
            await asyncio.sleep(wait_s)
            if (frame := self._due()) is not None:
                self._sent_s = time.monotonic()
                await send({"type": "http.response.body", "body": frame, "more_body": True})

    def _wait_s(self) -> float:
        """Until there may be something to send."""
        silence_s = max(0.01, self._sent_s + self._keepalive_s - time.monotonic())
        return silence_s if self._note is None else min(NOTE_S, silence_s)

    def _due(self) -> bytes | None:
        frame = None if self._note is None else self._note()
        if frame is None and time.monotonic() >= self._sent_s + self._keepalive_s:
            return KEEP_ALIVE
        return frame
