"""The application without a socket: requests of this process take the same way as those that come over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from headrace.config import EngineConfig
from headrace.progress import OnPhase, Prefill, untold
from headrace.server.app import create_app
from headrace.server.state import MakeEngine
from headrace.types import EngineDead

log = logging.getLogger("headrace.server")

LOOK_S = 0.05
"""Seconds between two looks at an engine that is loading."""


class InProcessServer:
    """`create_app`'s application and its engine."""

    def __init__(self, make_engine: MakeEngine, config: EngineConfig) -> None:
        self.app = create_app(make_engine, config)
        self.state = self.app.state.headrace

    async def ready(self, phases: OnPhase = untold) -> None:
        """Waits until an engine answers; `phases` is told what one that loads is doing.

        Raises what stopped the first engine from loading, EngineDead if there is no other after a failure.
        """
        while not (self.state.phase == "ready" and self.state.engine.alive):
            if self.state.phase == "failed":
                raise self.state.error or EngineDead(self.state.reason)
            now = self.state.loading.times.now
            if now is not None:
                phases(now)
            await asyncio.sleep(LOOK_S)

    def reading(self) -> tuple[list[Prefill], float]:
        """Prompts being read, and tokens of them per second; for any thread."""
        try:
            return self.state.engine.prefills, self.state.engine.prefill_rate
        except EngineDead:
            return [], 0.0

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer. Cancelling it aborts the request."""
        asked, status, parts = False, 0, []

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if asked:
                await asyncio.Event().wait()  # this client never leaves
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        await self.app(_scope(path), receive, send)
        return status, b"".join(parts)


def _scope(path: str) -> dict[str, Any]:
    headers = [(b"host", b"in-process"), (b"content-type", b"application/json")]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }


@asynccontextmanager
async def in_process(make_engine: MakeEngine, config: EngineConfig) -> AsyncIterator[InProcessServer]:
    """The engine begins to load at once, and is shut down at the end. `config` is also the engine's."""
    server = InProcessServer(make_engine, config)

    def is_news(record: logging.LogRecord) -> bool:
        return bool(server.state.phase != "failed")  # whoever asks gets the last failure as an exception

    log.addFilter(is_news)
    try:
        async with server.app.router.lifespan_context(server.app):
            yield server
    finally:
        log.removeFilter(is_news)
