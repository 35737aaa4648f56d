"""gloo's listening sockets, taken out of use once all links are made.

gloo goes on accepting connections for as long as a process group lives, and keeps every one that is not the peer it
waits for: a stranger could take up all file descriptors of a rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

OWN = Path("/proc/self")
EPOLL_CTL_MOD = 3


class EpollEvent(ctypes.Structure):
    """struct epoll_event, which has no padding on x86-64."""

    _pack_ = 1 if platform.machine() == "x86_64" else 8
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


LIBC = ctypes.CDLL(None, use_errno=True)


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
                        _mute(poller, descriptor, watched[descriptor])
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


def _pollers() -> Iterator[tuple[int, dict[int, int]]]:
    """epoll descriptors; what each watches, and the data that it reports with it (gloo's is a pointer)."""
    for descriptor, kind in _descriptors():
        if "eventpoll" in kind:
            with contextlib.suppress(OSError):
                lines = (OWN / "fdinfo" / str(descriptor)).read_text().splitlines()
                watched = [line.split() for line in lines if line.startswith("tfd:")]
                yield descriptor, {int(words[1]): int(words[5], 16) for words in watched}


def _mute(poller: int, descriptor: int, data: int) -> None:
    """What is still reported (EPOLLERR, EPOLLHUP) does not happen to a listening socket. `data` is kept as it was:
    select's own epoll would put the descriptor there, and whoever takes an event's data for a pointer follows that."""
    LIBC.epoll_ctl(poller, EPOLL_CTL_MOD, descriptor, ctypes.byref(EpollEvent(0, data)))
