"""The fixed format of results: date, machine, command and cases, which are flat."""

from __future__ import annotations

import json
import platform
import signal
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace import __version__, cores, host
from headrace.console import err, out

JsonFile = Annotated[Path | None, typer.Option("--json", help="File that takes the result.")]


def machine() -> dict[str, Any]:
    """What a figure depends on: processor, usable cores, memory, versions."""
    facts = {
        "processor": host.processor_name(),
        "cores": cores.usable(),
        "memory_gib": round(host.memory_total() / host.GIB, 1),
    }
    facts |= {"python": platform.python_version(), "headrace": __version__}
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["torch"] = torch.__version__
        if torch.cuda.is_available():
            facts["gpu"] = torch.cuda.get_device_name(0)
    return facts


def result(cases: list[dict[str, Any]], limits: dict[str, Any] | None = None) -> dict[str, Any]:
    """The fixed format: date, machine, command, cases. A case is flat: names to numbers and strings.

    limits: what the machine was measured to do at best in the same run.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine() | (limits or {}),
        "command": " ".join(["headrace", *sys.argv[1:]]),
        "cases": cases,
    }


def write_result(path: Path | None, cases: list[dict[str, Any]], limits: dict[str, Any] | None = None) -> None:
    """Writes the result of a benchmark to `path`; nothing where it is None."""
    if path is not None:
        path.write_text(json.dumps(result(cases, limits), indent=1) + "\n", encoding="utf-8")
        err.print(f"wrote {path}", style="dim")


def flat(case: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value}" for name, value in case.items() if value is not None)


def measure_cases(
    cases: Iterable[dict[str, Any]],
    path: Path | None,
    limits: dict[str, Any] | None = None,
    line: Callable[[dict[str, Any]], str] = flat,
) -> list[dict[str, Any]]:
    """Prints cases as they come and writes what there is, an interruption or not. limits: may grow meanwhile.

    SIGTERM interrupts as ctrl-c does: by KeyboardInterrupt, at which whoever makes the cases ends the processes it has.
    """
    done: list[dict[str, Any]] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for case in cases:
            done.append(case)
            out.print(line(case), soft_wrap=True)
    finally:
        signal.signal(signal.SIGTERM, before)
        if done:
            write_result(path, done, limits)
    return done


def one_of(name: str, given: str, known: tuple[str, ...]) -> Any:
    """Raises ValueError naming the option."""
    if given not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {given!r}")
    return given
