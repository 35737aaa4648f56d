"""The remote tier's connections: redis-py's, with one deadline for all that a call does, and a parser that takes
nothing but what was asked for (offload.tiers.resp_protocol).

redis-py's own time-outs are per system call: a server that sends a byte now and then would hold a caller for ever.
"""

from __future__ import annotations

import importlib
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

from headrace.offload.tiers.base import BlobParts, flat
from headrace.offload.tiers.resp_protocol import LINE_BYTES, DeadlineCall, ReplyParser

CommandPieces = list[bytes | memoryview]


class DeadlineSocket:
    """A connected socket each of whose operations ends by the deadline of the call that makes it."""

    def __init__(self, sock: socket.socket, call: DeadlineCall) -> None:
        self._sock, self._call, self._blocks = sock, call, True

    def settimeout(self, timeout: float | None) -> None:
        """redis-py's own time-outs are no longer than the deadline; 0, for a look at what has come, counts."""
        self._blocks = timeout != 0

    def gettimeout(self) -> float | None:
        return self._sock.gettimeout() if self._blocks else 0

    def _limit(self) -> None:
        self._sock.settimeout(self._call.left_s if self._blocks else 0)

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        self._limit()
        self._sock.sendall(data)

    def recv(self, size: int, flags: int = 0) -> bytes:
        self._limit()
        return self._sock.recv(size, flags)

    def recv_into(self, buffer: memoryview, size: int = 0, flags: int = 0) -> int:
        self._limit()
        return self._sock.recv_into(buffer, size, flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def packed(arguments: Sequence[bytes], value: BlobParts | None = None) -> CommandPieces:
    """One command; `value`, if given, is its last argument, the parts joined. Long pieces stay where they are."""
    pieces: CommandPieces = []
    head = b"*%d\r\n" % (len(arguments) + (value is not None))
    for argument in arguments:
        head += b"$%d\r\n%b\r\n" % (len(argument), argument)
    if value is None:
        return [head]
    views = [flat(part) for part in value]
    head += b"$%d\r\n" % sum(map(len, views))
    for view in views:
        if len(view) < LINE_BYTES:
            head += bytes(view)
        else:
            pieces += [head, view]
            head = b""
    return [*pieces, head + b"\r\n"]


def redis_module() -> Any:
    """redis-py. Raises ValueError with the remedy if it is not installed or too old."""
    try:
        redis = importlib.import_module("redis")
        version = tuple(int(part) for part in redis.__version__.split(".")[:2])
    except ImportError:
        version = (0, 0)
    if version < (5, 3):
        raise ValueError("KV on a remote server needs redis-py 5.3 or later: pip install 'headrace[remote]'")
    return redis


URL_FORM = "redis://[[USER]:PASSWORD@]HOST[:PORT][/DB], or rediss:// for TLS, or unix://[[USER]:PASSWORD@]/PATH[?db=DB]"


def settings_of(url: str, redis: Any) -> dict[str, Any]:
    """redis-py's settings of a connection. Raises ValueError that does not show the URL, which may hold a password."""
    try:
        parts = urlsplit(url)
        well_formed = parts.scheme in ("redis", "rediss", "unix") and (
            (not parts.hostname and bool(parts.path)) if parts.scheme == "unix" else bool(parts.hostname)
        )
        query = set(parse_qs(parts.query, strict_parsing=True)) if parts.query else set()
        database = parts.path.strip("/")
        if parts.scheme != "unix" and database and not database.isdecimal():
            well_formed = False
        allowed = {"db"} | ({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"} if parts.scheme == "rediss" else set())
        if not well_formed or parts.fragment or query - allowed:
            raise ValueError
        return dict(redis.connection.parse_url(url))
    except (ValueError, TypeError):
        raise ValueError(f"kv_remote_url must have the form {URL_FORM} (reserved characters as %XX)") from None


def connect_within(connect: Callable[[], socket.socket], timeout_s: float) -> socket.socket:
    """connect() in a thread of its own: looking up a name and trying several addresses have no time-out together.

    Raises what it raises, or TimeoutError; a socket that comes later is closed.
    """
    lock = threading.Lock()
    made: list[socket.socket | Exception] = []
    over = threading.Event()
    ended = threading.Event()

    def run() -> None:
        result: socket.socket | Exception
        try:
            result = connect()
        except Exception as error:
            result = error
        with lock:
            made.append(result)
            if over.is_set() and not isinstance(result, Exception):
                result.close()
        ended.set()

    threading.Thread(target=run, name="headrace-connect", daemon=True).start()
    ended.wait(timeout_s)
    with lock:
        over.set()
        if not made:
            raise TimeoutError("no connection in time")
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def pool_of(url: str, timeout_s: float, call: DeadlineCall, redis: Any) -> Any:
    """A redis-py ConnectionPool, which connects when first asked. Raises ValueError for a malformed URL."""
    settings = settings_of(url, redis)
    base = settings.pop("connection_class", redis.connection.Connection)

    class DeadlineConnection(base):  # type: ignore[misc, valid-type]
        def _connect(self) -> Any:
            return DeadlineSocket(connect_within(super()._connect, call.left_s), call)

    settings |= {
        "connection_class": DeadlineConnection,
        "parser_class": partial(ReplyParser, call, redis),
        "protocol": 2,
        "socket_timeout": timeout_s,
        "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
    }
    if base is not redis.connection.UnixDomainSocketConnection:
        settings["socket_connect_timeout"] = timeout_s
    return redis.ConnectionPool(**settings)
