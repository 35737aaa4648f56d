"""The runner of `make gpu-check`: time, failures, what is left out, the table; its sections measure nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.gpu import check, device_tests, outcomes, pytest_outcomes, runner, tables
from tools.gpu.runner import Case, Goal, LeftOut, Row, Section

ROW = Row("a row", {"ours_ms": 2.0, "of_best": 0.7}, (Goal("of_best", 0.65), Goal("of_best", 0.9)))


def section(name: str, *runs: Callable[[], Any], seconds: float = 60.0) -> Section:
    return Section(name, seconds, lambda: iter([Case(f"case {number}", run) for number, run in enumerate(runs)]))


def fail() -> Row:
    raise ValueError("broken\nand more")


def leave_out() -> Row:
    raise LeftOut("no memory")


def statuses(report: runner.Report) -> list[str]:
    return [case["status"] for case in report.cases]


class Clock:
    """time.monotonic, which a case may move on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(signal, "setitimer", lambda *args: None)

    def passing(self, seconds: float) -> Callable[[], Row]:
        def run() -> Row:
            self.now += seconds
            return ROW

        return run


def test_rows_are_kept_with_their_goals(capsys: pytest.CaptureFixture[str]) -> None:
    report = runner.run([section("one", lambda: ROW)], 60)
    (case,) = report.cases
    assert {case[name] for name in ("section", "case", "status", "name")} == {"one", "case 0", "measured", "a row"}
    assert case["ours_ms"] == 2.0 and case["goals"] == ["of_best 0.7 >= 0.65 met", "of_best 0.7 >= 0.9 short"]
    printed = capsys.readouterr().out
    assert "ours_ms 2  of_best 0.7   [of_best 0.7 >= 0.65 met; of_best 0.7 >= 0.9 short]" in printed
    assert "1 rows measured, 1 of 2 goals met" in printed


@pytest.mark.parametrize(("value", "verdict"), [(2.0, "met"), (2.001, "short"), (1.0, "met")])
def test_a_goal_may_be_a_most(value: float, verdict: str) -> None:
    assert Goal("ms", 2.0, most=True).told({"ms": value}).endswith(f"<= 2 {verdict}")


def test_a_failure_ends_its_case_alone(capsys: pytest.CaptureFixture[str]) -> None:
    report = runner.run([section("one", fail, lambda: ROW), section("two", leave_out)], 60)
    assert statuses(report) == ["failed: ValueError: broken", "measured", "left out: no memory"]
    assert report.count("failed") == 1
    printed = capsys.readouterr().out
    assert "failed: one/case 0" in printed and "left out: two/case 0" in printed and "Traceback" in printed


def test_a_section_that_cannot_begin_fails() -> None:
    def cases() -> Iterator[Case]:
        yield Case("first", lambda: ROW)
        raise MemoryError("no room for a model")

    report = runner.run([Section("one", 60.0, cases), section("two", lambda: ROW)], 60)
    assert statuses(report) == ["measured", "failed: MemoryError: no room for a model", "measured"]


def test_rows_before_a_failure_are_kept() -> None:
    def some() -> Iterator[Row]:
        yield ROW
        raise ValueError("then broken")

    report = runner.run([section("one", some)], 60)
    assert [(case["name"], case["status"]) for case in report.cases] == [("a row", "failed: ValueError: then broken")]


def test_no_case_starts_after_its_sections_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    slow = section("slow", clock.passing(4), clock.passing(4), clock.passing(4), seconds=7)
    report = runner.run([slow, section("next", clock.passing(1))], 100)
    assert statuses(report) == ["measured", "measured", "left out: no time", "measured"]


def test_no_section_starts_after_the_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(monkeypatch)
    begun: list[str] = []

    def late() -> Iterator[Case]:
        begun.append("late")
        yield Case("first", lambda: ROW)

    report = runner.run([section("one", clock.passing(11), clock.passing(1)), Section("late", 60.0, late)], 10)
    assert statuses(report) == ["measured", "left out: no time", "left out: no time"] and not begun
    assert "left out: one/case 1, late/all" in capsys.readouterr().out


