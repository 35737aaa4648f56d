"""`headrace serve`: the socket, the signals, and the exit code that tells how it ended."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from headrace.config import EngineConfig
from headrace.server.app import create_app
from headrace.server.connections import ACCEPTED_AT_ONCE, KEEP_ALIVE_S, Connection, Connections, LogThrottle, limit
from headrace.server.engine import ServedEngine
from headrace.server.start import address
from headrace.server.state import MakeEngine, ServerState

if TYPE_CHECKING:  # it imports the tokenizer
    from headrace.engine.async_llm import AsyncLLM
    from headrace.engine.process import EngineStart

log = logging.getLogger("headrace.server")

LOG_THROTTLE = LogThrottle()

GRACE_S = 3.0
"""After the last engine failure /health answers 503 for so long, for balancers to see; then the process ends."""

DEADLINE_S = 7.0
"""After the last engine failure the process ends by now, whatever still hangs."""

BACKLOG = 1024
"""Connections that the system holds until they are accepted."""

SPARE_S = 2
"""So long may it take until requests have heard of their end."""


def serve(config: EngineConfig, make_engine: MakeEngine | None = None) -> int:
    """Serves until a signal or a last failure. Returns the exit code: 0 after a signal, 1 after a failure, 2 where the
    settings or the model cannot work. Raises OSError where the port cannot be bound, ValueError for a host without an
    address."""
    sock = bind(config.server.host, config.server.port)
    config = config.replace(port=sock.getsockname()[1])
    app = create_app(make_engine or engine_maker(config), config)
    server = make_server(app)
    server.state.on_failure = lambda: _end_after_failure(server)
    if not server.state.keys.guarded and not ipaddress.ip_address(sock.getsockname()[0]).is_loopback:
        log.warning("anybody who reaches %s can use this server: set HEADRACE_API_KEY", address(config))
    asyncio.run(server.serve(sockets=[sock]))
    return server.exit_code()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. It is made before the model loads, so that a taken port is told at once."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"host {host!r} is no address of this machine: {error.strerror or error}") from None
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return sock


class HTTPServer(uvicorn.Server):
    """uvicorn raises a caught signal again at its end, which would make a clean end look like a kill."""

    def __init__(self, config: uvicorn.Config, state: ServerState, connections: Connections) -> None:
        super().__init__(config)
        self.state, self.connections = state, connections
        self.asked_to_end = self._ended = False
        state.listens = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Tells that it listens once it does, and once signals are caught."""
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)  # asyncio has set it to what it accepts at once
        log.info("loading %s; %s answers 503 until it is ready", self.state.model, address(self.state.config))
        log.debug("up to %d connections at once", self.connections.most)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets requests under way end, a ctrl-c after it ends them, and one more whatever is left."""
        if self.state.phase == "failed" or self._ended:
            super().handle_exit(sig, frame)
        elif not self.asked_to_end:
            self.asked_to_end = self.state.ending = True
            again = "; ctrl-c again ends them at once" if sig == signal.SIGINT else ""
            seconds = self.state.config.server.shutdown_timeout_s
            log.info("stopping%s", f": requests under way have up to {seconds:g} s{again}" if self._busy() else "")
            asyncio.get_running_loop().call_later(seconds, self._end_requests)
            super().handle_exit(sig, frame)
        elif sig == signal.SIGINT:
            self._end_requests()

    def _end_requests(self) -> None:
        """Closes connections with a request under way, which ends it as if its client had left. (uvicorn would cancel
        it, with a traceback in the log.)"""
        self._ended = True
        busy = self._busy()
        if busy:
            log.info("stopping: ended what was under way: %d request%s", len(busy), "s" * (len(busy) != 1))
        for each in busy:
            each.end(None)

    def _busy(self) -> list[Connection]:
        """Connections with a request under way."""
        return [each for each in self.server_state.connections if isinstance(each, Connection) and each.busy]

    def exit_code(self) -> int:
        if self.asked_to_end or self.state.phase != "failed":
            return 0
        return 2 if isinstance(self.state.error, ValueError) else 1

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self.handle_exit, number, None)
            before = signal.getsignal(signal.SIGHUP)
            loop.add_signal_handler(signal.SIGHUP, self.state.keys.reload)
            try:
                yield
            finally:  # asyncio would leave the system's default, which ends a process that has ignored the signal
                loop.remove_signal_handler(signal.SIGHUP)
                signal.signal(signal.SIGHUP, before)
        else:
            yield


def make_server(app: FastAPI) -> HTTPServer:
    """Raises ValueError where the settings ask for more connections than there are file descriptors."""
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(LOG_THROTTLE)
    settings = app.state.headrace.config.server
    connections = Connections(limit(settings.max_connections))
    return HTTPServer(
        uvicorn.Config(
            app,
            http=partial(Connection, connections),  # type: ignore[arg-type]
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            ws="none",
            lifespan="on",
            backlog=ACCEPTED_AT_ONCE,
            timeout_keep_alive=math.ceil(KEEP_ALIVE_S),
            timeout_graceful_shutdown=math.ceil(settings.shutdown_timeout_s) + SPARE_S,
        ),
        app.state.headrace,
        connections,
    )


def engine_maker(config: EngineConfig, begun: EngineStart | None = None) -> MakeEngine:
    """begun: the process of the first engine; those that follow start their own."""
    starts = [] if begun is None else [begun]

    async def make() -> ServedEngine:
        engine = (await asyncio.to_thread(_engine_class))(config)
        gc.freeze()  # else each collection of what a large body leaves looks at all modules: some tenths of a second
        if starts:
            engine.begun = starts.pop()
        return engine

    return make


def _engine_class() -> type[AsyncLLM]:
    from headrace.engine.async_llm import AsyncLLM

    return AsyncLLM


def _end_after_failure(server: HTTPServer) -> None:
    """A server that never worked ends at once; one that did shows its failure for GRACE_S first."""
    watchdog = threading.Timer(DEADLINE_S, os._exit, (server.exit_code(),))
    watchdog.daemon = True
    watchdog.start()
    server.config.timeout_graceful_shutdown = 1
    grace = 0.0 if server.state.error is not None else GRACE_S
    asyncio.get_running_loop().call_later(grace, setattr, server, "should_exit", True)
