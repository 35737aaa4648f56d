"""The driver's listening socket, on which workers connect and prove that they know the secret, until all are there.

One thread serves all connections. One that has not proved to know the secret gets PROVE_S in all, however its bytes
trickle in, and there are at most MOST_STRANGERS of them: the oldest makes way for the newest. A worker that had to make
way comes again (control.connect), so a flood of connections delays the start and does not prevent it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable

from headrace.logs import shown
from headrace.parallel.control import REFUSAL, Channel, Refused, WorkerHello, greet

log = logging.getLogger(__name__)

MOST_STRANGERS = 256
"""Connections without a proof, at one time."""
PROVE_S = 2.0
"""So long a connection may take to its proof."""
HELLO_S = 10.0
"""So long a worker that has proved to know the secret may take to its WorkerHello."""
LOG_S = 5.0
"""Refused connections share one line in the log per so many seconds."""

BACKLOG = 1024
AT_ONCE = 32
"""Connections accepted before those that are open are served again."""
PAUSE_S = 0.05
"""After an accept that failed, for want of file descriptors for instance."""


class Handshake:
    """Listens on one interface, on a port the system chooses. Use as a context manager, or `close` it.

    address: HOST:PORT.
    """

    def __init__(self, interface: str, secret: str) -> None:
        self._secret = secret
        self._socket = socket.create_server((interface, 0), backlog=BACKLOG)
        self._socket.setblocking(False)
        host, port = self._socket.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, _PendingConnection] = {}  # the oldest first, here and below
        self._proved: dict[socket.socket, _PendingConnection] = {}
        self._refusals = _Refusals()
        self._admitted: queue.SimpleQueue[tuple[Channel, WorkerHello]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="headrace-handshake", daemon=True)
        self._thread.start()

    def __enter__(self) -> Handshake:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing listens afterwards, and links that `admit` did not return are closed. May be called again."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()

    def admit(
        self, ranks: range, timeout_s: float, check: Callable[[], None]
    ) -> dict[int, tuple[Channel, WorkerHello]]:
        """Links to all of `ranks`. `check` is called now and then and may raise (a worker has ended, say).

        Raises TimeoutError, naming the ranks that are missing.
        """
        inside: dict[int, tuple[Channel, WorkerHello]] = {}
        end = time.monotonic() + timeout_s
        try:
            while len(inside) < len(ranks):
                check()
                if time.monotonic() > end:
                    missing = ", ".join(str(rank) for rank in ranks if rank not in inside)
                    raise TimeoutError(f"rank {missing} did not come within {timeout_s:g} s")
                with contextlib.suppress(queue.Empty):
                    channel, hello = self._admitted.get(timeout=0.1)
                    if hello.rank in inside or hello.rank not in ranks:
                        channel.close()
                        raise ValueError(
                            f"a worker says that it is rank {hello.rank}, which is taken or none of {ranks}"
                        )
                    inside[hello.rank] = channel, hello
        except BaseException:
            for channel, _ in inside.values():
                channel.close()
            raise
        return inside

    def _serve(self) -> None:
        try:
            while not self._closed.is_set():
                events = self._selector.select(0.2)
                for key, _ in events:
                    if key.data is not None:
                        self._go_on(key.data)
                if any(key.data is None for key, _ in events):
                    self._let_in()
                self._expire()
                self._refusals.tell()
        finally:
            self._end()

    def _let_in(self) -> None:
        """Accepts connections that wait. Each beyond MOST_STRANGERS costs the oldest stranger its place."""
        for _ in range(AT_ONCE):
            try:
                link, peer = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                if self._closed.is_set():
                    return
                self._make_room(len(self._strangers) // 2)
                self._closed.wait(PAUSE_S)
                return
            visitor = _PendingConnection(link, f"{peer[0]}:{peer[1]}", self._secret)
            self._strangers[link] = visitor
            self._selector.register(link, selectors.EVENT_READ, visitor)
            self._go_on(visitor)
            self._make_room(MOST_STRANGERS)

    def _go_on(self, visitor: _PendingConnection) -> None:
        """Advances a handshake by the bytes that have arrived."""
        try:
            admitted = visitor.hear()
        except (OSError, ValueError) as error:
            self._refuse(visitor, str(error), tell=isinstance(error, Refused))
            return
        if visitor.proved and visitor.link in self._strangers:
            self._proved[visitor.link] = self._strangers.pop(visitor.link)
        if admitted is not None:
            self._forget(visitor)
            self._admitted.put(admitted)

    def _make_room(self, most: int) -> None:
        while len(self._strangers) > most:
            self._refuse(next(iter(self._strangers.values())), "made way for a newer one before its proof")

    def _expire(self) -> None:
        now = time.monotonic()
        for visitors, missing in ((self._strangers, "a proof"), (self._proved, "a greeting")):
            while visitors and (oldest := next(iter(visitors.values()))).end < now:
                self._refuse(oldest, f"took too long to {missing}")

    def _refuse(self, visitor: _PendingConnection, why: str, tell: bool = False) -> None:
        self._refusals.add(visitor.peer, why)
        self._forget(visitor)
        visitor.drop(tell)

    def _forget(self, visitor: _PendingConnection) -> None:
        self._selector.unregister(visitor.link)
        self._strangers.pop(visitor.link, None)
        self._proved.pop(visitor.link, None)

    def _end(self) -> None:
        self._socket.close()
        for visitor in [*self._strangers.values(), *self._proved.values()]:
            self._forget(visitor)
            visitor.drop()
        self._selector.close()
        self._refusals.tell(at_once=True)
        with contextlib.suppress(queue.Empty):
            while True:
                self._admitted.get_nowait()[0].close()


class _PendingConnection:
    """A connection from its beginning to the worker's WorkerHello. `end`: when its time is over."""

    def __init__(self, link: socket.socket, peer: str, secret: str) -> None:
        link.setblocking(False)
        self.link, self.peer = link, peer
        self.proved = False
        self.end = time.monotonic() + PROVE_S
        self._greeting = greet(link, secret)
        self._begun = False
        self._wanted, self._got = 0, b""

    def hear(self) -> tuple[Channel, WorkerHello] | None:
        """Takes in what has come: at most what the next part of the handshake needs. The link, after the last part.

        Raises Refused, OSError.
        """
        if not self._begun:
            self._begun, self._wanted = True, self._say(*next(self._greeting))
        try:
            part = self.link.recv(self._wanted - len(self._got))
        except BlockingIOError:
            return None
        if not part:
            raise ConnectionResetError("ended before " + ("its greeting" if self.proved else "its proof"))
        self._got += part
        while len(self._got) == self._wanted:
            try:
                step = self._greeting.send(self._got)
            except StopIteration as done:
                admitted: tuple[Channel, WorkerHello] = done.value
                return admitted
            if not self.proved:
                self.proved, self.end = True, time.monotonic() + HELLO_S
            self._wanted, self._got = self._say(*step), b""
        return None

    def drop(self, tell: bool = False) -> None:
        """Closes the connection; `tell`: so that a worker with a wrong secret does not come again."""
        with contextlib.suppress(OSError):
            if tell and not self.proved:
                self.link.send(REFUSAL)
            else:  # at once, without the state that the kernel keeps of connections that ended in order
                self.link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.link.close()

    def _say(self, words: bytes, wanted: int) -> int:
        if words and self.link.send(words) < len(words):
            raise ConnectionResetError("took in nothing")
        return wanted


class _Refusals:
    """Tells of refused connections, in one line for all of LOG_S."""

    def __init__(self) -> None:
        self._why: Counter[str] = Counter()
        self._last, self._next = "", 0.0

    def add(self, peer: str, why: str) -> None:
        self._why[shown(why)] += 1
        self._last = peer
        self.tell()

    def tell(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if not self._why or (now < self._next and not at_once):
            return
        reasons = ", ".join(f"{count} {why}" for why, count in self._why.most_common())
        log.warning("connections to the ranks' port refused: %s; the last from %s", reasons, self._last)
        self._why.clear()
        self._next = now + LOG_S
