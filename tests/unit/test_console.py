"""Progress on stderr: what a terminal, a pipe and a dumb terminal get, on a clock of the test's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from io import StringIO
from itertools import pairwise

import pytest
from rich.console import Console

from headrace import console
from headrace.cli.doctor import rows_of
from headrace.console import (
    Counting,
    ProgressLine,
    Trimmed,
    WordWrapConsole,
    changes_in_place,
    counting,
    loading,
    working,
)
from headrace.progress import LoadPhase

pytestmark = pytest.mark.unit


class Seconds:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Seconds:
    return Seconds()


@pytest.fixture(autouse=True)
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are brought up to date by the tests alone."""
    monkeypatch.setattr(console.ProgressLine, "_run", lambda self: None)


def pipe(width: int = 80) -> Console:
    return Console(file=StringIO(), width=width, highlight=False, soft_wrap=True)


def terminal(width: int = 80, *, colours: bool = True) -> Console:
    return Console(file=StringIO(), width=width, highlight=False, soft_wrap=True, force_terminal=True,
                   no_color=not colours, color_system="standard", _environ={"TERM": "xterm"})  # fmt: skip


def printed(to: Console) -> str:
    assert isinstance(to.file, StringIO)
    return to.file.getvalue()


CASE = "case 3 of 12: W3_8192 headrace, 41 s, about 2 min left"
READING = "reading 2,048 of 5,957 tokens (1,024 cached), 1,570/s, 2 s left"
MANY = "3 of 20 prompts, input 5,230/s, output 122/s, 94 % cached, reading 2,048 of 5,957 tokens, 1,570/s, 2 s left"


def drawn(text: str, width: int, share: float | None) -> str:
    """The line as a terminal of this width shows it, with NO_COLOR."""
    screen = Console(file=StringIO(), width=width, force_terminal=True, _environ={"NO_COLOR": "1", "TERM": "xterm"})
    screen.print(ProgressLine(str, console=screen).render(text, share))
    return printed(screen).rstrip()


@pytest.fixture
def counted(clock: Seconds) -> Iterator[Counting]:
    with counting("case", 12, console=pipe(), clock=clock) as begin:
        yield begin


def test_cases_on_a_pipe(counted: Counting, clock: Seconds) -> None:
    for name, seconds in (("W1_2048 headrace", 2), ("W2 headrace", 18.5), ("W3_8192 headrace", 20.5), ("W4", 1)):
        counted(name)
        clock.sleep(seconds)
        counted.line.tick()
    assert printed(counted.line._console) == (
        "case 2 of 12: W2 headrace, 20 s, about 20 s left\ncase 3 of 12: W3_8192 headrace, 41 s, about 2 min left\n"
    )


def test_a_long_case_is_told_ever_more_rarely(counted: Counting, clock: Seconds) -> None:
    counted("one")
    counted.detail("run 2 of 5")
    for _ in range(100):
        clock.sleep(1)
        counted.line.tick()
    told = printed(counted.line._console).splitlines()
    assert told[:2] == ["case 1 of 12: one, run 2 of 5, 4 s", "case 1 of 12: one, run 2 of 5, 8 s"]
    seconds = [int(line.split()[-2]) for line in told]
    gaps = [b - a for a, b in pairwise(seconds)]
    assert gaps == sorted(gaps) and gaps[-1] > 8


def test_cases_of_an_unknown_number(clock: Seconds) -> None:
    counted = Counting("point", None, console=pipe(), clock=clock)
    assert counted.text() == ""
    counted()
    counted()
    clock.sleep(3)
    assert (counted.text(), counted.share()) == ("point 2: 3 s", None)


def test_what_is_left_never_runs_below_the_cases_to_come(counted: Counting, clock: Seconds) -> None:
    counted("a")
    clock.sleep(10)
    counted("b")
    clock.sleep(600)
    assert counted.text() == "case 2 of 12: b, 10 min, about 2 min left"
    for _ in range(10):
        counted("c")
    assert counted.text().endswith("about 55 s left"), "the last case takes as long as the others took"


@pytest.mark.parametrize(
    ("text", "width", "share", "expected"),
    [
        (CASE, 120, 1.0, f"━━━━━━━━━━━━━━━━━━━━ {CASE}"),
        (CASE, 80, 0.5, f"━━━━━━━━━━           {CASE}"),
        (CASE, 70, 0.5, f"━━━━━      {CASE}"),
        (CASE, 50, 0.5, "case 3 of 12: W3_8192 headrace, 41 s, about 2 min…"),
        (READING, 120, 0.4, f"━━━━━━━━             {READING}"),
        (READING, 80, 0.4, f"━━━━       {READING}"),
        (READING, 80, None, READING),
        (MANY, 120, 0.5, f"━━━━━      {MANY}"),
        (MANY, 80, 0.5, "3 of 20 prompts, input 5,230/s, output 122/s, 94 % cached, reading 2,048 of 5,9…"),
    ],
    ids=lambda given: "" if isinstance(given, str) else str(given),
)
def test_a_line_fits_the_terminal(text: str, width: int, share: float | None, expected: str) -> None:
    assert drawn(text, width, share) == expected


