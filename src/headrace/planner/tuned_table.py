"""The tuned table: what `headrace tune` measured on one machine, for one model, on so many ranks.

KVR-S entries by token count; between them fractions are interpolated (KVR-P). The stamp says what it was measured on,
so that it is refused elsewhere. JSON, written whole or not at all.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from headrace.files import read_given
from headrace.planner.heuristic import Heuristic
from headrace.planner.machine import Machine, ModelShape
from headrace.planner.partition import Bounds, Fractions, cut, fractions_of, interpolate


class TableStamp(msgspec.Struct, frozen=True, kw_only=True):
    """What a table holds for. `machine` is Machine.fingerprint; `model` its identity (name and revision, or a hash);
    `link` names what joins the ranks ("gloo, lo"). `date` and the last part of `version` may differ on use."""

    machine: str
    model: str
    shape: ModelShape
    ranks: int
    link: str
    version: str
    date: str


class TableEntry(msgspec.Struct, frozen=True):
    """The searched partition at one token count and the time to first token measured with it."""

    fractions: Fractions
    ttft_s: float


class MeasuredPoint(msgspec.Struct, frozen=True):
    """One measurement of a search; kept, so that an interrupted one is resumed."""

    bounds: Bounds
    seconds: float


class TunedTable(msgspec.Struct, kw_only=True):
    """entries and measured go by token count. corrections: by strategy, measured over predicted time to first token."""

    stamp: TableStamp
    machine: Machine
    entries: dict[int, TableEntry] = msgspec.field(default_factory=dict)
    heuristic: Heuristic | None = None
    corrections: dict[str, float] = msgspec.field(default_factory=dict)
    measured: dict[int, list[MeasuredPoint]] = msgspec.field(default_factory=dict)

    def check(self, stamp: TableStamp) -> None:
        """Raises ValueError naming what differs when the table is used on something else than it was tuned on."""
        different = [
            f"{name}: tuned for {_said(getattr(self.stamp, name))}, used with {_said(getattr(stamp, name))}"
            for name in ("machine", "model", "shape", "ranks", "link")
            if getattr(self.stamp, name) != getattr(stamp, name)
        ]
        if _release(self.stamp.version) != _release(stamp.version):
            different.append(f"headrace version: tuned with {self.stamp.version}, used with {stamp.version}")
        if different:
            raise ValueError(f"the tuned table does not fit ({'; '.join(different)}): run `headrace tune` here")

    def lookup(self, tokens: int, start: int = 0, unit: int = 1) -> Bounds:
        """Bounds of a chain: as searched where there is an entry for so many tokens, else interpolated fractions."""
        fractions = interpolate({known: entry.fractions for known, entry in self.entries.items()}, tokens)
        return cut(fractions, tokens, start, unit)

    def points(self, tokens: int) -> dict[Bounds, float]:
        """What was measured at this token count, for PartitionSearch(measured=...)."""
        return {point.bounds: point.seconds for point in self.measured.get(tokens, [])}

    def keep(self, tokens: int, points: dict[Bounds, float]) -> None:
        """Takes over the measurements of a search under way."""
        self.measured[tokens] = [MeasuredPoint(bounds, seconds) for bounds, seconds in points.items()]

    def finish(self, tokens: int, bounds: Bounds, ttft_s: float) -> None:
        """A search has ended: its entry replaces the single measurements."""
        self.entries[tokens] = TableEntry(fractions_of(bounds), ttft_s)
        self.measured.pop(tokens, None)

    def save(self, path: Path) -> None:
        """Writes a file beside it and renames it: readers see the old table or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        body = msgspec.json.format(msgspec.json.encode(self), indent=1)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(body + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


MOST_BYTES = 16 << 20
"""Of a table; one of a thousand lengths has some hundred kilobytes."""


def load_table(path: Path) -> TunedTable:
    """A saved table. Raises ValueError, with the remedy, where it is missing, broken or of another form."""
    try:
        table = msgspec.json.decode(read_given(path, MOST_BYTES), type=TunedTable)
    except (OSError, ValueError) as error:
        raise ValueError(f"no usable tuned table in {path} ({error}): run `headrace tune`") from error
    wrong = [tokens for tokens, entry in table.entries.items() if not _sound(entry, table.stamp.ranks)]
    if wrong:
        raise ValueError(
            f"{path}: the entry for {wrong[0]} tokens has no {table.stamp.ranks} fractions that add up to 1: "
            f"run `headrace tune`"
        )
    return table


def _sound(entry: TableEntry, ranks: int) -> bool:
    fractions = entry.fractions
    return len(fractions) == ranks and min(fractions) >= 0 and abs(sum(fractions) - 1) < 1e-6


def _release(version: str) -> list[str]:
    return version.split(".")[:2]


def _said(value: object) -> str:
    if isinstance(value, ModelShape):
        return ", ".join(f"{name} {getattr(value, name)}" for name in value.__struct_fields__)
    return repr(value) if isinstance(value, str) else str(value)
