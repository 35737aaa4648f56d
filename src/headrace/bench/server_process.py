"""`headrace serve` as a process of its own, for the benchmarks and the demo."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ONE_REPLY_S = 300.0
END_S = 30.0


class ServerProcess:
    """A server on a free port of this machine; its block ends it, whatever happens. program: what Python runs."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-P", "-m", "headrace.cli.main"),
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        where = ("--host", "127.0.0.1", "--port", str(self.port))
        self._log = tempfile.NamedTemporaryFile(prefix="headrace-server-")  # noqa: SIM115
        self.log = Path(self._log.name)
        self.process = subprocess.Popen(
            [sys.executable, *program, "serve", *arguments, *where],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        finally:
            self._kill()
            self._log.close()

    def get(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The reply to a GET, or to a POST of this body. Raises OSError, with the reason that a refusal gives."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ONE_REPLY_S) as reply:
                found: bytes = reply.read()
        except urllib.error.HTTPError as error:
            error.msg = _reason(error)
            raise
        return found

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics that have no labels but the model's name."""
        lines = self.get("/metrics").decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("headrace:") and "," not in line)
        return {name.split("{")[0].removeprefix("headrace:"): float(value) for name, value in pairs}

    def wait_ready(self, within_s: float) -> None:
        """Raises RuntimeError if the server ends, or is not ready in time."""
        deadline = time.monotonic() + within_s
        while not self._healthy():
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}: {self.last_words()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server is not ready after {within_s:.0f} s: {self.last_words()}")
            time.sleep(0.1)

    def _healthy(self) -> bool:
        try:
            self.get("/health")
        except (urllib.error.URLError, OSError):
            return False
        return True

    def last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])

    def end(self, sign: signal.Signals = signal.SIGTERM, within_s: float = END_S) -> int:
        """Its exit code, once it has ended. SIGKILL goes to its engine too. Raises RuntimeError if it does not end."""
        if self.process.poll() is None:
            if sign == signal.SIGKILL:
                self._kill()
            else:
                self.process.send_signal(sign)
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the server does not end after {sign.name}") from None

    def _kill(self) -> None:
        """The server and all processes that it and these have started, at once."""
        if self.process.poll() is None:
            for pid in (self.process.pid, *_started_by(self.process.pid)):
                with suppress(OSError):  # it has ended meanwhile
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()


def _reason(error: urllib.error.HTTPError) -> str:
    """What the server says of a refusal, else what HTTP calls it."""
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return error.msg


def _started_by(pid: int) -> list[int]:
    """Children of all threads of a process, and theirs."""
    found: list[int] = []
    with suppress(OSError):  # it has ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                found += [child, *_started_by(child)]
    return found