def test_a_terminal_shows_one_line_that_vanishes(clock: Seconds) -> None:
    screen = terminal(colours=False)
    with loading("S1", console=screen, clock=clock) as progress:
        progress(LoadPhase("weights", 2**29, 2**31))
        clock.sleep(1.5)
        progress.line.tick()
    shown = printed(screen)
    assert "loading S1: weights 0.5 of 2.0 GiB, 2 s" in shown and "━━━━━" in shown
    assert "\x1b[3" not in shown and "\x1b[9" not in shown, "no colours"
    assert shown.endswith("\x1b[2K"), "the line is erased at the end"


def test_loading_on_a_pipe_tells_slow_phases(clock: Seconds) -> None:
    to = pipe()
    with loading("S1", console=to, clock=clock) as progress:
        for phase, seconds in (
            (LoadPhase("starting the engine"), 1.3),
            (LoadPhase("weights", 1 << 30, 3 << 30), 2.0),
            (LoadPhase("weights", 3 << 30, 3 << 30), 0.4),
            (LoadPhase("packing"), 0.9),
            (LoadPhase("memory for the KV cache"), 1.1),
        ):
            progress(phase)
            clock.sleep(seconds)
    assert printed(to) == "starting the engine: 1.3 s\nweights: 3.0 GiB in 2.4 s\nmemory for the KV cache: 1.1 s\n"


def test_print_between(clock: Seconds) -> None:
    """Whoever holds the line back finds a clean terminal."""
    screen = terminal()
    with ProgressLine(lambda: "asking", after_s=0, console=screen, clock=clock) as line:
        line.tick()
        with line.hidden():
            assert printed(screen).endswith("\x1b[2K")
            screen.print("an answer")
        before = len(printed(screen))
        line.tick()
        assert "asking" in printed(screen)[before:]


def test_of_lines_within_one_another_the_outer_one_is_shown(clock: Seconds) -> None:
    """A benchmark that loads an engine: two lines at once would garble the terminal."""
    screen = terminal()
    with ProgressLine(lambda: "case 1 of 2", after_s=0, console=screen, clock=clock) as outer:
        outer.tick()
        with loading("tiny", console=screen, clock=clock) as inner:
            inner(LoadPhase("packing"))
            clock.sleep(9)
            inner.line.tick()
            assert "packing" not in printed(screen)
            inner.line.say("a line that stays")
            shown = printed(screen)
            assert shown.index("case 1 of 2") < shown.index("\x1b[2K") < shown.index("a line that stays")
        before = len(printed(screen))
        outer.tick()
        assert "case 1 of 2" in printed(screen)[before:]
    assert not ProgressLine.open


def test_nothing_is_drawn_twice(clock: Seconds) -> None:
    screen = terminal()
    with ProgressLine(lambda: "asking", after_s=0, console=screen, clock=clock) as line:
        line.tick()
        before = printed(screen)
        line.tick()
        assert printed(screen) == before


def test_where_lines_can_change(monkeypatch: pytest.MonkeyPatch) -> None:
    assert changes_in_place(terminal())
    assert not changes_in_place(pipe())
    assert not changes_in_place(Console(file=StringIO(), force_terminal=True, _environ={"TERM": "dumb"}))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(console, "err", Console(stderr=True))
    monkeypatch.setattr("sys.stderr", StringIO())
    assert console.err.is_terminal and not changes_in_place(), "a pipe stays one, coloured or not"


def test_working_and_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends with the line."""
    monkeypatch.undo()
    to = pipe()
    monkeypatch.setattr(console, "err", to)
    with working("measuring the machine"):
        assert "headrace-progress" in {thread.name for thread in threading.enumerate()}
    assert "headrace-progress" not in {thread.name for thread in threading.enumerate()}
    assert printed(to) == "measuring the machine\n"


@pytest.mark.parametrize("columns", ["0", "1"])
def test_no_width_swallows_what_is_printed(columns: str) -> None:
    to = WordWrapConsole(file=StringIO(), _environ={"COLUMNS": columns})
    to.print("headrace: no such model")
    to.print(Trimmed(rows_of([("the key", "hr-1234567890")])))
    assert printed(to).splitlines()[0] == "headrace: no such model"
    assert "".join(printed(to).split()).endswith("thekeyhr-1234567890")
