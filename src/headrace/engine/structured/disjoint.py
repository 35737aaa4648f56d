"""The proof that no value fits two cases of a oneOf, which makes it an anyOf.

A case is judged by what each of its values must have (its type, one of some values, properties): if these exclude each
other, so do the cases.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from headrace.engine.structured.keywords import TYPES
from headrace.engine.structured.numbers import is_number

MAX_PAIRWISE = 64
_DEPTH = 4
_KINDS = frozenset(TYPES) - {"integer"}


@dataclass(frozen=True, slots=True)
class _Definitions:
    """The lowered definitions, and the draft that says which keywords count."""

    by_name: Mapping[str, Any]
    draft: int


@dataclass(slots=True)
class _Facts:
    """What holds for every value of a schema."""

    kinds: frozenset[str] = _KINDS
    values: frozenset[str] | None = None
    required: set[str] = field(default_factory=set)
    properties: dict[str, list[Any]] = field(default_factory=dict)
    closed: list[frozenset[str]] = field(default_factory=list)


def disjoint(cases: Sequence[Any], definitions: Mapping[str, Any], draft: int = 2020) -> bool:
    """Whether the lowered cases provably exclude each other, by the keywords that the draft knows."""
    said = _Definitions(definitions, draft)
    facts = [_facts(case, said) for case in cases]
    if _tagged(facts, said):
        return True
    if len(cases) > MAX_PAIRWISE:
        return False
    return all(_exclude(one, other, said, _DEPTH) for one, other in combinations(facts, 2))


def _tagged(facts: list[_Facts], definitions: _Definitions) -> bool:
    """Whether all are objects with a required property whose values differ from case to case."""
    if not all(fact.kinds == {"object"} for fact in facts):
        return False
    for name in set.intersection(*(fact.required for fact in facts)):
        seen: set[str] = set()
        total = 0
        for fact in facts:
            values = _property(fact, name, definitions).values
            if values is None:
                break
            seen |= values
            total += len(values)
        else:
            if len(seen) == total:
                return True
    return False


def _facts(schema: Any, definitions: _Definitions, depth: int = 16) -> _Facts:
    facts = _Facts()
    _gather(facts, schema, definitions, depth)
    return facts


def _gather(facts: _Facts, schema: Any, definitions: _Definitions, depth: int) -> None:
    if schema is False:
        facts.kinds = frozenset()
    if not isinstance(schema, dict) or depth == 0:
        return
    if "$ref" in schema and definitions.draft < 2019:  # nothing beside it counts
        _gather(facts, definitions.by_name.get(schema["$ref"]), definitions, depth - 1)
        return
    if "type" in schema:
        types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        facts.kinds &= {"number" if kind == "integer" else kind for kind in types}
    listed = ([[schema["const"]]] if "const" in schema and definitions.draft > 4 else []) + (
        [schema["enum"]] if "enum" in schema else []
    )
    for values in listed:
        told = frozenset(spelled(value) for value in values)
        facts.values = told if facts.values is None else facts.values & told
        facts.kinds &= {_kind(value) for value in values}
    facts.required |= set(schema.get("required", ()))
    for name, part in schema.get("properties", {}).items():
        facts.properties.setdefault(name, []).append(part)
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        facts.closed.append(frozenset(schema.get("properties", ())))
    for part in schema.get("allOf", ()):
        _gather(facts, part, definitions, depth - 1)
    if "$ref" in schema:
        _gather(facts, definitions.by_name.get(schema["$ref"]), definitions, depth - 1)


def _property(facts: _Facts, name: str, definitions: _Definitions) -> _Facts:
    return _facts({"allOf": facts.properties.get(name, [])}, definitions)


def _exclude(one: _Facts, other: _Facts, definitions: _Definitions, depth: int) -> bool:
    kinds = one.kinds & other.kinds
    if not kinds:
        return True
    if one.values is not None and other.values is not None and not one.values & other.values:
        return True
    if kinds != {"object"} or depth == 0:
        return False
    for name in one.required | other.required:
        if any(name not in names for names in one.closed + other.closed):
            return True
        mine, theirs = (_property(facts, name, definitions) for facts in (one, other))
        if _exclude(mine, theirs, definitions, depth - 1):
            return True
    return False


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if is_number(value):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def spelled(value: Any) -> str:
    """A JSON value in one spelling: equal values have equal ones."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(spelled, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(sorted(f'{json.dumps(name)}:{spelled(part)}' for name, part in value.items()))}}}"
    return json.dumps(value)
