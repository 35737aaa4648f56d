"""What processes have in common that compute for a request what may cost anything: see `confined`.

Each is `python -m MODULE FD`, FD being a socket inherited from the parent. It has no environment, no files to write and
no further processes, and a bound of memory; the kernel ends it past a bound of processor time. It ends with its socket.
Frames both ways: LENGTH, content.
"""

from __future__ import annotations

import resource
import signal
import socket
import struct

LENGTH = struct.Struct("<Q")
BEGUN = b"begun"


def confine(memory_bytes: int) -> None:
    """From here on. memory_bytes: private memory of the process, its imports included."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ctrl-c is for the server
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for what, limit in (
        (resource.RLIMIT_DATA, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 8),
    ):
        resource.setrlimit(what, (limit, limit))


def allow(cpu_s: float) -> None:
    """Processor time until this is called again; the kernel ends the process beyond, whatever it is doing. 0: any."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def send(link: socket.socket, content: bytes) -> None:
    link.sendall(LENGTH.pack(len(content)) + content)


def receive(link: socket.socket, most: int | None = None) -> bytes | None:
    """The next frame's content; None at the end of the stream. Raises ValueError for one of more than `most` bytes,
    and what the socket raises."""
    head = _exactly(link, LENGTH.size)
    if head is None:
        return None
    (length,) = LENGTH.unpack(head)
    if most is not None and length > most:
        raise ValueError(f"a frame of {length} bytes")
    return _exactly(link, length)


def _exactly(link: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = link.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
