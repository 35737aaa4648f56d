"""Where workers come in: a listening socket of the driver, open until all of them are there."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

from headrace.parallel.control import Channel, Hello, Refused, accept

log = logging.getLogger(__name__)

MOST_AT_ONCE = 64
"""Handshakes under way; further connections are closed at once."""


class Gate:
    """Listens on one interface, on a port the system chooses. Use as a context manager, or `close` it."""

    def __init__(self, interface: str, secret: str) -> None:
        self._secret = secret
        self._socket = socket.create_server((interface, 0), backlog=MOST_AT_ONCE)
        self._socket.settimeout(0.2)
        self._admitted: queue.SimpleQueue[tuple[Channel, Hello]] = queue.SimpleQueue()
        self._slots = threading.Semaphore(MOST_AT_ONCE)
        self._closed = threading.Event()
        threading.Thread(target=self._listen, name="headrace-gate", daemon=True).start()

    @property
    def address(self) -> str:
        """HOST:PORT."""
        host, port = self._socket.getsockname()[:2]
        return f"{host}:{port}"

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closed.set()
        self._socket.close()

    def admit(self, ranks: range, timeout_s: float, check: Callable[[], None]) -> dict[int, tuple[Channel, Hello]]:
        """Links to all of `ranks`. `check` is called now and then and may raise (a worker has ended, say).

        Raises TimeoutError, naming the ranks that are missing.
        """
        inside: dict[int, tuple[Channel, Hello]] = {}
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

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                link, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            if self._slots.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(link,), daemon=True).start()
            else:
                link.close()

    def _greet(self, link: socket.socket) -> None:
        """Takes in who proves to know the secret; of others there is a line in the log."""
        peer = link.getpeername()[:2]
        try:
            channel = accept(link, self._secret)
            hello = channel.receive()
            if not isinstance(hello, Hello):
                raise Refused("its first message is not a greeting")
            self._admitted.put((channel, hello))
        except (OSError, ValueError) as error:
            log.warning("refused a connection from %s:%s to the ranks' port: %s", *peer, error)
            link.close()
        finally:
            self._slots.release()
