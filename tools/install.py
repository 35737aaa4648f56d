"""Sets up .venv: torch, what Headrace needs, and its kernels, with a line every few seconds on how far that is.

    python3 tools/install.py [--extra dev] [--isas native]

Runs before anything is installed, so it uses the standard library alone. The kernels compile while packages are
unpacked: the one needs processors, the other mostly the disk. What pip and the compiler say goes to build/install.log.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "build" / "install.log"
EVERY_S = 4.0
OLDEST_PYTHON = (3, 11)
USUAL = "usually one or two minutes where pip has the packages already, longer where it loads them"


class Failed(Exception):
    """A step did not succeed; what it said is in its log."""


class Job:
    """Commands one after the other in a thread, and how far they are, in words."""

    def __init__(
        self,
        name: str,
        steps: Sequence[tuple[str, list[str]]],
        environment: dict[str, str],
        after: threading.Event | None = None,
        announces: threading.Event | None = None,
    ) -> None:
        """after: what the first step waits for. announces: the first step is over."""
        self.name, self.steps, self.environment = name, steps, environment
        self.after, self.announces = after, announces
        self.state, self.error = "waiting", ""
        self.log = LOG.with_suffix(f".{name}.log")
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        if self.after:
            self.after.wait()
        with self.log.open("w") as log:
            for what, command in self.steps:
                self.state = what
                print("$", *command, file=log, flush=True)
                try:
                    code = self._follow(what, command, log)
                except OSError as error:
                    code, self.error = 1, str(error)
                if self.announces:
                    self.announces.set()
                if code:
                    self.error = self.error or f"{what}: failed"
                    return
        self.state = "done"

    def _follow(self, what: str, command: list[str], log: TextIO) -> int:
        """Runs a command, its output into the log; ninja's lines tell how far it is."""
        process = subprocess.Popen(
            command, cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        assert process.stdout
        for line in process.stdout:
            print(line, end="", file=log, flush=True)
            self.state = told(what, line) or self.state
        return process.wait()

    def last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


def told(what: str, line: str) -> str | None:
    """What a line of pip or ninja says about how far a step is."""
    if found := re.search(r"\[(\d+)/(\d+)\] (Building|Linking)", line):
        return f"{what} ({found[1]} of {found[2]} compiled)"
    if found := re.match(r"\s*(?:Downloading|Using cached) (\S+?)-\d\S* *(\(.*\))?", line):
        return f"{what} ({found[1]} {found[2] or ''}".rstrip() + ")"
    if line.startswith("Installing collected packages"):
        return f"{what} (unpacking)"
    return None


def wait_for(jobs: list[Job], started: float) -> None:
    """Says how far they are until all have ended. Raises Failed with the last words of one that failed."""
    while any(job.thread.is_alive() for job in jobs):
        for job in jobs:
            job.thread.join(EVERY_S / len(jobs))
        say(started, "; ".join(f"{job.name}: {job.state}" for job in jobs))
    for job in jobs:
        if job.error:
            raise Failed(f"{job.last_words()}\n\n{job.name}: {job.error}; all of it is in {job.log}")


def say(started: float, text: str) -> None:
    print(f"  {time.monotonic() - started:4.0f} s  {text}", flush=True)


def project(python: str) -> tuple[str, list[str], dict[str, list[str]]]:
    """Of pyproject.toml: torch as it is pinned, the other dependencies, and the extras."""
    import tomllib

    with (ROOT / "pyproject.toml").open("rb") as file:
        table = tomllib.load(file)["project"]
    torch = [need for need in table["dependencies"] if need.startswith("torch==")]
    return torch[0], [need for need in table["dependencies"] if need not in torch], table["optional-dependencies"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", action="append", default=[], help="of pyproject.toml, to be installed too")
    parser.add_argument("--isas", help="kernels to build (default: HEADRACE_ISA_BUILD or native)")
    args = parser.parse_args()
    if sys.version_info < OLDEST_PYTHON:
        sys.exit("Headrace needs Python 3.11 or later; set PYTHON=")
    LOG.parent.mkdir(exist_ok=True)
    started, python = time.monotonic(), str(ROOT / ".venv" / "bin" / "python")
    print(f"setting up .venv ({USUAL})", flush=True)
    try:
        if not Path(python).exists():
            wait_for(
                [Job("python", [("making .venv", [sys.executable, "-m", "venv", ".venv"])], dict(os.environ))], started
            )
        install(python, args.extra, args.isas, started)
    except Failed as error:
        sys.exit(str(error))
    say(started, "ready")


def install(python: str, extras: list[str], isas: str | None, started: float) -> None:
    torch, needs, optional = project(python)
    if unknown := set(extras) - set(optional):
        sys.exit(f"no extra {', '.join(sorted(unknown))}; there are {', '.join(optional)}")
    needs += [need for extra in extras for need in optional[extra]]
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off"]
    # torch comes first and alone: a range, or torch together with others, may pull the CUDA build. Modules are
    # compiled when they are first imported, as most of torch's never are; torch's, while other packages are unpacked.
    packages = [("torch", [*pip, "--no-compile", torch]), ("packages", [*pip, "--no-compile", *needs])]
    kernels = [("building", [*pip, "--verbose", "--no-deps", "--editable", "."])]
    environment, unpacked = {**os.environ, **({"HEADRACE_ISA_BUILD": isas} if isas else {})}, threading.Event()
    wait_for(
        [
            Job("packages", packages, dict(os.environ), announces=unpacked),
            Job("kernels", kernels, environment),
            Job("torch", [("first import", [python, "-c", "import torch"])], dict(os.environ), unpacked),
        ],
        started,
    )


if __name__ == "__main__":
    main()