def test_what_hangs_is_interrupted_and_cleaned_up() -> None:
    """By an alarm; the section's own clean-up runs, and so does the next section's note."""
    cleaned: list[str] = []

    def cases() -> Iterator[Case]:
        try:
            yield Case("hangs", lambda: time.sleep(30))  # type: ignore[func-returns-value, arg-type, return-value]
        finally:
            cleaned.append("yes")

    began = time.monotonic()
    report = runner.run([Section("one", 60.0, cases), section("two", lambda: ROW)], 0.2)
    assert time.monotonic() - began < 20 and cleaned == ["yes"]
    assert statuses(report) == ["left out: interrupted, no time", "left out: no time"]
    report = runner.run([Section("one", 0.2, cases), section("two", lambda: ROW)], 60)
    assert time.monotonic() - began < 20
    assert statuses(report) == ["left out: interrupted, no time", "measured"]
    with pytest.raises(runner.DeviceLost, match="interrupted"):
        runner.run([Section("one", 0.2, cases)], 60, guard=runner.Guard(usable=lambda: False))
    assert cleaned == 3 * ["yes"], "what an interruption leaves unusable"


def test_the_result_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One JSON with date, machine, command and cases; status 1 after a failure."""
    monkeypatch.setattr(check, "no_device", lambda: None)
    monkeypatch.setattr(check, "machine", lambda: {"gpu": "none"})
    monkeypatch.setattr(check, "usable", lambda: True)
    monkeypatch.setattr(check, "cases_of", lambda name: section(name, fail if name == "bits" else lambda: ROW).cases)
    monkeypatch.setattr(device_tests, "OUTCOMES", tmp_path / "outcomes")
    file = tmp_path / "build" / "found.json"
    file.parent.mkdir()
    file.write_text('{"cases": []}')
    given = ["--here", "--json", str(file), "--only"]
    assert check.main([*given, "bits,limits"]) == 1
    found = json.loads(file.read_text())
    assert list(found) == ["date", "machine", "command", "cases", "ended", "under", "tests"] and found["under"] is None
    assert [(case["section"], case["status"]) for case in found["cases"]] == [
        ("bits", "failed: ValueError: broken"), ("limits", "measured"),
    ]  # fmt: skip
    file.write_text('{"cases": []}')
    assert check.main([*given, "limits"]) == 0


PROGRAM = """
import ctypes, os, signal, sys, time
from tools.gpu import check, device_tests, runner
from tools.gpu.runner import Case, Row
from pathlib import Path

check.no_device, check.machine, runner.GRACE = (lambda: None), (lambda: {}), 0.3
device_tests.OUTCOMES = Path(sys.argv[1])
lost = False
check.usable = lambda: not lost

def note(name):
    with open(sys.argv[2], "a") as ran:
        ran.write(name + "\\n")

def right():
    return Row("right", {})

def loses():
    global lost
    lost = True
    raise RuntimeError("an illegal memory access was encountered")

def hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(60)

def cases_of(section):
    def cases():
        note(section)
        if section == "attention":
            os._exit(3)
        try:
            for name, run in CASES[section].items():
                yield Case(name, run, 0.3)
        finally:
            note(section + " cleaned")
    return cases

