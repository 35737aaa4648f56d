"""Busy neighbours: processes that keep every core busy while something else is measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

_LOOP = """
import ctypes, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
core, parent = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})
if os.getppid() != parent:
    sys.exit()
print(flush=True)
while True:
    pass
"""
"""It ends with whoever started it, however that ends (prctl 1 is PR_SET_PDEATHSIG)."""


class Neighbours:
    """A process for each core of this one's, bound to it, of the same priority, that computes while it is let.

    It ends them when its block is left, interrupted or not; they end with this process in any case.
    """

    def __init__(self, cores: list[int] | None = None) -> None:
        self.cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Neighbours:
        try:
            for core in self.cores:
                command = [sys.executable, "-S", "-c", _LOOP, str(core), str(os.getpid())]
                self._processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            for core, process in zip(self.cores, self._processes, strict=True):
                assert process.stdout is not None
                if not process.stdout.readline():
                    raise RuntimeError(f"no busy process could be started on core {core}")
                process.send_signal(signal.SIGSTOP)  # from here, so that it comes before any SIGCONT
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Lets them compute inside the block. Raises RuntimeError where one has ended."""
        try:
            for process in self._processes:
                if process.poll() is not None:
                    raise RuntimeError("a busy process has ended before its time")
                process.send_signal(signal.SIGCONT)
            yield
        finally:
            for process in self._processes:
                process.send_signal(signal.SIGSTOP)

    def _end(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()
        for process in self._processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
