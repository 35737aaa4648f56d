"""The fixed format of results: date, machine, command and cases, which are flat."""

from __future__ import annotations

import json
import platform
import signal
import sys
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace import cores, host
from headrace.bench.benchmark import Benchmark, Case, CaseProgress
from headrace.bench.table import CaseTable, columns_of
from headrace.config.fields import listed
from headrace.console import err, out
from headrace.files import check_can_write
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


def result(cases: list[Case], measured: dict[str, Any], lengths: dict[int, int] | None = None) -> dict[str, Any]:
    """The fixed format: date, machine, command, cases. measured: figures of the machine from the same run. lengths: of
    a quick run, see Benchmark.quick_lengths."""
    quick = {"quick": True, "quick_lengths": lengths} if lengths else {}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine() | measured,
        "command": " ".join(["headrace", *sys.argv[1:]]),
        **quick,
        "cases": cases,
    }


def measure(bench: Benchmark, json_file: Path | None = None) -> list[Case]:
    """Prints cases as they come and writes what there is to the file, interrupted or not; then what sums them up.

    Raises ValueError, before anything is measured, for a file that cannot be written. SIGTERM interrupts as ctrl-c
    does: by KeyboardInterrupt, at which whoever makes the cases ends the processes it has.
    """
    if json_file is not None:
        check_can_write("--json", json_file)
    done: list[Case] = []
    table: CaseTable | None = None
    lengths = bench.quick_lengths()
    if lengths:
        out.print(quick_text(lengths), style="yellow")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ExitStack() as stack:
            bench.progress = CaseProgress(stack, bench.case_count())
            for case in bench.cases():
                done.append(case)
                with bench.progress.hidden():
                    table = _print(bench, case, table)
    finally:
        signal.signal(signal.SIGTERM, before)
        if done and json_file is not None:
            written = json.dumps(result(done, bench.machine, lengths), indent=1) + "\n"
            json_file.write_text(written, encoding="utf-8")
            err.print(f"wrote {json_file}", style="dim")
    bench.finish(done)
    return done


def _print(bench: Benchmark, case: Case, table: CaseTable | None) -> CaseTable:
    """The case as a row, after the head if it is the first."""
    if table is None:
        columns = bench.columns()
        table = CaseTable(columns_of(case) if columns is None else columns, out)
        if table.columns:
            table.head()
    if table.columns:
        table.row(case)
        out.file.flush()  # a pipe shows rows as they come
    return table


def _listed(names: list[str]) -> str:
    return listed(names, "and") if len(names) > 1 else names[0]


def quick_text(lengths: dict[int, int]) -> str:
    """'quick run: lengths of 64 and 256 instead of 2,048 and 8,192, ...'."""
    usual, true = (_listed([f"{each:,}" for each in some]) for some in (lengths, lengths.values()))
    return f"quick run: lengths of {true} instead of {usual}, once each: it shows that all runs, and measures nothing"
