"""Sandboxes: processes that compute what a request may make cost anything, with limits of time and memory.

What never ends, takes all memory or ends its process takes one of these with it: its request is refused with the
limit's name, and the next one finds a fresh process. The engine, other requests and the end of the server do not wait
for it. Chat templates (`templates`) and shapes of answers (`structured.door`) go by them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.engine import confined_child
from headrace.engine.confined_child import BEGUN
from headrace.host import python_module

_KEPT = ("LD_LIBRARY_PATH", "LANG", "LC_ALL", "SYSTEMROOT")
"""All of the environment that such a process sees; keys and tokens of the server stay with it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """module: what the process runs. cpu_s, memory_bytes: its own limits, to name them by. wall_s: from sending a
    request to its reply, start of the process included; time that other processes took away counts here but not in
    cpu_s. reply: most bytes of one."""

    module: str
    cpu_s: float
    memory_bytes: int
    wall_s: float
    reply: int


class Died(Exception):
    """A child ended instead of answering. `ours`: by a limit, or because it was told to; a second try is no use."""

    def __init__(self, reason: str, ours: bool) -> None:
        super().__init__(reason)
        self.reason, self.ours = reason, ours


class Closed(Died):
    """The processes were told to end."""

    def __init__(self) -> None:
        super().__init__("was not begun", ours=True)


class ConfinedProcess:
    """One child. Not for several threads, but for `end`. first: frames that it is sent before any request, and answers
    by BEGUN, or by what is wrong with them."""

    def __init__(self, limits: Limits, first: Sequence[bytes] = ()) -> None:
        self.limits, self._first = limits, tuple(first)
        self._link, theirs = socket.socketpair()
        self.ended_here = False
        paths = [str(Path(confined_child.__file__).parents[2]), os.environ.get("PYTHONPATH")]
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        with theirs:
            self._popen = subprocess.Popen(
                python_module(limits.module, str(theirs.fileno())),
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

    def ask(self, request: bytes) -> bytes:
        """Its reply, which is never empty. Raises Died where it ends instead of answering."""
        deadline = time.monotonic() + self.limits.wall_s
        try:
            frames, self._first = (*self._first, request), ()
            for at, frame in enumerate(frames):
                self._link.settimeout(max(0.1, deadline - time.monotonic()))
                confined_child.send(self._link, frame)
                if at + 2 == len(frames):  # the last of those before the request
                    begun = confined_child.receive(self._link, self.limits.reply)
                    if begun is None:
                        raise self._why()
                    if begun != BEGUN:
                        raise Died(f"could not begin ({begun.decode(errors='replace')})", ours=True)
            self._link.settimeout(max(0.1, deadline - time.monotonic()))
            reply = confined_child.receive(self._link, self.limits.reply)
        except TimeoutError:
            self.end()
            raise Died(f"did not end within {self.limits.wall_s:.0f} s", ours=True) from None
        except (OSError, ValueError):
            reply = None
        if not reply:
            raise self._why()
        return reply

    def _why(self) -> Died:
        """What a child that closed its link ended by."""
        asked = self.ended_here
        self.end()
        status = self._popen.returncode
        if status == -signal.SIGPROF:
            return Died(f"took more than {self.limits.cpu_s:.0f} s of processor time", ours=True)
        if status in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL):
            return Died("ended the process that computes it", ours=True)
        if status > 0:
            return Died(f"took more than {self.limits.memory_bytes >> 20} MiB of memory", ours=True)
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


class Confined:
    """Processes of one kind, at most `most`: one is kept warm, another starts when it is busy. For any thread."""

    def __init__(self, limits: Limits, most: int, first: Sequence[bytes] = ()) -> None:
        self._limits, self._first = limits, tuple(first)
        self._free = threading.Semaphore(most)
        self._lock = threading.Lock()
        self._idle: list[ConfinedProcess] = []
        self._busy: set[ConfinedProcess] = set()
        self._closed = False

    def warm(self) -> None:
        """Starts a process, so that the first request does not wait for its imports."""
        with self._lock:
            if not self._idle and not self._closed:
                self._idle.append(self._made())

    def ask(self, request: bytes, last: bytes = b"") -> bytes:
        """The reply to a request. last: what a reply begins with after which the process ends. Raises Died."""
        with self._free:
            for again in (True, False):  # a process that somebody else ended is no fault of the request
                child = self._take()
                try:
                    reply = child.ask(request)
                except Died as died:
                    self._drop(child)
                    if died.ours or not again or self._closed:
                        raise
                    continue
                self._drop(child) if last and reply.startswith(last) else self._give(child)
                return reply
        raise AssertionError("unreachable")

    def _made(self) -> ConfinedProcess:
        return ConfinedProcess(self._limits, self._first)

    def _take(self) -> ConfinedProcess:
        with self._lock:
            if self._closed:
                raise Closed
            child = self._idle.pop() if self._idle else self._made()
            self._busy.add(child)
            return child

    def _give(self, child: ConfinedProcess) -> None:
        with self._lock:
            self._busy.discard(child)
            if not self._closed:
                self._idle.append(child)
                return
        child.end()

    def _drop(self, child: ConfinedProcess) -> None:
        """A fresh one takes its place at once, unless one waits already."""
        with self._lock:
            self._busy.discard(child)
        child.end()
        self.warm()

    def close(self) -> None:
        """Ends the processes; what is under way is refused, and so is what comes later."""
        with self._lock:
            self._closed = True
            children = [*self._idle, *self._busy]
            self._idle.clear()
        for child in children:
            child.end()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, TypeError):  # while the interpreter ends
            self.close()
