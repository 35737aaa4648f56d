"""Measures the engine on a GPU: bits, kernels and engines beside torch's and transformers'.

    python -m tools.gpu.check --only bits,attention --seconds 200 --json FILE --skip-passed EARLIER

Sections run in the order of SECTIONS, each within its seconds: bits first, while kernels compile beside. They run in a
process of their own; where a case ends it, or loses the device (an illegal access of memory ends all CUDA work of a
process), another goes on behind that case. The JSON is there from the beginning, says why where nothing can run, and is
written again after each case; --skip-passed goes on from one: what it has measured, and tests that passed, are not run
again. Beside it lie the outcomes of tests, as they come, and what failures say. The last lines are a summary. Exit
status: 1 without a CUDA device and after a failure; goals that are not met are printed (short) and fail nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from tools.gpu import device_tests
from tools.gpu.outcomes import outcomes_in
from tools.gpu.processes import end_by_signal, ended, started
from tools.gpu.runner import GRACE, Case, DeviceLost, Guard, Report, Section, run

SECONDS = 480.0
SECTIONS = {
    "limits": 10, "bits": 120, "device_tests": 60, "chunk_attention": 10, "attention": 25, "latents": 20,
    "products": 15, "engine_s1": 45, "engine_8b": 60, "engine_7b": 45, "restores": 60, "long_context": 45,
    "compiled": 25,
}  # fmt: skip
"""A section is the module of its name, and its seconds. Those that --only names share --seconds, if these are more. An
engine starts within some 6 seconds: recordings of steps with prompts take up to 5. The section of bits starts 14."""
COMMAND = (sys.executable, "-m", "tools.gpu.check")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.check", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help=f"sections, by commas, of: {', '.join(SECTIONS)}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="in all (default %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("build/gpu-check.json"), help="the result (%(default)s)")
    parser.add_argument("--skip-passed", type=Path, help="a result to go on from")
    parser.add_argument("--here", action="store_true", help="in this process, which may end with a case")
    given = parser.parse_args(arguments)
    device_tests.OUTCOMES = given.json.with_suffix(".tests.txt")
    names = [name for name in given.only.split(",") if name] or list(SECTIONS)
    for name in names:
        if name not in SECTIONS:
            parser.error(f"--only {name!r}: no such section; there are {', '.join(SECTIONS)}")
    stretch = max(1.0, given.seconds / sum(SECTIONS[name] for name in names)) if given.only else 1.0
    if given.here:
        return here({name: SECTIONS[name] * stretch for name in names}, given.seconds, given.json)
    end_by_signal()
    earlier = _earlier(given.skip_passed)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    device_tests.begin(earlier.get("tests", {}))
    report = Report.resumed(earlier)
    report.under = "check", "begin"
    _write(given.json, report, asked=False)
    why = no_device()
    if why is not None:
        print(f"gpu-check: {why}; nothing was checked", file=sys.stderr)
        report.note(*report.under, f"failed: {why}")
        report.under = None
        _write(given.json, report)
        return 1
    report = supervised(names, given.seconds, given.json, report, bool(given.only))
    print(f"wrote {given.json}")
    return 1 if report.count("failed") else 0


def _earlier(file: Path | None) -> dict[str, Any]:
    """The result to go on from. One that cannot be read costs what it would have saved, and no more."""
    if file is not None:
        try:
            found: dict[str, Any] = json.loads(file.read_text())
            Report.resumed(found)
            return found
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"gpu-check: nothing is skipped: {file}: {error!r}", file=sys.stderr)
    return {"cases": []}


def supervised(names: Sequence[str], seconds: float, file: Path, report: Report, stretched: bool = True) -> Report:
    """Runs the sections in a process, and in another one from the case on behind which it ended. stretched: they share
    the seconds, if these are more than theirs."""
    ends, left = time.monotonic() + seconds, list(names)
    report.under = left[0], ""
    _write(file, report)
    while True:
        before = len(report.cases)
        given = ["--here", "--json", str(file), "--seconds", str(max(1.0, ends - time.monotonic()))]
        given += ["--only", ",".join(left)] if stretched or left != list(SECTIONS) else []
        status = _run_to_its_end([*COMMAND, *given], ends + 2 * GRACE)
        found = json.loads(file.read_text())
        report = Report.resumed(found, again=False)
        if found["under"] is None:
            return report
        section, case = found["under"]
        report.under = section, case
        noted = report.has(section, case or "section")
        began = not noted or len(report.cases) > before
        if not noted:
            report.note(section, case or "section", f"failed: its process ended (status {status})")
        elif not began:
            report.note(section, "process", f"failed: another process ended as it began (status {status})")
        left = left[left.index(section) :]
        _write(file, report)
        if not began or time.monotonic() >= ends:
            print(report.summary(), flush=True)
            return report
        print(f"another process goes on behind {section}/{case or 'section'}", flush=True)


def _run_to_its_end(command: Sequence[str], ends: float) -> int:
    """The exit status of a command that has until then, and leaves no process behind."""
    process = started(command)
    try:
        return process.wait(max(1.0, ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL
    finally:
        ended(process)


def here(sections: dict[str, float], seconds: float, file: Path) -> int:
    """Runs sections (their seconds by name) in this process, behind what the file has. The exit status."""
    report = Report.resumed(json.loads(file.read_text()), again=False)
    report.kept = lambda report: _write(file, report)
    device_tests.FOLLOWS = ("bits", "device_tests") in pairwise(sections)
    try:
        run([Section(name, each, cases_of(name)) for name, each in sections.items()], seconds, report,
            Guard(usable, hard=True))  # fmt: skip
    except DeviceLost as why:
        print(f"  this process has no device any more: {why}", flush=True)
    report.kept(report)
    return 1 if report.count("failed") else 0


def usable() -> bool:
    """Whether this process can compute on the device still."""
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def _write(file: Path, report: Report, asked: bool = True) -> None:
    """Whoever ends this process meanwhile leaves the file as it was before. asked: as by `result`."""
    whole = file.with_suffix(".new")
    whole.write_text(json.dumps(result(report, asked), indent=1) + "\n")
    whole.replace(file)


NEEDED = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "xxhash", "jinja2",
    "hypothesis", "pytest",
)  # fmt: skip
"""Packages without which sections or tests fail; all else that the engine depends on may be missing."""


def no_device() -> str | None:
    """Why nothing can be checked here, packages that are missing among it; None where all is there."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        return f"python has no {', '.join(missing)}: install what is missing"
    from headrace.kernels.triton import backend

    return backend.missing()


