"""One table for all benchmarks: heads with units, numbers to the right, limits and goals beside what they are for.

Rows are printed as they come, at widths that the columns declare, so that a pipe and a terminal show the same. On a
terminal that is too narrow, columns that are `optional` are left out, the last ones first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.console import Trimmed

Case = dict[str, Any]
"""One line of a result: names to numbers and strings."""

GAP = 2
NUMBER_WIDTH = 8
NONE = "-"

Value = str | float | Callable[[Case], Any] | None
"""A name of the case, a number, or what makes one of the case."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its head, and under it its unit. value: by default what the case has under the head's name.

    form: as format() takes it; empty for text, which goes to the left. scale: what numbers are multiplied by, the limit
    too. limit: what the value should be, shown beside it with 'ok' or 'short' at the row's end; bound: whether the
    value may be that at most, or must be that at least. width: of texts.
    """

    head: str
    value: Value = None
    unit: str = ""
    form: str = ""
    scale: float = 1
    limit: Value = None
    bound: Literal["at most", "at least"] = "at least"
    width: int = 0
    optional: bool = False

    def of(self, case: Case, value: Value) -> Any:
        """The value, or the limit, of a case; None if it has none."""
        if isinstance(value, str):
            return case.get(value)
        return value(case) if callable(value) else value

    def found(self, case: Case) -> Any:
        return self.of(case, self.head if self.value is None else self.value)

    def text(self, case: Case) -> str:
        return self._text(self.found(case))

    def limit_text(self, case: Case) -> str:
        limit = self.of(case, self.limit)
        return "" if limit is None else f"{'<=' if self.bound == 'at most' else '>='} {self._text(limit)}"

    def kept(self, case: Case) -> bool | None:
        """Whether the value keeps its limit; None where there is none, or nothing was measured."""
        value, limit = self.found(case), self.of(case, self.limit)
        if value is None or limit is None:
            return None
        return bool(value <= limit if self.bound == "at most" else value >= limit)

    def _text(self, value: Any) -> str:
        if value is None:
            return NONE
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, str) or not self.form:
            return str(value)
        return format(value * self.scale if self.scale != 1 else value, self.form)

    @property
    def room(self) -> int:
        return max(len(self.head), len(self.unit), self.width, NUMBER_WIDTH if self.form and not self.width else 0)


class CaseTable:
    """Prints cases under these columns: head() once, then row() for each."""

    def __init__(self, columns: Sequence[Column], console: Console) -> None:
        self.console = console
        self.columns = _fitting(list(columns), console.width if console.is_terminal else None)
        self.limited = any(column.limit is not None for column in self.columns)

    @property
    def width(self) -> int:
        return _width(self.columns)

    def head(self) -> None:
        cells = [(Text(c.head), Text("limit") if c.limit is not None else None) for c in self.columns]
        self._print(cells, Text(""), "bold")
        units = [(Text(c.unit), Text("") if c.limit is not None else None) for c in self.columns]
        if any(unit.plain for unit, _ in units):
            self._print(units, Text(""), "dim")

    def row(self, case: Case) -> None:
        cells = [(Text(c.text(case)), Text(c.limit_text(case)) if c.limit is not None else None) for c in self.columns]
        self._print(cells, _verdict([column.kept(case) for column in self.columns]), "")

    def _print(self, cells: Iterable[tuple[Text, Text | None]], verdict: Text, style: str) -> None:
        table = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
        row: list[Text] = []
        for column, (value, limit) in zip(self.columns, cells, strict=True):
            justify: Literal["left", "right"] = "right" if column.form else "left"
            room = max(column.room, len(value.plain) if not self.console.is_terminal else 0)
            table.add_column(width=room, justify=justify, overflow="fold")
            row.append(value)
            if limit is not None:
                table.add_column(width=column.room + 3, justify="right")
                row.append(limit)
        if self.limited:
            table.add_column(width=len("short"))
            row.append(verdict)
        for text in row:
            text.stylize(style)
        table.add_row(*row)
        self.console.print(Trimmed(table, None if self.console.is_terminal else 10_000), end="")


def show(columns: Sequence[Column], cases: Iterable[Case], console: Console) -> None:
    """A whole table at once."""
    table = CaseTable(columns, console)
    table.head()
    for case in cases:
        table.row(case)


def columns_of(case: Case) -> tuple[Column, ...]:
    """Columns for the cases of a benchmark that declares none, by the first of them."""
    return tuple(
        Column(name, form=",.6g" if isinstance(value, int | float) and not isinstance(value, bool) else "",
               width=0 if isinstance(value, int | float) else len(str(value)))
        for name, value in case.items()
    )  # fmt: skip


def _verdict(kept: Iterable[bool | None]) -> Text:
    found = [each for each in kept if each is not None]
    if not found:
        return Text("")
    return Text("ok", "green") if all(found) else Text("short", "yellow")


def _width(columns: Sequence[Column]) -> int:
    limited = [column for column in columns if column.limit is not None]
    rooms = sum(column.room + GAP for column in columns) + sum(column.room + 3 + GAP for column in limited)
    return rooms + (len("short") if limited else -GAP)


def _fitting(columns: list[Column], width: int | None) -> list[Column]:
    while width is not None and _width(columns) > width:
        last = max((i for i, column in enumerate(columns) if column.optional), default=None)
        if last is None:
            break
        del columns[last]
    return columns
