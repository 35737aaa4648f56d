"""What a benchmark is: a dataclass whose fields are its options and whose `cases` measures.

bench/registry.py lists them; cli/bench.py makes a command of each. `headrace bench --help` imports all their files, so
these import what measures (torch, engines) inside `cases`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

Case = dict[str, Any]
"""One line of a result: names to numbers and strings."""

MODELS_FLAGS = ("-m", "--model", "--models")
"""Of a list of models; the field `model` alone is given first or by -m (cli/bench.py)."""
MODEL_HELP = "Model folder, 'tiny', or a shape with random weights: S1, S2, S3."


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

    machine: figures of the machine, measured in the same run, for the result; cases() fills it.
    """

    name: ClassVar[str]
    machine: dict[str, Any] = field(default_factory=dict, init=False)

    def cases(self) -> Iterator[Case]:
        """Measures, case by case. Raises ValueError for options that cannot be, RuntimeError for a failure."""
        raise NotImplementedError

    def line(self, case: Case) -> str:
        """A case for people."""
        return flat(case)

    def finish(self, done: list[Case]) -> None:
        """Prints or draws what sums all cases up, once they are measured and written."""


def flat(case: Case) -> str:
    return "  ".join(f"{name} {value}" for name, value in case.items() if value is not None)


def integers(name: str, text: str) -> tuple[int, ...]:
    """Integers by commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} must be integers by commas, got {text!r}") from None


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
