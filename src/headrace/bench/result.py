"""The fixed format of results: date, machine, command and cases, which are flat."""

from __future__ import annotations

import json
import platform
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace import cores, host
from headrace.bench.benchmark import Benchmark, Case
from headrace.console import err, out
from headrace.version import __version__


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


def result(cases: list[Case], measured: dict[str, Any]) -> dict[str, Any]:
    """The fixed format: date, machine, command, cases. measured: figures of the machine from the same run."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine() | measured,
        "command": " ".join(["headrace", *sys.argv[1:]]),
        "cases": cases,
    }


def measure(bench: Benchmark, json_file: Path | None = None) -> list[Case]:
    """Prints cases as they come and writes what there is to the file, interrupted or not; then what sums them up.

    SIGTERM interrupts as ctrl-c does: by KeyboardInterrupt, at which whoever makes the cases ends the processes it has.
    """
    done: list[Case] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for case in bench.cases():
            done.append(case)
            out.print(bench.line(case), soft_wrap=True)
    finally:
        signal.signal(signal.SIGTERM, before)
        if done and json_file is not None:
            json_file.write_text(json.dumps(result(done, bench.machine), indent=1) + "\n", encoding="utf-8")
            err.print(f"wrote {json_file}", style="dim")
    bench.finish(done)
    return done
