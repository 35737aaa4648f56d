"""A command on a terminal of a given width: what is on the screen when it is through, as a person would see it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import pyte

HEIGHT = 400
"""Rows: more than any screen here has, so that nothing scrolls away."""

Step = tuple[str, str | Callable[[], None]]
"""A pattern to wait for on the screen, then what to type, or what to do."""

KEEP = ""
"""Typed: nothing, but the screen is kept as it is then, above what comes later."""


class Terminal:
    """A process whose input, output and errors are a terminal of `width` columns."""

    def __init__(self, command: Sequence[str], width: int, env: Mapping[str, str]) -> None:
        self._screen = pyte.Screen(width, HEIGHT)
        self._stream = pyte.ByteStream(self._screen)
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, width, 0, 0))
        more = {"TERM": "xterm-256color", "COLUMNS": str(width), "LINES": str(HEIGHT)}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env={**env, **more}, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def wait(self, pattern: str, seconds: float) -> None:
        """Until the screen has the pattern. Raises AssertionError, showing the screen, where it does not come."""
        self._read_until(lambda: re.search(pattern, self.text(), re.MULTILINE) is not None, seconds, pattern)

    def end(self, seconds: float) -> int:
        """The exit code, once the process has ended and all that it said is on the screen."""
        self._read_until(lambda: self.process.poll() is not None, seconds, "the end")
        while self._read(0.1):
            pass
        return self.process.wait()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def text(self) -> str:
        """The screen, without blanks at ends of lines and empty lines at its end."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    def _read_until(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s:\n{self.text()}"
            if not self._read(0.1) and self.process.poll() is not None and not done():
                raise AssertionError(f"ended with {self.process.returncode} before {what}:\n{self.text()}")

    def _read(self, seconds: float) -> bool:
        """Whether something came within that time; it is on the screen then."""
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # what Linux says when the other side is closed
            return False
        self._stream.feed(data)
        return bool(data)


def seen(
    command: Sequence[str], width: int, env: Mapping[str, str], steps: Sequence[Step] = (), seconds: float = 60
) -> tuple[str, int]:
    """What the terminal shows at the end, below what was kept meanwhile, and the exit code."""
    kept = []
    with Terminal(command, width, env) as terminal:
        for pattern, then in steps:
            terminal.wait(pattern, seconds)
            if callable(then):
                then()
            elif then == KEEP:
                kept.append(terminal.text())
            else:
                terminal.type(then)
        code = terminal.end(seconds)
        return "\n...\n".join([*kept, terminal.text()]), code
