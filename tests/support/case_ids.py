"""Ids of parametrised cases that say the case: pytest itself only counts what is neither a text nor a number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

LONGEST = 70


def case_id(value: Any, name: str) -> str | None:
    """The id of a value of parameter `name`; None where pytest's own will do, or nothing says what the value is."""
    if isinstance(value, bool) or value is None:
        return f"{name}={value}"
    if getattr(value, "__name__", "") == "<lambda>":
        return name
    if isinstance(value, str | bytes):
        return shortened(repr(value)[:-1].lstrip("b")[1:]) if len(value) > LONGEST else None if value else "empty"
    told = None if isinstance(value, int | float) else described(value, outermost=True)
    return told and shortened(told)


def shortened(text: str) -> str:
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."


def described(value: Any, *, outermost: bool = False) -> str | None:
    """The same in every process; None for what has no such text."""
    if value is None or isinstance(value, str | bytes | bool | int | float | range | slice):
        return repr(value)
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if type(value).__module__ == "torch":
        kind = str(getattr(value, "dtype", value)).removeprefix("torch.")
        return f"{kind} {tuple(value.shape)}" if hasattr(value, "shape") else kind
    if hasattr(type(value), "__struct_fields__"):  # a message of msgspec
        told = described({name: getattr(value, name) for name in value.__struct_fields__})
        return told and f"{type(value).__name__} {told}"
    if is_dataclass(value) and not isinstance(value, type):
        return described({f.name: x for f in fields(value) if not is_default(x := getattr(value, f.name), f)})
    if isinstance(value, dict):
        named = ((name if isinstance(name, str) else described(name), described(x)) for name, x in value.items())
        return joined((a and b and f"{a}={b}" for a, b in named), nothing="defaults")
    if isinstance(value, list | tuple | set | frozenset):
        inner = [described(x) for x in value]
        told = joined(sorted(inner, key=str) if isinstance(value, set | frozenset) else inner, nothing="none")
        return told if outermost or told is None else f"({told})"
    return None


def joined(texts: Iterable[str | None], nothing: str) -> str | None:
    known = list(texts)
    return None if None in known else ", ".join(map(str, known)) or nothing


def is_default(value: Any, field: Field[Any]) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return type(value) is type(default) and described(value) == described(default) is not None
