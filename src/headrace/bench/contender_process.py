"""The process of an engine under test: started, asked by protocol.py's lines, its memory read, ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from headrace.bench.peers import Contender


class ContenderFailed(RuntimeError):
    """An engine could not be started or could not do a run; the message says why."""


@dataclass(slots=True)
class ContenderProcess:
    """The engine's process: started and ready when made. Raises Failed with its reason, the end of its log included."""

    engine: Contender
    folder: Path
    popen: subprocess.Popen[str] = field(init=False)
    log: IO[bytes] = field(init=False)
    setup: dict[str, str] = field(init=False)
    """What the process says of itself: versions, libraries, threads."""

    def __post_init__(self) -> None:
        try:
            options = json.dumps(self.engine.given(self.folder))
        except RuntimeError as error:
            raise ContenderFailed(str(error)) from error
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.popen = subprocess.Popen(
            [*self.engine.command(), str(self.folder), options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            env=os.environ | self.engine.environment(),
        )  # fmt: skip
        try:
            self.setup = self._answer().get("setup", {})
        except KeyboardInterrupt:
            self.kill()
            raise

    def ask(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[float]]:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self.popen.stdin.flush()
        times: list[list[float]] = self._answer()["times"]
        for row, limit in zip(times, max_tokens, strict=True):
            if len(row) != limit:
                self.close()
                raise ContenderFailed(f"{len(row)} tokens where {limit} were asked for")
        return times

    def _answer(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            self.popen.wait()
            raise ContenderFailed(f"the process ended with {self.popen.returncode}: {self._last_words()}")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            self.close()
            raise ContenderFailed(str(message["error"]))
        return message

    def _last_words(self) -> str:
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def peak_mb(self) -> float:
        """Greatest resident size since forget_peak, the process and its children together."""
        return sum(_peak_kib(pid) for pid in process_tree(self.popen.pid)) / 1024

    def forget_peak(self) -> None:
        for pid in process_tree(self.popen.pid):
            try:
                Path(f"/proc/{pid}/clear_refs").write_text("5")
            except OSError:
                continue  # peak_mb then reports the peak since the start

    def kill(self) -> None:
        """Ends the process and its children at once; close() then finds it ended."""
        for pid in process_tree(self.popen.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the process by ending its input; by force where that is not enough."""
        if self.popen.stdin is not None:
            self.popen.stdin.close()
        try:
            self.popen.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.log.close()


def process_tree(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(each for child in children for each in process_tree(int(child)))]


def _peak_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
