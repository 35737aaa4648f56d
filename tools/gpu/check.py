"""Measures the engine on a GPU: bits, kernels and engines beside torch's and transformers'.

    python -m tools.gpu.check --only bits,attention --seconds 200 --json FILE --skip-passed EARLIER

Sections run in the order of SECTIONS, each within its seconds: bits first, while kernels compile beside. The JSON is
written again after each case; --skip-passed goes on from one: what it has measured, and tests that passed, are not run
again. The last lines are a summary. Exit status: 1 without a CUDA device and after a failure; goals that are not met
are printed (short) and fail nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from tools.gpu import device_tests
from tools.gpu.pytest_outcomes import outcomes_in
from tools.gpu.runner import Case, Report, Section, run

SECONDS = 480.0
SECTIONS = {
    "limits": 10, "bits": 90, "device_tests": 30, "chunk_attention": 15, "attention": 40, "products": 20,
    "engine_s1": 45, "engine_8b": 50, "engine_7b": 50, "restores": 70, "long_context": 50, "compiled": 70,
}  # fmt: skip
"""A section is the module of its name, and its seconds. Those that --only names share --seconds, if these are more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.check", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help=f"sections, by commas, of: {', '.join(SECTIONS)}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="in all (default %(default)s)")
    parser.add_argument("--json", type=Path, help="a file for the result")
    parser.add_argument("--skip-passed", type=Path, help="a result to go on from")
    given = parser.parse_args(arguments)
    names = [name for name in given.only.split(",") if name] or list(SECTIONS)
    for name in names:
        if name not in SECTIONS:
            parser.error(f"--only {name!r}: no such section; there are {', '.join(SECTIONS)}")
    why = no_device()
    if why is not None:
        print(f"gpu-check: {why}; nothing was checked", file=sys.stderr)
        return 1
    earlier = json.loads(given.skip_passed.read_text()) if given.skip_passed else {"cases": []}
    device_tests.begin(earlier.get("tests", {}))
    report = Report.resumed(earlier)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        report.kept = lambda report: _write(given.json, report)
    stretch = max(1.0, given.seconds / sum(SECTIONS[name] for name in names)) if given.only else 1.0
    run([Section(name, SECTIONS[name] * stretch, cases_of(name)) for name in names], given.seconds, report)
    report.kept(report)
    print("" if given.json is None else f"wrote {given.json}")
    return 1 if report.count("failed") else 0


def _write(file: Path, report: Report) -> None:
    """Whoever ends this process meanwhile leaves the file as it was before."""
    whole = file.with_suffix(".new")
    whole.write_text(json.dumps(result(report), indent=1) + "\n")
    whole.replace(file)


def no_device() -> str | None:
    """Why no kernel can run here; None where one can."""
    from headrace.kernels.triton import backend

    return backend.missing()


def cases_of(name: str) -> Callable[[], Iterator[Case]]:
    """The cases of a section's module, imported when it starts: one that cannot be is a failure of its own."""

    def cases() -> Iterator[Case]:
        found: Iterator[Case] = import_module(f"tools.gpu.{name}").cases()
        return found

    return cases


def result(report: Report) -> dict[str, Any]:
    """As bench/results has it: date, machine, command, cases, sections that ended, and outcomes of tests."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "command": " ".join(["python -m tools.gpu.check", *sys.argv[1:]]),
        "cases": report.cases,
        "ended": report.ended,
        "tests": outcomes_in(device_tests.OUTCOMES),
    }


def machine() -> dict[str, Any]:
    """What figures depend on."""
    import torch

    from headrace import cores, host

    found = {"processor": host.processor_name(), "cores": cores.usable(), "python": platform.python_version()}
    found |= {"torch": torch.__version__, "triton": metadata.version("triton"), "cuda": str(torch.version.cuda)}
    return found | {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else ""}


if __name__ == "__main__":
    sys.exit(main())
