"""Processes of `make gpu-check`: those behind what ends one, those that share tests/gpu; none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu import check, device_tests, outcomes, pytest_outcomes, runner
from tools.gpu.runner import Row

ROW = Row("a row", {})

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
    monkeypatch.setattr(check, "cases_of", lambda name: lambda: iter(()))
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
