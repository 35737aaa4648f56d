"""Terminal output: answers and results on stdout, everything else on stderr.

Progress is one line on stderr that changes in place on a terminal and vanishes at the end; elsewhere (a pipe, a file, a
dumb terminal) it is a plain line now and then, the rarer the longer the work takes. Which of these to use:

    working("measuring the machine")       something takes a while and has no measure
    counting("case", 12)                   so many cases, one after the other (benchmarks)
    telling()                              the caller finds the words
    loading("tiny")                        an engine loads: the callback for AsyncLLM.start(phases=...), loader.load
    ProgressLine(tell, share)              all others are made of it

Rich decides on width, colours and NO_COLOR.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rich.console import Console, ConsoleDimensions
from rich.segment import Segment

from headrace.progress import LoadPhase, PhaseTime, PhaseTimes, duration

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, RenderableType, RenderResult


LEAST_WIDTH = 20


class WordWrapConsole(Console):
    """Text breaks between words on a terminal. Elsewhere a line stays a line, whatever the width."""

    @property
    def soft_wrap(self) -> bool:
        return not self.is_terminal

    @soft_wrap.setter
    def soft_wrap(self, _: bool) -> None:
        """What Console sets when it is made."""

    @property
    def size(self) -> ConsoleDimensions:
        """At least LEAST_WIDTH wide: into no columns at all (COLUMNS=0, as some editors and jobs have it) nothing would
        be printed, neither results nor errors."""
        width, height = super().size
        return ConsoleDimensions(max(LEAST_WIDTH, width), height)

    @size.setter
    def size(self, new: tuple[int, int]) -> None:
        Console.size.fset(self, new)  # type: ignore[attr-defined]

    def on_broken_pipe(self) -> None:
        """The reader is gone. Work goes on without its progress; without anybody for its results it ends
        (cli.errors)."""
        if not self.stderr:
            raise  # Console calls this while it handles the error
        self.quiet = True


out = WordWrapConsole(highlight=False)
err = WordWrapConsole(stderr=True, highlight=False)

Clock = Callable[[], float]

EVERY_S = 4.0
"""Seconds between two plain lines at least; work that takes long says so ever more rarely (_due_s)."""

TICK_S = 0.2

BARS = (20, 10)
"""Widths of a bar, the first that leaves the sentence whole; no bar if none does."""


def changes_in_place(console: Console | None = None) -> bool:
    """Whether lines can be rewritten: a terminal, and not a dumb one. FORCE_COLOR makes no terminal of a pipe."""
    console = console or err
    if console.file is sys.stderr and not sys.stderr.isatty():
        return False
    return console.is_terminal and not console.is_dumb_terminal


class Trimmed:
    """Another renderable without blanks at the ends of lines, which tables leave there. width: if not the console's."""

    def __init__(self, inner: RenderableType, width: int | None = None) -> None:
        self.inner, self.width = inner, width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.width is not None:
            options = options.update(width=self.width)
        for line in console.render_lines(self.inner, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                last = line.pop()
                yield from line
                yield Segment(last.text.rstrip(), last.style)
            yield Segment.line()


class ProgressLine:
    """Shows a sentence for as long as the context lasts.

        with ProgressLine(lambda: f"asked {done} of {total}", lambda: done / total):
            ...

    tell() gives the sentence, '' for nothing; share() how much is done, 0 to 1, for a bar, or None. Both are called on
    another thread and must be quick. The line appears after `after_s`. Whoever prints to stdout meanwhile does it in
    `with line.hidden():`; lines for stderr go through `line.say`. Of lines within one another the outer one is shown.
    """

    open: ClassVar[list[ProgressLine]] = []

    def __init__(
        self,
        tell: Callable[[], str],
        share: Callable[[], float | None] = lambda: None,
        *,
        after_s: float = EVERY_S,
        console: Console | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._tell, self._share, self._after_s = tell, share, after_s
        self._console, self._clock = console or err, clock
        self.in_place = changes_in_place(self._console)
        self._began = self._said = clock()
        self._spoke = False
        self._live: Any = None
        self._shown: tuple[str, float | None] = ("", None)
        self._lock = threading.RLock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._outer: ProgressLine | None = None

    def __enter__(self) -> Self:
        self._outer = next((line for line in self.open if line._console is self._console), None)
        self.open.append(self)
        self._thread = threading.Thread(target=self._run, name="headrace-progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes the line away for good. May be called again."""
        if self._end.is_set():
            return
        self._end.set()
        with self._lock:
            self._erase()
        if self in self.open:
            self.open.remove(self)
        if self._thread is not None:
            self._thread.join()

    def tick(self) -> None:
        """Brings the line up to date. The line's own thread does it, several times a second."""
        with self._lock:
            if self._end.is_set() or self._outer is not None:
                return
            told = self._tell()
            if self.in_place:
                self._change(told)
            elif told and self._due():
                self.say(told)

    def say(self, text: str, style: str = "dim") -> None:
        """Prints a line on stderr that stays."""
        with self.hidden():
            self._console.print(text, style=style, markup=False)
            self._said, self._spoke = self._clock(), True

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Holds the line back, so that something else can be printed."""
        if self._outer is not None:
            with self._outer.hidden():
                yield
            return
        with self._lock:
            self._erase()
            yield

    def _run(self) -> None:
        while not self._end.wait(TICK_S):
            self.tick()

    def _due(self) -> bool:
        now = self._clock()
        if not self._spoke:
            return now - self._began >= self._after_s
        return now - self._said >= _due_s(now - self._began)

    def _change(self, told: str) -> None:
        share = self._share()
        if self._live is not None and (told, share) == self._shown:
            return  # to draw costs a millisecond that a benchmark in this process would rather have
        if not told or self._clock() - self._began < min(self._after_s, 0.3):
            self._erase()
            return
        if self._live is None:
            from rich.live import Live

            self._live = Live(console=self._console, transient=True, auto_refresh=False,
                              redirect_stdout=False, redirect_stderr=False)  # fmt: skip
            self._live.start()
        self._shown = told, share
        self._live.update(self.render(told, share), refresh=True)

    def render(self, told: str, share: float | None) -> RenderableType:
        """The line as a terminal shows it."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        text = Text(told, no_wrap=True, overflow="ellipsis", end="")
        room = self._console.width - len(told) - 1
        width = next((width for width in BARS if width <= room), 0)
        bars = [ProgressBar(total=1.0, completed=share, width=width)] if width and share is not None else []
        row = Table.grid(padding=(0, 1))
        row.add_row(*bars, text)
        return row

    def _erase(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with suppress(BrokenPipeError):
                live.stop()


def _due_s(elapsed: float) -> float:
    """Seconds between two plain lines, after so long."""
    return max(EVERY_S, elapsed / 8)


@contextmanager
def working(what: str, every_s: float = EVERY_S) -> Iterator[None]:
    """Says that something takes a while: a line with the seconds on a terminal, elsewhere 'what' and now and then
    'what: 12 s'."""
    began = time.monotonic()

    def tell() -> str:
        return f"{what}: {duration(time.monotonic() - began)}"

    with ProgressLine(tell, after_s=every_s) as line:
        if not line.in_place:
            line.say(what)
        yield


class Counting:
    """Cases that are worked off one after the other. Call it with the name of each as it begins:

        with counting("case", len(cases)) as begin:
            for case in cases:
                begin(case.name)
                ...

    On a terminal a bar, elsewhere a line every few seconds, ever more rarely: 'case 3 of 12: W3_8192 headrace, 41 s,
    about 2 min left'. The seconds are those since the first case; what is left is judged by the cases so far, and not
    told during the first. total: None where nobody knows it; it may be set later. `detail` adds what a long case is at
    ('run 3 of 5'). `hidden` and `say` are those of ProgressLine.
    """

    def __init__(self, what: str, total: int | None, *, console: Console | None = None, clock: Clock = time.monotonic):
        self.what, self.total = what, total
        self._clock, self._began = clock, clock()
        self._number, self._since, self._name, self._detail = 0, self._began, "", ""
        self.line = ProgressLine(self.text, self.share, console=console, clock=clock)
        self.hidden, self.say = self.line.hidden, self.line.say

    def __call__(self, name: str = "") -> None:
        """The next case begins."""
        self._number += 1
        self._name, self._detail, self._since = name, "", self._clock()
        if not self.line.in_place:
            self.line.tick()

    def detail(self, text: str) -> None:
        """What the case under way is at."""
        self._detail = text

    def share(self) -> float | None:
        """Of the cases, 0 to 1; None where their number is unknown."""
        return min(1.0, max(0, self._number - 1) / self.total) if self.total else None

    def text(self) -> str:
        """'case 3 of 12: W3_8192 headrace, 41 s, about 2 min left'; '' before the first."""
        if not self._number:
            return ""
        of = f" of {self.total}" if self.total else ""
        parts = [part for part in (self._name, self._detail) if part]
        parts.append(duration(self._clock() - self._began))
        left = self._left_s()
        if left is not None:
            parts.append(f"about {duration(left)} left")
        return f"{self.what} {self._number}{of}: {', '.join(parts)}"

    def _left_s(self) -> float | None:
        """The cases to come take as long as those so far took on average."""
        done = self._number - 1
        if not done or not self.total or done >= self.total:
            return None
        each = (self._since - self._began) / done
        left = (self.total - done) * each - (self._clock() - self._since)
        return max(left, (self.total - done - 1) * each, 1.0)


@contextmanager
def counting(
    what: str, total: int | None = None, *, console: Console | None = None, clock: Clock = time.monotonic
) -> Iterator[Counting]:
    """Progress of a benchmark, or of anything that comes in cases: see Counting."""
    counted = Counting(what, total, console=console, clock=clock)
    with counted.line:
        yield counted


SLOW_PHASE_S = 1.0
"""A phase of loading that takes longer is told where lines cannot change."""


class Loading:
    """An OnPhase that shows the phases of loading: see `loading`. Of a folder the last part of its name is shown."""

    def __init__(self, model: str, *, console: Console | None = None, clock: Clock = time.monotonic) -> None:
        self.model = Path(model).name or model
        self.times = PhaseTimes(self._ended, clock)
        self.line = ProgressLine(self.text, self.share, console=console, clock=clock)

    def __call__(self, phase: LoadPhase) -> None:
        self.times(phase)

    def text(self) -> str:
        """'loading S1: weights 1.2 of 3.1 GiB, 2 s'."""
        now = self.times.now
        return f"loading {self.model}: {now.text}, {duration(self.times.seconds)}" if now else ""

    def share(self) -> float | None:
        """Of the weights, 0 to 1; None in other phases."""
        now = self.times.now
        return now.share if now else None

    def _ended(self, phase: PhaseTime) -> None:
        if not self.line.in_place and phase.seconds > SLOW_PHASE_S:
            self.line.say(phase.text)


@contextmanager
def loading(model: str, *, console: Console | None = None, clock: Clock = time.monotonic) -> Iterator[Loading]:
    """Progress of loading; gives the callback for AsyncLLM.start(phases=...) and loader.load.

    On a terminal a line with the phase and its seconds, with a bar for the weights. Elsewhere a line for each phase
    that took more than a second: 'weights: 3.1 GiB in 2.4 s'.
    """
    shown = Loading(model, console=console, clock=clock)
    with shown.line:
        yield shown
        shown.times.close()


@contextmanager
def telling() -> Iterator[Callable[[str], None]]:
    """Gives a function that says what is being done: a line that changes on a terminal, lines elsewhere."""
    told, began = "", time.monotonic()

    def say(text: str) -> None:
        nonlocal told
        told = text
        if not line.in_place:
            line.say(text)

    line = ProgressLine(lambda: told and f"{told}, {duration(time.monotonic() - began)}" if line.in_place else "")
    with line:
        yield say
