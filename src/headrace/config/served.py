"""By which names clients may call the model and its adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ServedNames:
    """`listed` names of the model, of which the first stands in logs and metrics, and `patterns`, in which * is any
    text; those of `adapters` go before these."""

    listed: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: str | None, folder: str, adapters: tuple[str, ...] = ()) -> ServedNames:
        """given: the setting; without it the model is called as it was given."""
        if given is None:
            return cls((folder,), (), adapters)
        names = split(given)
        return cls(
            tuple(dict.fromkeys(name for name in names if "*" not in name)),
            tuple(name for name in names if "*" in name),
            adapters,
        )

    def refuse_twice(self) -> None:
        """Raises ValueError for an adapter that is called as the model is."""
        twice = next((name for name in self.adapters if name in self.listed), None)
        if twice is not None:
            raise ValueError(f"lora_modules: {twice!r} is the model's own name; call the adapter something else")

    def adapter(self, name: str | None) -> str:
        """The adapter of that name; "": the model itself is meant."""
        return name if name is not None and name in self.adapters else ""

    @property
    def main(self) -> str:
        return self.listed[0]

    @property
    def told(self) -> str:
        """All of them, for messages."""
        return ", ".join(map(repr, (*self.listed, *self.patterns, *self.adapters)))

    def __contains__(self, name: object) -> bool:
        return (
            name in self.listed
            or name in self.adapters
            or (isinstance(name, str) and any(matches(name, pattern.split("*")) for pattern in self.patterns))
        )


def split(given: str) -> list[str]:
    return [name.strip() for name in given.split(",")]


def matches(name: str, parts: Sequence[str]) -> bool:
    """Whether a name has these texts one after the other, the first at its beginning and the last at its end. Takes
    time in proportion to the name."""
    first, *middle, last = parts
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    at, end = len(first), len(name) - len(last)
    for part in middle:
        at = name.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


def check_names(name: str, value: Any) -> None:
    """Raises ValueError for a setting that gives no name to list."""
    names = split(value)
    if not all(names):
        raise ValueError(f"{name}: names must not be empty, got {value!r}")
    if all("*" in each for each in names):
        raise ValueError(f"{name}: at least one name must be without *, for logs and lists, got {value!r}")