CASES = {
    "limits": {"right": right},
    "bits": {"loses": loses, "right": right, "crashes": lambda: ctypes.string_at(0), "last": right},
    "products": {"hangs": hangs, "last": right},
}
check.cases_of = cases_of
os._exit(check.main(sys.argv[3:]))
"""


def test_another_process_goes_on_behind_what_ends_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A case that loses the device, one that crashes, one that hangs in a call, a section that cannot begin: each costs
    itself alone."""
    (tmp_path / "child.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = (sys.executable, str(tmp_path / "child.py"), str(tmp_path / "outcomes"), str(tmp_path / "ran"))
    monkeypatch.setattr(check, "COMMAND", command)
    monkeypatch.setattr(check, "machine", lambda: {})
    monkeypatch.setattr(device_tests, "OUTCOMES", tmp_path / "outcomes")
    names, file = ["limits", "bits", "attention", "products"], tmp_path / "found.json"
    report = check.supervised(names, 60.0, file, runner.Report())
    assert [(case["case"], case["status"].partition(" (")[0]) for case in report.cases] == [
        ("right", "measured"),
        ("loses", "failed: RuntimeError: an illegal memory access was encountered"), ("right", "measured"),
        ("crashes", "failed: its process ended"), ("last", "measured"),
        ("section", "failed: its process ended"),
        ("hangs", "failed: its process ended"), ("last", "measured"),
    ]  # fmt: skip
    ran = (tmp_path / "ran").read_text().split("\n")[:-1]
    assert [ran.count(name) for name in names] == [1, 3, 1, 2], "what had ended began again"
    assert ran.count("bits cleaned") == 2, "a section that loses the device ends its processes"
    assert json.loads(file.read_text())["under"] is None


def test_a_run_that_is_cut_off_is_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file has what was measured until then; a later run adds what is missing, and what failed."""
    monkeypatch.setattr(check, "no_device", lambda: None)
    monkeypatch.setattr(check, "machine", lambda: {"gpu": "none"})
    monkeypatch.setattr(check, "usable", lambda: True)
    monkeypatch.setattr(device_tests, "OUTCOMES", tmp_path / "outcomes")
    ran: list[str] = []

    def cases_of(name: str) -> Callable[[], Iterator[Case]]:
        def noted(number: int) -> Row:
            ran.append(f"{name} {number}")
            if (name, number) == ("bits", 1) and not file.with_name("again.json").exists():
                device_tests.OUTCOMES.write_text("passed a\nfailed b\nfailed a\n")
                raise KeyboardInterrupt
            return ROW

        return lambda: iter([Case(str(number), partial(noted, number)) for number in range(3)])

    monkeypatch.setattr(check, "cases_of", cases_of)
    monkeypatch.setattr(check, "_run_to_its_end", lambda command, ends: check.main(command[3:]))
    file = tmp_path / "found.json"
    with pytest.raises(KeyboardInterrupt):
        check.main(["--only", "limits,bits,products", "--json", str(file)])
    found = json.loads(file.read_text())
    assert found["ended"] == ["limits"] and len(found["cases"]) == 4
    ran.clear()
    file.with_name("again.json").touch()
    found["tests"] = {"a": "passed", "b": "failed"}
    file.write_text(json.dumps(found))
    given = ["--only", "limits,bits,products", "--skip-passed", str(file), "--json", str(tmp_path / "more.json")]
    assert check.main(given) == 0
    assert ran == ["bits 1", "bits 2", "products 0", "products 1", "products 2"]
    more = json.loads((tmp_path / "more.json").read_text())
    assert len(more["cases"]) == 9 and more["ended"] == ["limits", "bits", "products"]
    assert more["tests"] == found["tests"], "what passed is left out by the tests themselves"


def test_what_has_not_passed_on_a_device_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two processes; what passed in this run is left out, and each outcome is kept as it comes."""
    folder, file = tmp_path / "gpu", tmp_path / "outcomes"
    folder.mkdir()
    two = "@pytest.mark.parametrize('n', [1, 2])\ndef test_two(n): assert n < 2\n"
    body = f"import pytest\n\ndef test_one(): pass\n\n{two}"
    order = ("test_triton_weights.py", "test_new.py", "test_triton_rows.py")
    for name in order:
        (folder / name).write_text(body)
    tests = device_tests.DeviceTests(file, str(folder), at_once=2)
    try:
        with pytest.raises(RuntimeError, match="3 failed, 6 passed"):
            tests.result(60.0)
    finally:
        tests.stop()
    lines = [line.split("/gpu/")[-1].split(" ")[-1] for line in file.read_text().splitlines()]
    for test in ("test_one", "test_two[1]"):  # each by a process of its own
        assert sorted(order, key=lambda name: lines.index(f"{name}::{test}")) == list(order)
    passed = pytest_outcomes.passed_in(file)
    assert len(passed) == 6 and len(outcomes.outcomes_in(file)) == 9
    (tmp_path / "2026-11-27-gpu-check.json").write_text(json.dumps({"tests": outcomes.outcomes_in(file)}))
    (tmp_path / "2026-11-28-gpu-check.json").write_text(json.dumps({"cases": []}))
    assert pytest_outcomes.passed_before(tmp_path) == passed
    file.write_text("".join(f"passed {name}\n" for name in outcomes.outcomes_in(file)))
    tests = device_tests.DeviceTests(file, str(folder), at_once=1)
    try:
        assert tests.result(60.0).figures == {"pytest": "9 passed"}, "nothing is left to run"
    finally:
        tests.stop()


def test_tests_that_run_go_on_into_their_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same processes; they are ended where another section comes first, and by the section that has them."""

    class Tests:
        def __init__(self, running: bool) -> None:
            self.runs = running

        def running(self) -> bool:
            return self.runs

        def stop(self) -> None:
            self.runs = False

        def result(self, seconds: float) -> Row:
            return ROW

    begun: list[Path] = []
    monkeypatch.setattr(device_tests, "DeviceTests", lambda file: begun.append(file) or Tests(True))
    ours = Tests(True)
    device_tests.leave(ours, follows=True)
    assert ours.runs and [case.name for case in device_tests.cases()] == ["tests/gpu"]
    assert not begun and not ours.runs, "the section had them, and ended them"
    for tests, follows in ((Tests(True), False), (Tests(False), True)):
        device_tests.leave(tests, follows)
        assert not tests.runs
    assert list(device_tests.cases()) and begun == [device_tests.OUTCOMES], "what has failed is run again"


@pytest.mark.parametrize(("names", "follows"), [
    (("bits", "device_tests"), True), (("bits", "limits", "device_tests"), False), (("device_tests",), False),
])  # fmt: skip
def test_tests_go_on_only_into_the_next_section(
    names: tuple[str, ...], follows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is timed between them would be disturbed."""
    found: list[bool] = []
    monkeypatch.setattr(device_tests, "FOLLOWS", None)
    monkeypatch.setattr(check, "machine", lambda: {})
    monkeypatch.setattr(check, "cases_of", lambda name: section(name).cases)
    monkeypatch.setattr(check, "run", lambda *given: found.append(device_tests.FOLLOWS))
    (tmp_path / "found.json").write_text('{"cases": []}')
    check.here(dict.fromkeys(names, 1.0), 1.0, tmp_path / "found.json")
    assert found == [follows]


@pytest.mark.matrix
def test_a_test_that_ends_its_process_costs_itself_alone(tmp_path: Path) -> None:
    """One that crashes, one that hangs, one that loses the device: those behind them run in other processes."""
    folder, file = tmp_path / "gpu", tmp_path / "outcomes"
    folder.mkdir()
    (folder / "conftest.py").write_text("from tools.gpu import pytest_outcomes\npytest_outcomes.SECONDS = 0.5\n")
    (folder / "test_ends.py").write_text(
        "import ctypes, time\nfrom tools.gpu import pytest_outcomes\n"
        "def test_one(): ctypes.string_at(0)\n"
        "def test_two(): time.sleep(60)\n"
        "def test_three(monkeypatch):\n"
        "    pytest_outcomes._lost = lambda: True\n"
        "    raise RuntimeError('an illegal memory access')\n"
        "def test_four(): pass\n"
    )
    tests = device_tests.DeviceTests(file, str(folder), at_once=1)
    try:
        with pytest.raises(RuntimeError, match=r"1 failed, 1 passed, 2 unended: .*test_one, .*test_two"):
            tests.result(60.0)
    finally:
        tests.stop()
    told = outcomes.failures_beside(file).read_text()
    assert "an illegal memory access" in told and "Timeout" in told


def test_without_a_device_nothing_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The result is there before the device is asked, and says so; what an earlier one has is not lost."""

    def no_device() -> str:
        told = json.loads(file.read_text())
        assert told["under"] == ["check", "begin"] and told["machine"] == {} and len(told["cases"]) == 1
        return "no CUDA device"

    monkeypatch.setattr(check, "no_device", no_device)
    monkeypatch.setattr(check, "machine", lambda: {"gpu": ""})
    monkeypatch.setattr(check, "run", lambda *args: pytest.fail("a section began"))
    monkeypatch.setattr(device_tests, "OUTCOMES", tmp_path / "outcomes")
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"cases": [{"section": "limits", "case": "limits", "status": "measured"}]}))
    assert check.main(["--json", str(file), "--skip-passed", str(file)]) == 1
    assert capsys.readouterr().err == "gpu-check: no CUDA device; nothing was checked\n"
    found = json.loads(file.read_text())
    assert found["under"] is None and found["machine"] == {"gpu": ""}
    assert [(case["section"], case["status"]) for case in found["cases"]] == [
        ("limits", "measured"), ("check", "failed: no CUDA device"),
    ]  # fmt: skip


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = check.find_spec
    monkeypatch.setattr(check, "find_spec", lambda name: None if name in ("msgspec", "xxhash") else find(name))
    assert check.no_device() == "python has no msgspec, xxhash: install what is missing"


def test_what_names_missing_packages_needs_none_of_them(tmp_path: Path) -> None:
    """The result is written, too."""
    bare = "import sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(','))); "
    bare += "from tools.gpu import check; sys.exit(check.main(sys.argv[1:]))"
    command = [sys.executable, "-c", bare, ",".join(check.NEEDED), "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    told = f"python has no {', '.join(check.NEEDED)}: install what is missing"
    assert done.returncode == 1 and done.stderr == f"gpu-check: {told}; nothing was checked\n"
    (case,) = json.loads((tmp_path / "found.json").read_text())["cases"]
    assert case["status"] == f"failed: {told}"


def test_a_machine_that_cannot_be_told_costs_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> str:
        raise check.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(check.metadata, "version", broken)
    monkeypatch.setitem(sys.modules, "torch", None)
    found = check.machine.__wrapped__()
    assert found["triton"] == found["torch"] == "" and found["gpu"].startswith("unknown: ")


@pytest.mark.parametrize("text", [None, '{"cases": [', "[]", "{}", '{"cases": ["limits"]}'])
def test_an_earlier_result_that_cannot_be_read_ends_nothing(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "earlier.json"
    if text is not None:
        file.write_text(text)
    assert check._earlier(file) == check._earlier(None) == {"cases": []}
    assert f"nothing is skipped: {file}: " in capsys.readouterr().err


def test_processes_that_end_as_they_begin_are_not_started_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "COMMAND", (sys.executable, "-c", "raise SystemExit(7)"))
    monkeypatch.setattr(check, "machine", lambda: {})
    monkeypatch.setattr(device_tests, "OUTCOMES", tmp_path / "outcomes")
    report = check.supervised(["limits", "bits"], 60.0, tmp_path / "found.json", runner.Report())
    assert [(case["section"], case["case"], case["status"]) for case in report.cases] == [
        ("limits", "section", "failed: its process ended (status 7)"),
        ("limits", "process", "failed: another process ended as it began (status 7)"),
    ]  # fmt: skip
    assert len(json.loads((tmp_path / "found.json").read_text())["cases"]) == 2


STARTER = """
import sys
from tools.gpu import check
check.end_by_signal()
check._run_to_its_end([sys.executable, "-c", sys.argv[1]], float("inf"))
"""
STARTED = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getsid(0), flush=True)
time.sleep(600)
"""


def test_a_check_that_is_ended_leaves_no_process(tmp_path: Path) -> None:
    """By SIGTERM, as `timeout` does it; and all are of one session, so who ends that misses none."""
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER, STARTED], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) == os.getsid(0)
    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate(timeout=60)  # to the end of what anyone that is left may write
    assert told == "" and process.returncode == 128 + signal.SIGTERM