def cases_of(name: str) -> Callable[[], Iterator[Case]]:
    """The cases of a section's module, imported when it starts: one that cannot be is a failure of its own."""

    def cases() -> Iterator[Case]:
        found: Iterator[Case] = import_module(f"tools.gpu.{name}").cases()
        return found

    return cases


def result(report: Report, asked: bool = True) -> dict[str, Any]:
    """As bench/results has it: date, machine, command, cases, sections that ended, the case under way, and outcomes of
    tests. asked: the device is asked what it is, which takes seconds, or for ever."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine() if asked else {},
        "command": " ".join(["python -m tools.gpu.check", *sys.argv[1:]]),
        "cases": report.cases,
        "ended": report.ended,
        "under": report.under,
        "tests": outcomes_in(device_tests.OUTCOMES),
    }


@cache
def machine() -> dict[str, Any]:
    """What figures depend on. Asked once: a device that is lost does not answer."""
    from headrace import cores, host

    found = {"processor": host.processor_name(), "cores": cores.usable(), "python": platform.python_version()}
    found |= {name: _version(name) for name in ("torch", "triton", "transformers")}
    try:
        import torch

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        return found | {"torch": torch.__version__, "cuda": str(torch.version.cuda), "gpu": gpu}
    except (ImportError, RuntimeError) as error:  # the result says what it can
        return found | {"cuda": "", "gpu": f"unknown: {error}"}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    try:
        status = main()
    except SystemExit as end:
        status = int(end.code or 0)
    sys.stdout.flush()
    os._exit(status)  # where the device is lost, the interpreter might wait for it for ever
