"""What a benchmark is: a dataclass whose fields are its options and whose `cases` measures.

bench/registry.py lists them; cli/bench.py makes a command of each. `headrace bench --help` imports all their files, so
these import what measures (torch, engines) inside `cases`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from headrace.bench.table import Case as Case
from headrace.bench.table import Column
from headrace.config.sizes import parse_size
from headrace.console import Counting, counting
from headrace.engine.folders import model_folder

MODELS_FLAGS = ("-m", "--model", "--models")
"""Of a list of models; the field `model` alone is given first or by -m (cli/bench.py)."""
MODEL_HELP = "Model folder, 'tiny', or a shape with random weights: S1 to S5 (S4 with experts, S5 a hybrid)."


@dataclass(frozen=True, slots=True)
class BenchOption:
    """How a field is given on the command line: what typer.Option takes. parse(name, text) makes the field's value of
    the text and raises ValueError naming the option. rare: only --help-all shows it."""

    help: str
    default: Any = MISSING
    parse: Callable[[str, str], Any] | None = None
    flags: tuple[str, ...] = ()
    argument: bool = False
    min: float | None = None
    envvar: str | None = None
    rare: bool = False


def option(help: str, default: Any = MISSING, **more: Any) -> Any:
    """A field that is an option (BenchOption). default: as on the command line; without one it must be given."""
    made = BenchOption(help, default, **more)
    value = default if made.parse is None or default is MISSING else made.parse("", default)
    return field(default=value, metadata={"option": made})


def options_of(kind: type) -> dict[str, BenchOption]:
    """A dataclass's options by field."""
    return {item.name: item.metadata["option"] for item in fields(kind) if "option" in item.metadata}


@dataclass(kw_only=True)
class Benchmark:
    """`headrace bench NAME`; the subclass's docstring is its help.

    machine: figures of the machine, measured in the same run, for the result; cases() fills it. progress: whoever runs
    the benchmark sets it; cases() calls it with the name of each step as it begins.
    """

    name: ClassVar[str]
    machine: dict[str, Any] = field(default_factory=dict, init=False)
    progress: CaseProgress = field(default_factory=lambda: CaseProgress(), init=False, repr=False)

    def cases(self) -> Iterator[Case]:
        """Measures, case by case. Raises ValueError for options that cannot be, RuntimeError for a failure."""
        raise NotImplementedError

    def case_count(self) -> int | None:
        """How often `progress` is called, as far as is known before."""
        return None

    def columns(self) -> tuple[Column, ...] | None:
        """Columns of the table; () for no table. None: those of the first case."""
        return None

    def quick_lengths(self) -> dict[int, int]:
        """Of a quick run the usual lengths, in tokens, and those in their place; empty for any other run."""
        return {}

    def finish(self, done: list[Case]) -> None:
        """Prints or draws what sums all cases up, once they are measured and written."""


class CaseProgress:
    """What is measured now, on stderr: begins with the first call, ends with the block that it is given to.

    Without a block, as where cases() is called by itself, it is silent.
    """

    def __init__(self, stack: ExitStack | None = None, steps: int | None = None) -> None:
        self._stack, self.steps = stack, steps
        self._counting: Counting | None = None

    def __call__(self, name: str) -> None:
        if self._stack is not None:
            if self._counting is None:
                self._counting = self._stack.enter_context(counting("case", self.steps))
            self._counting(name)

    def detail(self, text: str) -> None:
        """What the case under way is at: 'run 3 of 5'."""
        if self._counting is not None:
            self._counting.detail(text)

    def hidden(self) -> AbstractContextManager[None]:
        """Holds the line back, so that something else can be printed."""
        return nullcontext() if self._counting is None else self._counting.hidden()


def token_counts(name: str, text: str) -> tuple[int, ...]:
    """Token counts by commas, as 1024,128k."""
    return tuple(int(parse_size(name, part, "tokens")) for part in text.split(","))


def token_count(name: str, text: str | int) -> int:
    """One of them."""
    return int(parse_size(name, str(text), "tokens"))


def integers(name: str, text: str) -> tuple[int, ...]:
    """Integers by commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} must be integers by commas, got {text!r}") from None


def shares(name: str, text: str) -> tuple[float, ...]:
    """Numbers between 0 and 1 by commas; none: ()."""
    try:
        found = tuple(float(part) for part in text.split(",") if part)
    except ValueError:
        found = (-1.0,)
    if not all(0 <= each <= 1 for each in found):
        raise ValueError(f"{name} must be numbers from 0 to 1 by commas, got {text!r}")
    return found


def a_model(name: str, text: str) -> str:
    """A folder that there is, or a shape's name."""
    if not re.fullmatch(r"S\d+", text):
        model_folder(text)
    return text


def words(name: str, text: str) -> tuple[str, ...]:
    """Words by commas."""
    return tuple(text.split(","))


def one_of(*known: str) -> Callable[[str, str], str]:
    """Parses one of these words."""

    def parse(name: str, text: str) -> str:
        if text not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {text!r}")
        return text

    return parse
