"""tests/gpu in processes of their own: beside the section of bits, and what that had no time for in one of this name.

Outcomes are kept in a file as they come, so that a run that is cut off loses none. A test that ends its process, by a
crash, by hanging or by losing the device, is 'unended' or 'failed'; another process goes on behind it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tools.gpu.outcomes import FAILED, failures_beside, outcomes_in
from tools.gpu.runner import Case, LeftOut, Row

OUTCOMES = Path("build/gpu-check.tests.txt")
"""A line for each test that has ended in this run, or in the one that it goes on from. It lies beside the result."""
FOLLOWS = False
"""Whether this section follows that of bits (set by check.here)."""
AT_ONCE = 6
"""Processes: most of the time goes into compiling kernels."""
SECONDS = 600.0
"""The section's own time ends it before."""


_going_on: list[DeviceTests] = []
"""What the section before this one has left running."""


def leave(tests: DeviceTests, follows: bool) -> None:
    """Ends the processes; if this section follows, those that run go on into it: to begin again takes some 20 s."""
    if follows and tests.running():
        _going_on.append(tests)
    else:
        tests.stop()


def cases() -> Iterator[Case]:
    tests = _going_on.pop() if _going_on else DeviceTests(OUTCOMES)
    try:
        yield Case("tests/gpu", partial(tests.result, SECONDS), SECONDS)
    finally:
        tests.stop()


def begin(outcomes: dict[str, str]) -> None:
    """Starts anew from outcomes of an earlier run, whose passed tests are not run again."""
    OUTCOMES.parent.mkdir(parents=True, exist_ok=True)
    OUTCOMES.write_text("".join(f"{outcome} {name}\n" for name, outcome in outcomes.items()))
    failures_beside(OUTCOMES).unlink(missing_ok=True)


class DeviceTests:
    """The tests that have not passed by the file of outcomes, from now on."""

    def __init__(self, file: Path, folder: str = "tests/gpu", at_once: int = AT_ONCE) -> None:
        self.file, self.began = file, time.monotonic()
        self.work = tempfile.TemporaryDirectory()
        passed, before = Path(self.work.name, "passed"), _lines(file)
        passed.write_text("".join(before))
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p",
                   "tools.gpu.pytest_outcomes", "--passed", str(passed), "--outcomes", str(file), folder]  # fmt: skip
        self.parts = []
        for number in range(at_once):
            given = [*command, "--part", f"{number}/{at_once}"]
            self.parts.append(Part(given, file, len(before), Path(self.work.name, str(number))))
            self.parts[-1].start()

    def result(self, seconds: float) -> Row:
        """What they came to within so many seconds from the start. Raises LeftOut where they take longer, RuntimeError
        if one fails or ends its process."""
        ends = self.began + seconds
        for part in self.parts:
            part.join(max(0.1, ends - time.monotonic()))
        slow = self.running()
        found = outcomes_in(self.file)
        wrong = [n for n, outcome in found.items() if outcome == "failed" or (outcome == "unended" and not slow)]
        broken = [part for part in self.parts if part.broken]
        for part in broken:
            print("\n".join(part.output.read_text().splitlines()[-20:]))
        if broken or wrong:
            raise RuntimeError(f"tests/gpu: {told(Counter(found.values()))}: {', '.join(wrong)}; what they say: "
                               f"{failures_beside(self.file)}")  # fmt: skip
        if slow:
            raise LeftOut(f"not at their end after {seconds:.0f} s: {told(Counter(found.values()))}")
        return Row("tests/gpu", {"pytest": told(Counter(found.values()))})

    def running(self) -> bool:
        """Whether a process has tests left."""
        return any(part.is_alive() for part in self.parts)

    def stop(self) -> None:
        """Ends the processes that run."""
        for part in self.parts:
            part.stop()
        self.work.cleanup()


class Part(threading.Thread):
    """Some of the tests, by a process, and by others behind each test that ends one.

    before: lines that the file of outcomes had as the tests began. work: a folder for what it takes.
    """

    def __init__(self, command: Sequence[str], file: Path, before: int, work: Path) -> None:
        super().__init__(daemon=True)
        work.mkdir()
        self.command, self.file, self.before, self.work = command, file, before, work
        self.output = work / "output"
        self.broken = self.stopping = False
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        for _ in range(RESTARTS):
            (self.work / "ended").write_text("".join(_lines(self.file)[self.before :]))
            with self.output.open("w") as out:  # a pipe that nobody reads would stop it
                given = [*self.command, "--ended", str(self.work / "ended")]
                self.process = subprocess.Popen(given, stdout=out, stderr=subprocess.STDOUT)
            if self.stopping:
                self.process.kill()
            status = self.process.wait()
            if self.stopping or status in AT_AN_END:
                return
            if status in NOT_BEGUN:
                break
        self.broken = True

    def stop(self) -> None:
        """Ends it."""
        self.stopping = True
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        self.join()


AT_AN_END = (0, 5, FAILED)
"""Exit status of pytest: all passed, nothing left to run, some failed."""
NOT_BEGUN = (2, 3, 4)
"""Interrupted, an error of pytest's, of how it is called or of a test file."""
RESTARTS = 30


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines(keepends=True) if file.exists() else []


def told(counts: Counter[str]) -> str:
    """'31 passed, 2 skipped'."""
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "none ended"
