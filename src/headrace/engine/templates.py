"""Chat templates, rendered by processes of their own with limits of time, memory and output.

A template that never ends, or that doubles a string forty times, takes one of these processes with it; its request is
refused with the limit's name, and the next one finds a fresh process. The engine, other requests and the end of the
server do not wait for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.engine import template_worker as worker
from headrace.engine.template_worker import LENGTH, Status
from headrace.host import python_module
from headrace.types import InvalidRequest

PROCESSES = 2
"""At most; one is kept warm, the second starts when the first is busy."""

WALL_S = 20.0
"""From sending a request to its reply, start of the process included. Time that other processes took away counts here
but not in worker.CPU_S, which is what a template that does not end meets first."""

_KEPT = ("LD_LIBRARY_PATH", "LANG", "LC_ALL", "SYSTEMROOT")
"""All of the environment that a template's process sees; keys and tokens of the server stay with it."""


class TemplateProcess:
    """One child. Not for several threads, but for `end`. Raises Died where it ends instead of answering."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair()
        self.ended_here = False
        paths = [str(Path(worker.__file__).parents[2]), os.environ.get("PYTHONPATH")]
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        with theirs:
            self._popen = subprocess.Popen(
                python_module(worker.__name__, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def ask(self, request: bytes) -> tuple[Status, str]:
        deadline = time.monotonic() + WALL_S
        try:
            self._link.settimeout(WALL_S)
            self._link.sendall(LENGTH.pack(len(request)) + request)
            self._link.settimeout(max(0.1, deadline - time.monotonic()))
            reply = worker.receive(self._link, worker.MAX_OUTPUT + 1)
        except TimeoutError:
            self.end()
            raise Died(f"did not end within {WALL_S:.0f} s", ours=True) from None
        except (OSError, ValueError):
            reply = None
        if not reply:
            raise self._why()
        return Status(reply[0]), reply[1:].decode("utf-8", "surrogatepass")

    def _why(self) -> Died:
        """What a child that closed its link ended by."""
        asked = self.ended_here
        self.end()
        status = self._popen.returncode
        if status == -signal.SIGPROF:
            return Died(f"took more than {worker.CPU_S:.0f} s of processor time", ours=True)
        if status in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
            return Died("ended the process that renders it", ours=True)
        if status > 0:
            return Died(f"took more than {worker.MEMORY_BYTES >> 20} MiB of memory", ours=True)
        return Died("was interrupted", ours=asked)

    def end(self) -> None:
        """At once. A thread that waits in `ask` gets Died. The socket is closed by the last one to hold this."""
        self.ended_here = True
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(0 if self._popen.poll() is not None else 0.05)
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait()


class Died(Exception):
    """A child ended instead of answering. `ours`: by a limit, or because it was told to; a second try is no use."""

    def __init__(self, reason: str, ours: bool) -> None:
        super().__init__(reason)
        self.reason, self.ours = reason, ours


class Renderer:
    """The processes that render the templates of one tokenizer. Safe to share between threads."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(PROCESSES)
        self._lock = threading.Lock()
        self._idle: list[TemplateProcess] = []
        self._busy: set[TemplateProcess] = set()
        self._closed = False

    def warm(self) -> None:
        """Starts a process, so that the first request does not wait for its imports."""
        with self._lock:
            if not self._idle and not self._closed:
                self._idle.append(TemplateProcess())

    def render(
        self,
        template: str,
        messages: list[dict[str, Any]],
        tools: list[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The conversation as the template writes it.

        Raises InvalidRequest for whatever the template refuses, for a rendering beyond a limit, which it names, and for
        variables that are not JSON values.
        """
        given = {
            **variables,
            "messages": messages,
            "tools": tools,
            "chat_template": template,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            request = json.dumps(given).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"variables of a chat template must be JSON values: {error}", "messages") from None
        with self._free:
            status, text = self._ask(request)
        if status is Status.TEXT:
            return text
        if status is Status.REFUSED:
            raise InvalidRequest(f"the chat template refused the messages: {text}", "messages")
        if status is Status.TOO_LONG:
            raise _beyond(f"wrote more than {worker.MAX_OUTPUT >> 20} MiB")
        raise _beyond(f"took more than {worker.MEMORY_BYTES >> 20} MiB of memory")

    def _ask(self, request: bytes) -> tuple[Status, str]:
        for last in (False, True):  # a process that somebody else ended is no fault of the request
            child = self._take()
            try:
                status, text = child.ask(request)
            except Died as died:
                self._drop(child)
                if died.ours or last or self._closed:
                    raise _beyond(died.reason) from None
                continue
            if status is Status.NO_MEMORY:
                self._drop(child)
            else:
                self._give(child)
            return status, text
        raise AssertionError("unreachable")

    def _take(self) -> TemplateProcess:
        with self._lock:
            if self._closed:
                raise InvalidRequest("the server is ending", "messages")
            child = self._idle.pop() if self._idle else TemplateProcess()
            self._busy.add(child)
            return child

    def _give(self, child: TemplateProcess) -> None:
        with self._lock:
            self._busy.discard(child)
            if not self._closed:
                self._idle.append(child)
                return
        child.end()

    def _drop(self, child: TemplateProcess) -> None:
        """A fresh one takes its place at once, unless one waits already."""
        with self._lock:
            self._busy.discard(child)
        child.end()
        self.warm()

    def close(self) -> None:
        """Ends the processes; renderings under way are refused, and so are later ones."""
        with self._lock:
            self._closed = True
            children = [*self._idle, *self._busy]
            self._idle.clear()
        for child in children:
            child.end()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, TypeError):  # while the interpreter ends
            self.close()


def _beyond(what: str) -> InvalidRequest:
    return InvalidRequest(f"the chat template {what} over these messages, which ended its rendering", "messages")
