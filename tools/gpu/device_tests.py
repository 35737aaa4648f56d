"""tests/gpu in processes of their own: beside the section of bits, and what that had no time for in one of this name.

Outcomes are kept in a file as they come, so that a run that is cut off loses none.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tools.gpu.pytest_outcomes import outcomes_in
from tools.gpu.runner import Case, LeftOut, Row

OUTCOMES = Path("build/gpu-tests.txt")
"""A line for each test that has ended in this run, or in the one that it goes on from."""
AT_ONCE = 6
"""Processes: most of the time goes into compiling kernels."""
SECONDS = 600.0
"""The section's own time ends it before."""


def cases() -> Iterator[Case]:
    tests = DeviceTests(OUTCOMES)
    try:
        yield Case("tests/gpu", partial(tests.result, SECONDS))
    finally:
        tests.stop()


def begin(outcomes: dict[str, str]) -> None:
    """Starts anew from outcomes of an earlier run, whose passed tests are not run again."""
    OUTCOMES.parent.mkdir(parents=True, exist_ok=True)
    OUTCOMES.write_text("".join(f"{outcome} {name}\n" for name, outcome in outcomes.items()))


class DeviceTests:
    """The tests that have not passed by the file of outcomes, from now on."""

    def __init__(self, file: Path, folder: str = "tests/gpu", at_once: int = AT_ONCE) -> None:
        self.file, self.began = file, time.monotonic()
        self.work = tempfile.TemporaryDirectory()
        passed = Path(self.work.name, "passed")
        passed.write_text(file.read_text() if file.exists() else "")
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p",
                   "tools.gpu.pytest_outcomes", "--passed", str(passed), "--outcomes", str(file), folder]  # fmt: skip
        self.outputs = [Path(self.work.name, f"output-{number}") for number in range(at_once)]
        self.processes = []
        for number, output in enumerate(self.outputs):
            with output.open("w") as out:  # a pipe that nobody reads would stop it
                part = ["--part", f"{number}/{at_once}"]
                self.processes.append(subprocess.Popen([*command, *part], stdout=out, stderr=subprocess.STDOUT))

    def result(self, seconds: float) -> Row:
        """What they came to within so many seconds from the start. Raises LeftOut where they take longer, RuntimeError
        if one fails."""
        ends, slow = self.began + seconds, False
        for process in self.processes:
            try:
                process.wait(max(0.1, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                slow = True
        counts = Counter(outcomes_in(self.file).values())
        broken = [n for n, process in enumerate(self.processes) if process.poll() not in (None, 0, NOTHING_LEFT)]
        for number in broken:
            print("\n".join(self.outputs[number].read_text().splitlines()[-40:]))
        if broken or counts["failed"]:
            raise RuntimeError(f"tests/gpu: {told(counts)}")
        if slow:
            raise LeftOut(f"not at their end after {seconds:.0f} s: {told(counts)}")
        return Row("tests/gpu", {"pytest": told(counts)})

    def stop(self) -> None:
        """Ends the processes that run."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.work.cleanup()


NOTHING_LEFT = 5
"""pytest's exit status where no test is left to run."""


def told(counts: Counter[str]) -> str:
    """'31 passed, 2 skipped'."""
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "none ended"
