"""The keywords of one schema that the library reads together: type, and those for numbers, strings, arrays, objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.engine.structured.formats import ANNOTATIONS, PATTERNS
from headrace.engine.structured.keywords import TYPES, Refused, below, unwritable
from headrace.engine.structured.numbers import BOUNDS, exact, is_number, numeric
from headrace.engine.structured.patterns import Unreadable, translated

Inner = Callable[..., Any]
"""Lowers a schema inside this one: (schema, *names of its pointer)."""

MAX_COUNT = 1_000_000_000
"""A longer string or list than this ends no answer: as a maximum it says nothing."""

MAX_NAMES = 1000
MAX_OPTIONAL = 450
"""Properties of one object; for each that is optional the library's parser has four items at once, of 2,000."""

MAX_PATTERNS = 24
"""patternProperties of one object, each pair of which is proven disjoint."""

MAX_TEXT = 16_384
"""Characters of a text in const and enum, or of a property's name; the library looks ahead over forced text."""

MAX_DATA = 60
"""Lists and objects inside one another in const and enum."""

_EQUAL = {
    # What pydantic writes for Decimal: no text of signs and points alone.
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
}
"""Patterns that look around, and others that match the same texts without."""


def plain(schema: dict[str, Any], pointer: str, draft: int, inner: Inner) -> tuple[dict[str, Any], list[Any]]:
    """The lowered keywords, and what must hold besides them. Raises Refused."""
    made: dict[str, Any] = {}
    extra: list[Any] = []
    types = _types(schema, pointer)
    if "type" in schema:
        made["type"] = types[0] if len(types) == 1 else types
    if {"integer", "number"} & set(types) and any(name in schema for name in (*BOUNDS, "multipleOf")):
        made.update(numeric(schema, pointer, "number" not in types))
    if "string" in types:
        _string(made, extra, schema, pointer)
    if "array" in types:
        _array(made, schema, pointer, draft, inner)
    if "object" in types:
        _object(made, schema, pointer, inner)
    return made, extra


def _types(schema: dict[str, Any], pointer: str) -> list[str]:
    given = schema.get("type", list(TYPES))
    types = [given] if isinstance(given, str) else given
    if not isinstance(types, list) or not types or any(kind not in TYPES for kind in types):
        raise Refused(below(pointer, "type"), f"must be of {', '.join(TYPES)}")
    if "number" in types and "integer" in types:
        types = [kind for kind in types if kind != "integer"]
    return list(dict.fromkeys(types))


def _string(made: dict[str, Any], extra: list[Any], schema: dict[str, Any], pointer: str) -> None:
    _counts(made, schema, pointer, "minLength", "maxLength")
    if "pattern" in schema:
        made["pattern"] = expression(schema["pattern"], below(pointer, "pattern"))
    name = schema.get("format")
    if name is None or (isinstance(name, str) and name in ANNOTATIONS):
        return
    if not isinstance(name, str) or name not in PATTERNS:
        raise Refused(
            below(pointer, "format"), f"{str(name)[:100]!r} is no format that is known here", "write a pattern"
        )
    enforced = expression(PATTERNS[name], pointer)
    if "pattern" in made:
        extra.append({"type": made["type"], "pattern": enforced} if "type" in made else {"pattern": enforced})
    else:
        made["pattern"] = enforced


def expression(pattern: Any, pointer: str) -> str:
    """A pattern in the library's dialect. Raises Refused."""
    if not isinstance(pattern, str):
        raise Refused(pointer, "must be a text")
    try:
        return translated(_EQUAL.get(pattern, pattern))
    except Unreadable as fault:
        raise Refused(pointer, f"{fault}: {pattern[:100]!r}") from None


def _array(made: dict[str, Any], schema: dict[str, Any], pointer: str, draft: int, inner: Inner) -> None:
    _counts(made, schema, pointer, "minItems", "maxItems")
    first, rest = ("prefixItems", "items") if draft >= 2020 else ("", "items")
    if isinstance(schema.get("items"), list):  # drafts up to 2019-09
        first, rest = "items", "additionalItems"
    if first in schema:
        if not isinstance(schema[first], list):
            raise Refused(below(pointer, first), "must be a list")
        made["prefixItems"] = [inner(part, first, number) for number, part in enumerate(schema[first])]
    if rest not in schema and "unevaluatedItems" in schema:
        rest = "unevaluatedItems"
    if rest in schema:
        made["items"] = inner(schema[rest], rest)


