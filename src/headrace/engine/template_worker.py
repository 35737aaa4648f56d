"""Renders chat templates, in a process of its own (`confined_child`): `python -m headrace.engine.template_worker FD`.

A chat template is a program that comes with a model and runs on what a client sends. Here it can use up the time and
the memory of this process, and nothing else.

Request: JSON object of the arguments of `Renderer.render`. Reply: one byte of Status, text in UTF-8.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from enum import IntEnum
from typing import Any

from headrace.engine.confined_child import allow, confine, receive, send

CPU_S = 3.0
"""Processor time of one rendering."""

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
        confine(MEMORY_BYTES)
        while (request := receive(link)) is not None:
            allow(CPU_S)
            status, text = _render(render_jinja_template, request)
            allow(0)
            send(link, bytes([status]) + text)
            if status is Status.NO_MEMORY:
                return  # what is left of it may be in pieces


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


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)
