"""`headrace verify`: equal or not, schedule by schedule."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console

from headrace.cli.doctor import rows_of
from headrace.config import EngineConfig
from headrace.console import Trimmed, out, telling
from headrace.doctor.verify import ANSWER, PROMPTS, REPORTED, Report, verify

WORDS = {True: "equal", False: "NOT EQUAL", None: "not shown"}


def run(config: EngineConfig, as_json: bool, seconds: float) -> bool:
    """Prints the report; whether no schedule gave other bits."""
    with telling() as tell:
        report = verify(config, tell, seconds)
    if as_json:
        print(json.dumps(asdict(report) | {"equal": report.equal}, indent=1))
    else:
        show(out, report)
    return report.equal


def show(console: Console, report: Report) -> None:
    """Prints the screen."""
    console.print(Trimmed(rows_of(_rows(report))), end="")
    console.print(f"{report.fingerprint}: {_headline(report)}")


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    yield "engine", report.engine
    yield (
        "prompts",
        (
            f"{PROMPTS} on {report.prefix:,} shared tokens, {ANSWER} tokens of answer each with {REPORTED} log "
            "probabilities; the truth: each alone, cold"
        ),
    )
    for each in report.verdicts:
        note = f": {each.note}" if each.note else ""
        yield each.schedule, f"{WORDS[each.equal]}{note} ({each.seconds:.1f} s)"


def _headline(report: Report) -> str:
    shown = [each for each in report.verdicts if each.equal is not None]
    if not report.equal:
        wrong = ", ".join(each.schedule for each in shown if not each.equal)
        return f"other bits by: {wrong}. Please report this with the output of `headrace doctor --json`"
    return f"the same bits by {len(shown)} schedules beside the first"
