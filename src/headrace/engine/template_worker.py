"""Renders chat templates: `python -m headrace.engine.template_worker FD`, FD being a socket inherited from the parent.

A chat template is a program that comes with a model and runs on what a client sends. Here it can use up the time and
the memory of this process, and nothing else: no environment, no files to write, no further processes. The process ends
when the socket does, and past a limit.

Request: LENGTH, JSON object of the arguments of `Renderer.render`. Reply: LENGTH, one byte of Status, text in UTF-8.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import sys
from enum import IntEnum
from typing import Any

LENGTH = struct.Struct("<Q")

CPU_S = 3.0
"""Processor time of one rendering; the kernel ends the process beyond, whatever the interpreter is doing."""

MEMORY_BYTES = 512 << 20
"""Private memory of the process, of which the imports take some 60 MiB."""

MAX_OUTPUT = 32 << 20
"""Bytes of the text of one rendering."""

MAX_REASON = 1000
"""Characters of what a template says when it refuses."""


class Status(IntEnum):
    TEXT = 0
    REFUSED = 1
    TOO_LONG = 2
    NO_MEMORY = 3


def main(descriptor: int) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    with socket.socket(fileno=descriptor) as link:
        _confine()
        while (request := receive(link)) is not None:
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            status, text = _render(render_jinja_template, request)
            signal.setitimer(signal.ITIMER_PROF, 0)
            link.sendall(LENGTH.pack(1 + len(text)) + bytes([status]) + text)
            if status is Status.NO_MEMORY:
                return  # what is left of it may be in pieces


def _confine() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ctrl-c is for the server
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for what, limit in (
        (resource.RLIMIT_DATA, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 8),
    ):
        resource.setrlimit(what, (limit, limit))


def _render(render: Any, request: bytes) -> tuple[Status, bytes]:
    try:
        variables = json.loads(request)
        rendered, _ = render(conversations=[variables.pop("messages")], **variables)
        text = rendered[0].encode("utf-8", "surrogatepass")
    except MemoryError:
        return Status.NO_MEMORY, b""
    except Exception as error:  # whatever the template does
        return Status.REFUSED, _reason(error).encode("utf-8", "replace")
    return (Status.TOO_LONG, b"") if len(text) > MAX_OUTPUT else (Status.TEXT, text)


def _reason(error: Exception) -> str:
    try:
        return (str(error) or repr(error))[:MAX_REASON]
    except Exception:
        return type(error).__name__


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


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)
