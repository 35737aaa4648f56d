"""The engine's process: `python -m headrace.engine.worker FD`, FD being a connected socket inherited from the server.

One thread reads the socket, the main thread steps. It ends when the socket does, so it never outlives its server.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import sys
import threading
import traceback

from headrace.engine import messages as m
from headrace.types import InvalidRequest, UnsupportedModel


def main(descriptor: int) -> int:
    """Serves until the other side closes the socket. Exit status 0, or 1 after a failure (which is reported first)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ctrl-c reaches the server, which ends this process
    link = socket.socket(fileno=descriptor)
    try:
        return _serve(link)
    except (BrokenPipeError, ConnectionResetError):
        return 0
    except Exception as error:
        traceback.print_exc()
        settings = isinstance(error, ValueError | UnsupportedModel) and not isinstance(error, InvalidRequest)
        _report(link, m.Failed(f"{type(error).__name__}: {error}", settings))
        return 1


def _report(link: socket.socket, failure: m.Failed) -> None:
    with contextlib.suppress(OSError):  # nobody may be listening any more
        link.sendall(m.frame(failure))


def _serve(link: socket.socket) -> int:
    first = _receive(link)
    if not isinstance(first, m.Load):
        return 0
    from headrace.engine.core import EngineCore
    from headrace.engine.loader import load

    loaded = load(first.config, lambda done, total: link.sendall(m.frame(m.Progress(done, total))))
    core = EngineCore(loaded)
    link.sendall(m.frame(m.Ready(loaded.capacity)))
    inbox: queue.SimpleQueue[m.ToEngine | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(link, inbox), daemon=True).start()
    while True:
        refused: dict[str, str] = {}
        if not _drain(core, inbox, refused):
            return 0
        deltas = core.step()
        events = m.Events(deltas, core.take_started(), refused, core.stats())
        link.sendall(m.frame(events))


def _drain(core: object, inbox: queue.SimpleQueue[m.ToEngine | None], refused: dict[str, str]) -> bool:
    """Takes in what has arrived, waiting for something if there is nothing to do. False: the other side is gone."""
    from headrace.engine.core import EngineCore

    assert isinstance(core, EngineCore)
    block = not core.has_work
    while block or not inbox.empty():
        message = inbox.get()
        if message is None:
            return False
        block = False
        if isinstance(message, m.Abort):
            core.abort(message.request_id)
        elif isinstance(message, m.Add):
            try:
                core.add(message.request)
            except InvalidRequest as error:
                refused[message.request.request_id] = str(error)
    return True


def _read(link: socket.socket, inbox: queue.SimpleQueue[m.ToEngine | None]) -> None:
    """Moves messages from the socket to the inbox; None at the end."""
    try:
        while (message := _receive(link)) is not None:
            inbox.put(message)
    except (OSError, ValueError):
        traceback.print_exc()
    inbox.put(None)


def _receive(link: socket.socket) -> m.ToEngine | None:
    header = _exactly(link, m.LENGTH.size)
    body = header and _exactly(link, m.length(header))
    return m.to_engine(body) if body else None


def _exactly(link: socket.socket, count: int) -> bytes | None:
    """`count` bytes, or None if the stream ends before."""
    parts: list[bytes] = []
    while count:
        part = link.recv(min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
