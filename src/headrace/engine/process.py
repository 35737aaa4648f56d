"""The engine's process, and whatever it starts in its turn: one process group, so that nothing of it stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time

from headrace.host import python_module, told_signal

END_S = 5.0
"""So long may a process take to end by itself, and again after SIGTERM."""

STORE_S = 40.0
"""So long may it take where it has chunks to store before (engine.stored_prefixes.CLOSE_S, and some)."""

Process = subprocess.Popen[bytes]


def start(command: list[str], descriptor: int) -> Process:
    """Runs `command`, which inherits `descriptor`, as the first process of a new group."""
    return subprocess.Popen(command, pass_fds=[descriptor], stdin=subprocess.DEVNULL, process_group=0)


class EngineStart:
    """The engine's process, which imports what it needs until it is told over `link` what to serve."""

    def __init__(self) -> None:
        self.link, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self.process = start(python_module("headrace.engine.worker", str(number)), number)
        self._taken = False

    def take(self) -> tuple[Process, socket.socket]:
        """For whoever ends it from now on."""
        self._taken = True
        return self.process, self.link

    def close(self) -> None:
        """Ends it if nobody has taken it."""
        if not self._taken:
            self.link.close()
            end(self.process)


def kill(process: Process) -> None:
    """SIGKILL to the whole group, stopped processes too. Without effect once the process has been waited for: until
    then its id, which is the group's, cannot belong to anybody else."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def how_ended(process: Process, seconds: float = 1.0) -> str:
    """' by SIGKILL ...' or ' with code 3' of a process that is ending; empty if it has not within that time. It stays
    unreaped, see `end`."""
    deadline = time.monotonic() + seconds
    while process.returncode is None:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            killed = found.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            return f" by {told_signal(found.si_status)}" if killed else f" with code {found.si_status}"
        if time.monotonic() >= deadline:
            return ""
        time.sleep(0.01)
    code = process.returncode
    return f" by {told_signal(-code)}" if code < 0 else f" with code {code}"


def end(process: Process, seconds: float = END_S) -> None:
    """Waits so long for a process that has been told to end; ends it by force if it does not, and then its group."""
    if process.returncode is not None:
        return
    if not _ended(process, seconds):
        os.kill(process.pid, signal.SIGTERM)
        _ended(process, END_S)
    kill(process)
    process.wait()


def _ended(process: Process, seconds: float) -> bool:
    """Whether the process ends within that time. It is left unreaped, so that its group can still be killed."""
    deadline = time.monotonic() + seconds
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True
