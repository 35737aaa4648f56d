"""gloo's listening sockets, taken out of use once all links are made.

gloo goes on accepting connections for as long as a process group lives, and keeps every one that is not the peer it
waits for: a stranger could take up all file descriptors of a rank.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

OWN = Path("/proc/self")


def stop_accepting(published: Sequence[bytes]) -> int:
    """Ends accepting on this process's sockets whose address stands in what gloo published, as the kernel writes it.

    Returns the number of these sockets. Links that exist are not touched.

    The sockets stay open, since gloo wants to close them itself, but gloo is no longer told of connections, and the
    kernel keeps at most two waiting and drops the others.
    """
    found = 0
    pollers = list(_pollers())
    for descriptor, listening in _listening():
        with listening:
            if any(_as_bytes(listening.getsockname()) in value for value in published):
                for poller, watched in pollers:
                    if descriptor in watched:
                        _mute(poller, descriptor)
                listening.listen(1)
                found += 1
    return found


def _as_bytes(address: tuple[str, int]) -> bytes:
    """struct sockaddr_in without its padding."""
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H", address[1]) + socket.inet_aton(address[0])


def _descriptors() -> Iterator[tuple[int, str]]:
    for name in os.listdir(OWN / "fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            yield int(name), os.readlink(OWN / "fd" / name)


def _listening() -> Iterator[tuple[int, socket.socket]]:
    """IPv4 sockets that listen, as duplicates, and the number of the original."""
    for descriptor, kind in _descriptors():
        if not kind.startswith("socket:"):
            continue
        with contextlib.suppress(OSError):
            one = socket.socket(fileno=os.dup(descriptor))
            if one.family == socket.AF_INET and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield descriptor, one
            else:
                one.close()


def _pollers() -> Iterator[tuple[int, set[int]]]:
    """epoll descriptors and what each watches."""
    for descriptor, kind in _descriptors():
        if "eventpoll" in kind:
            with contextlib.suppress(OSError):
                lines = (OWN / "fdinfo" / str(descriptor)).read_text().splitlines()
                yield descriptor, {int(line.split()[1]) for line in lines if line.startswith("tfd:")}


def _mute(poller: int, descriptor: int) -> None:
    """What is still reported (EPOLLERR, EPOLLHUP) does not happen to a listening socket."""
    with select.epoll.fromfd(os.dup(poller)) as watching, contextlib.suppress(FileNotFoundError):
        watching.modify(descriptor, 0)
