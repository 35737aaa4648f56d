"""The ASGI application: `create_app(engine, config)`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from headrace.config import EngineConfig
from headrace.server.engine import ServedEngine
from headrace.server.errors import install_handlers
from headrace.server.guard import Guard
from headrace.server.routes import install_routes
from headrace.server.state import MakeEngine, ServerState


def create_app(engine: ServedEngine | MakeEngine, config: EngineConfig) -> FastAPI:
    """`engine` is started when the application starts, in the background: until then every route answers 503.

    It may also be a coroutine function that makes the engine, so that slow imports happen after the port is bound, and
    so that it can be made again after a failure (`restart`); an engine given as such cannot.
    Raises ValueError for an empty API key, which would open the door that it is to lock.
    The state (phase, failure, metrics) stands in `app.state.headrace`.
    """
    state = ServerState(engine, config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.open()
        yield
        await state.close()

    app = FastAPI(
        title="Headrace", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=lifespan
    )
    app.state.headrace = state
    install_handlers(app)
    install_routes(app, state)
    app.add_middleware(Guard, state=state)
    return app
