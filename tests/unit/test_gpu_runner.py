"""The runner of `make gpu-check`: time, failures, what is left out, the table; its sections measure nothing."""

from __future__ import annotations

import json
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

from tools.gpu import check, device_tests, pytest_outcomes, runner, tables
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