def test_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check.main(["--only", "bits,speed"])
    assert "--only 'speed': no such section; there are limits, bits" in capsys.readouterr().err


def test_sections_end_within_nine_minutes() -> None:
    """What starts at the last second of its section's time is interrupted at the end of all."""
    assert check.SECONDS <= 9 * 60 - 30
    assert sum(check.SECTIONS.values()) <= 9 * 60
    folder = Path(check.__file__).parent
    assert all((folder / f"{name}.py").is_file() for name in check.SECTIONS)
    tests = folder.parent.parent / "tests" / "gpu"
    assert all((tests / name).is_file() for name in (*pytest_outcomes.FIRST, *pytest_outcomes.ENDED))


def test_make_runs_it() -> None:
    """`make gpu-check` is this program, whose status is make's."""
    text = (Path(__file__).parents[2] / "Makefile").read_text()
    recipe = text.split("\ngpu-check:")[1].split("\n\n")[0].splitlines()[1:]
    assert recipe == ["\t@$(BIN)/python -m tools.gpu.check --json build/gpu-check.json"]


def test_a_result_as_tables() -> None:
    """Figures that one row lacks leave its cell empty; what was not measured is named."""
    other = Row("another", {"ours_ms": 3.0, "sweep": {1: 2}})
    report = runner.run([section("one", lambda: ROW, lambda: other, leave_out)], 60)
    machine = {"gpu": "H100", "torch": "2.11", "triton": "3.6"}
    text = tables.markdown({"date": "2026-11-26T07:00", "machine": machine, "cases": report.cases})
    assert text.splitlines() == [
        "2026-11-26, H100, torch 2.11, Triton 3.6:", "", "**one**", "",
        "| | ours ms | of best | goals |", "|---|---:|---:|---|",
        "| a row | 2 | 0.7 | of_best 0.7 >= 0.65 met; of_best 0.7 >= 0.9 short |",
        "| another | 3 |  |  |", "case 2: left out: no memory.",
    ]  # fmt: skip