def _object(made: dict[str, Any], schema: dict[str, Any], pointer: str, inner: Inner) -> None:
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise Refused(below(pointer, "required"), "must be a list of properties' names")
    _counts(made, schema, pointer, "minProperties", "maxProperties")
    if made.get("minProperties", 0) > len(set(required)) + 1:
        where = below(pointer, "minProperties")
        raise Refused(where, "cannot be enforced beyond one more than what is required", "name more in required")
    for keyword in ("properties", "patternProperties"):
        if keyword in schema:
            if not isinstance(schema[keyword], dict):
                raise Refused(below(pointer, keyword), "must be an object of schemas")
            made[keyword] = _properties(schema[keyword], keyword, pointer, inner)
    rest = "additionalProperties"
    if rest not in schema and "unevaluatedProperties" in schema:
        rest = "unevaluatedProperties"
    if rest in schema:
        made["additionalProperties"] = inner(schema[rest], rest)
    if required:
        made["required"] = list(dict.fromkeys(required))
    optional = len(made.get("properties", {}).keys() - set(required))
    if optional > MAX_OPTIONAL or optional + len(set(required)) > MAX_NAMES:
        most = f"{MAX_NAMES:,} properties, or more than {MAX_OPTIONAL} that are not required"
        raise Refused(pointer, f"more than {most}", "use fewer")
    for name in made.get("properties", {}).keys() | set(required):
        _check_name(name, pointer)


def _check_name(name: str, pointer: str) -> None:
    if len(name) > MAX_TEXT:
        raise Refused(pointer, f"has a property's name of more than {MAX_TEXT:,} characters")
    if any("\ud800" <= char <= "\udfff" for char in name):
        raise Refused(pointer, "has half of a surrogate pair in a property's name")


def _properties(given: dict[str, Any], keyword: str, pointer: str, inner: Inner) -> dict[str, Any]:
    if keyword == "properties":
        return {name: inner(part, keyword, name) for name, part in given.items()}
    if len(given) > MAX_PATTERNS:
        raise Refused(below(pointer, keyword), f"more than {MAX_PATTERNS} patterns", "use fewer")
    places = {name: below(pointer, keyword, name) for name in given}
    return {expression(name, places[name]): inner(part, keyword, name) for name, part in given.items()}


def _counts(made: dict[str, Any], schema: dict[str, Any], pointer: str, least: str, most: str) -> None:
    """Copies two bounds of a length. Raises Refused."""
    for name in (least, most):
        if name not in schema:
            continue
        value = schema[name]
        if not is_number(value) or value < 0 or value != int(value):
            raise Refused(below(pointer, name), "must be a whole number from 0")
        if value <= MAX_COUNT:
            made[name] = int(value)
        elif name == least:
            raise Refused(below(pointer, name), f"no answer is longer than {MAX_COUNT:,}", "use a smaller one")
    if made.get(least, 0) > made.get(most, MAX_COUNT):
        raise Refused(below(pointer, most), f"is below {least}")


def check_data(value: Any, pointer: str, depth: int = 0) -> None:
    """Raises Refused for a const, or a value of an enum, that the library would not read as itself."""
    if depth > MAX_DATA:
        raise Refused(pointer, f"is nested deeper than {MAX_DATA} levels")
    if is_number(value) and not exact(value):
        raise Refused(
            pointer,
            "a number beyond 2^63, or an integer beyond 2^53 that is no double, cannot be enforced",
            "write it as a text",
        )
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise Refused(pointer, f"is longer than {MAX_TEXT:,} characters")
    if isinstance(value, str) and unwritable(value):
        raise Refused(pointer, "has a control character or half of a surrogate pair, which answers do not contain")
    if isinstance(value, list):
        for number, part in enumerate(value):
            check_data(part, below(pointer, number), depth + 1)
    if isinstance(value, dict):
        for name, part in value.items():
            _check_name(name, pointer)
            check_data(part, below(pointer, name), depth + 1)
