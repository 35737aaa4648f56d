"""The two ends of a control link after its handshake."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from headrace.parallel.control import Channel, WorkerHello, connect
from headrace.parallel.handshake import Handshake

SECRET = "a secret of the ranks"


def pair(meddle: Callable[[bytes], bytes] | None = None) -> tuple[Channel, Channel]:
    """Driver's and worker's channel; `meddle` changes what passes from driver to worker after the handshake."""
    with Handshake("127.0.0.1", SECRET) as listener:
        theirs = connect(address(listener), SECRET, "127.0.0.1")
        theirs.send(WorkerHello(1, 42, "here"))
        driver = listener.admit(range(1, 2), 60, nothing)[1][0]
    if meddle is not None:
        near, far = socket.socketpair()
        real, theirs._link = theirs._link, far
        real.settimeout(0.5)

        def pass_on() -> None:
            near.sendall(meddle(real.recv(1 << 16)))
            near.shutdown(socket.SHUT_WR)

        threading.Thread(target=pass_on, daemon=True).start()
    return driver, theirs


def address(listener: Handshake) -> tuple[str, int]:
    host, port = listener.address.split(":")
    return host, int(port)


def nothing() -> None: ...
