"""Sections of measurements within a time: cases run one after another, their rows are printed as they come and kept.

A section is a list of named cases. A case that raises is 'failed' and the next one runs; one that raises LeftOut is
'left out', as are those for which no time is left. What a failure leaves unusable, and what no interruption ends, ends
the process (Guard): the report says what was under way, so another process can go on. Imports no torch.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

CASE_SECONDS = 45.0
"""For a case that names no other time: several times what the slowest one took."""
GRACE = 15.0
"""Seconds for a section to clean up, and for an interruption to come through: a call into the driver may never return.
"""

INTERRUPTED = "left out: interrupted, no time"
STDERR = 2
"""The descriptor, whatever sys.stderr is by then."""


class LeftOut(Exception):
    """Says why a case cannot run here."""


class DeviceLost(Exception):
    """An error after which this process can compute nothing more on the device."""


@dataclass(frozen=True, slots=True)
class Guard:
    """usable: asked after each failure; False ends the run by DeviceLost. hard: a case that no interruption ends, ends
    the process."""

    usable: Callable[[], bool] = lambda: True
    hard: bool = False


class Goal(NamedTuple):
    """The least that a figure shall be, or the most."""

    figure: str
    limit: float
    most: bool = False

    def met(self, value: float) -> bool:
        return value <= self.limit if self.most else value >= self.limit

    def told(self, figures: dict[str, Any]) -> str:
        """'of_best 0.71 >= 0.9 short'."""
        value = figures[self.figure]
        sign, verdict = "<=" if self.most else ">=", "met" if self.met(value) else "short"
        return f"{self.figure} {shown(value)} {sign} {shown(self.limit)} {verdict}"


@dataclass(frozen=True, slots=True)
class Row:
    """What a case found: figures, whose names end in their units, and the goals for some of them. A figure that is a
    dict is kept and not printed."""

    name: str
    figures: dict[str, Any]
    goals: tuple[Goal, ...] = ()

    def told(self) -> str:
        """One line of the table."""
        judged = "; ".join(goal.told(self.figures) for goal in self.goals)
        figures = "  ".join(f"{name} {shown(value)}" for name, value in self.figures.items() if type(value) is not dict)
        return f"{self.name:<40} {figures}" + (f"   [{judged}]" if judged else "")


class Case(NamedTuple):
    """A measurement, the name under which it is left out, and the seconds after which it is interrupted."""

    name: str
    run: Callable[[], Row | Iterable[Row]]
    seconds: float = CASE_SECONDS


@dataclass(frozen=True, slots=True)
class Section:
    """cases: called when the section starts, for it may draw a model; run to its end, so that it can clean up. seconds:
    no case goes on longer."""

    name: str
    seconds: float
    cases: Callable[[], Iterator[Case]]


@dataclass(slots=True)
class Report:
    """Cases with their status and rows, in the order in which they ran."""

    cases: list[dict[str, Any]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    """Sections that went to their end."""
    under: tuple[str, str] | None = None
    """Section and case under way; the case is empty while the section prepares, or cleans up."""
    kept: Callable[[Report], None] = lambda report: None
    """Called whenever there is more to keep."""

    @classmethod
    def resumed(cls, result: dict[str, Any], again: bool = True) -> Report:
        """What an earlier result has measured: the cases of sections that ended, and single ones of others. again: what
        failed or was left out is to be run again."""
        cases = [case for case in result["cases"] if case["status"] == "measured" or not again]
        return cls(cases, list(result.get("ended", ())))

    def has(self, section: str, case: str) -> bool:
        """Whether the case is noted."""
        return any((each["section"], each["case"]) == (section, case) for each in self.cases)

    def at(self, section: str, case: str = "") -> None:
        """Says what is under way, before it can end the process."""
        self.under = section, case
        self.kept(self)

    def note(self, section: str, case: str, status: str, rows: Iterable[Row] = (), seconds: float = 0.0) -> None:
        head = {"section": section, "case": case, "status": status, "seconds": round(seconds, 2)}
        given = list(rows)
        self.cases += [head | _kept(row) for row in given] or [head]
        lines = [f"  {row.told()}" for row in given]
        lines += [] if status == "measured" else [f"  {case:<40} {status}"]
        print(*lines, sep="\n", flush=True)
        self.kept(self)

    def count(self, status: str) -> int:
        return sum(case["status"].startswith(status) for case in self.cases)

    def summary(self) -> str:
        """How many were measured, goals that are not met, and cases that were not measured, by name."""
        goals = [(case, goal) for case in self.cases for goal in case.get("goals", ())]
        short = [f"{case['section']}/{case['name']}: {goal}" for case, goal in goals if not goal.endswith(" met")]
        lines = [f"{self.count('measured')} rows measured, {len(goals) - len(short)} of {len(goals)} goals met"]
        lines += [f"  {each}" for each in short]
        failed = [case for case in self.cases if case["status"].startswith("failed")]
        lines += [f"{case['section']}/{case['case']} {case['status'][:300]}" for case in failed]
        for status in ("failed", "left out"):
            names = [f"{case['section']}/{case['case']}" for case in self.cases if case["status"].startswith(status)]
            lines += [f"{status}: {', '.join(names)}"] if names else []
        return "\n".join(lines)


def run(
    sections: Iterable[Section], seconds: float, report: Report | None = None, guard: Guard | None = None
) -> Report:
    """Runs the sections in this order within `seconds`, but for what the report has. A case that is under way when its
    own time, its section's, or all of it ends is interrupted. Raises DeviceLost by the guard, all that was found being
    kept."""
    report, guard, ends = report or Report(), guard or Guard(), time.monotonic() + seconds
    for section in sections:
        if section.name in report.ended or report.has(section.name, "section"):
            continue
        began = time.monotonic()
        print(f"{section.name}: {section.seconds:.0f} s at most, {max(0, ends - began):.0f} s left", flush=True)
        if began >= ends:
            report.note(section.name, "all", "left out: no time")
            continue
        report.at(section.name)
        try:
            _run_cases(section, section.cases(), report, min(began + section.seconds, ends), guard)
        except DeviceLost:
            raise
        except (Exception, _TimeOver) as error:
            report.note(section.name, "section", _failure(error), seconds=time.monotonic() - began)
            _go_on(guard, report.cases[-1]["status"])
    report.under = None
    print(report.summary(), flush=True)
    return report


def _run_cases(section: Section, cases: Iterator[Case], report: Report, ends: float, guard: Guard) -> None:
    """The section is run to its end also where no time is left, so that its own clean-up runs."""
    first = len(report.cases)
    while (case := _next(cases, ends, guard)) is not None:
        if report.has(section.name, case.name):
            continue
        now = time.monotonic()
        if now >= ends:
            report.note(section.name, case.name, "left out: no time")
            continue
        rows: list[Row] = []
        report.at(section.name, case.name)
        try:
            with _alarm(min(case.seconds, ends - now), guard):
                found = case.run()
                rows += [found] if isinstance(found, Row) else found
            status = "measured"
        except LeftOut as why:
            status = f"left out: {why}"
        except (Exception, _TimeOver) as error:
            status = _failure(error)
        report.note(section.name, case.name, status, rows, time.monotonic() - now)
        _go_on(guard, status, cases)
        report.at(section.name)
    if all(case["status"] == "measured" for case in report.cases[first:]):
        report.ended.append(section.name)


def _next(cases: Iterator[Case], ends: float, guard: Guard) -> Case | None:
    """The next case of a section, None behind its last one."""
    with _alarm(max(GRACE, ends - time.monotonic()), guard):
        return next(cases, None)


def _go_on(guard: Guard, status: str, cases: Iterator[Case] | None = None) -> None:
    """Raises DeviceLost behind a failure, or an interruption (of a recording, say), that has left nothing to compute
    on; the section's processes are ended."""
    if not status.startswith(("failed", INTERRUPTED)) or guard.usable():
        return
    with _alarm(GRACE, guard), suppress(Exception, _TimeOver):
        if isinstance(cases, Generator):
            cases.close()
    raise DeviceLost(status)


def _failure(error: BaseException) -> str:
    if isinstance(error, _TimeOver):
        return INTERRUPTED
    traceback.print_exception(error, limit=-6, file=sys.stdout)
    return f"failed: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


class _TimeOver(BaseException):
    """Passes by `except Exception` of what is measured."""


@contextmanager
def _alarm(seconds: float, guard: Guard) -> Iterator[None]:
    """Raises _TimeOver in the main thread after so many seconds. A hard guard ends the process GRACE later, with the
    tracebacks of its threads: the main one may wait for a device that never answers."""

    def over(number: int, frame: object) -> None:
        raise _TimeOver

    before = signal.signal(signal.SIGALRM, over)
    if guard.hard:
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=STDERR)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if guard.hard:
            faulthandler.cancel_dump_traceback_later()


def _kept(row: Row) -> dict[str, Any]:
    figures = {name: round(value, 4) if isinstance(value, float) else value for name, value in row.figures.items()}
    goals = [goal.told(row.figures) for goal in row.goals]
    return {"name": row.name} | figures | ({"goals": goals} if goals else {})


def shown(value: Any) -> str:
    """A figure with three digits or more."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
