"""`headrace serve`: the socket, the signals, and the exit code that tells how it ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import uvicorn

from headrace.config import EngineConfig
from headrace.server.app import create_app
from headrace.server.engine import Engine
from headrace.server.state import MakeEngine, ServerState

log = logging.getLogger("headrace.server")

GRACE_S = 3.0
"""After an engine failure /health answers 503 for so long, for balancers to see; then the process ends."""

DEADLINE_S = 7.0
"""After an engine failure the process ends by now, whatever still hangs."""

FINISH_S = 10
"""After SIGTERM running requests may go on for so long."""


def serve(config: EngineConfig, make_engine: MakeEngine | None = None) -> int:
    """Serves until a signal or a failure. Returns the exit code: 0 after a signal, 1 after a failure, 2 where the
    settings or the model cannot work. Raises OSError where the port cannot be bound."""
    sock = bind(config.host, config.port)
    config.port = sock.getsockname()[1]
    app = create_app(make_engine or _engine_maker(config), config)
    state: ServerState = app.state.headrace
    server = make_server(app)
    state.on_failure = lambda: _end_after_failure(state, server)
    log.info("listening on http://%s:%d, loading %s", config.host, config.port, config.model)
    asyncio.run(server.serve(sockets=[sock]))
    return exit_code(state)


def exit_code(state: ServerState) -> int:
    if state.phase != "failed":
        return 0
    return 2 if isinstance(state.error, ValueError) else 1


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. It is made before the model loads, so that a taken port is told at once."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return sock


class Server(uvicorn.Server):
    """uvicorn raises a caught signal again at its end, which would make a clean end look like a kill."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


def make_server(app: object) -> Server:
    return Server(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            ws="none",
            lifespan="on",
            backlog=1024,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=FINISH_S,
        )
    )


def _engine_maker(config: EngineConfig) -> MakeEngine:
    async def make() -> Engine:
        module = await asyncio.to_thread(import_module, "headrace.engine.async_llm")
        engine: Engine = module.AsyncLLM(config)
        return engine

    return make


def _end_after_failure(state: ServerState, server: Server) -> None:
    """A server that never worked ends at once; one that did shows its failure for GRACE_S first."""
    watchdog = threading.Timer(DEADLINE_S, os._exit, (exit_code(state),))
    watchdog.daemon = True
    watchdog.start()
    server.config.timeout_graceful_shutdown = 1
    grace = 0.0 if state.error is not None else GRACE_S
    asyncio.get_running_loop().call_later(grace, setattr, server, "should_exit", True)
