"""Whether values that end fit the definitions of a lowered schema: where each value of a kind must hold another of that
kind, an answer could never end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HOLDERS = {"object", "array"}
"""Kinds of values that hold others."""


def endless(definitions: Mapping[str, Any]) -> set[str]:
    """Names of the definitions that no value fits which ends. Others' contradictions are not looked for."""
    left = dict(definitions)
    while True:
        # Definitions stand before those that they refer to.
        ending = [name for name in reversed(left) if _ends(left[name], left)]
        if not ending:
            return set(left)
        for name in ending:
            del left[name]


def _ends(schema: Any, left: Mapping[str, Any]) -> bool:
    """left: definitions of which no such value is known."""
    if not isinstance(schema, dict):
        return True
    if schema.get("$ref") in left or not all(_ends(part, left) for part in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(_ends(part, left) for part in schema["anyOf"]):
        return False
    types = schema.get("type", "any")
    kinds = {types} if isinstance(types, str) else set(types)
    if "const" in schema or "enum" in schema or not kinds <= HOLDERS:
        return True
    return ("object" in kinds and _object_ends(schema, left)) or ("array" in kinds and _array_ends(schema, left))


def _object_ends(schema: Mapping[str, Any], left: Mapping[str, Any]) -> bool:
    own, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    return all(_ends(own.get(name, others), left) for name in schema.get("required", ()))


def _array_ends(schema: Mapping[str, Any], left: Mapping[str, Any]) -> bool:
    first, least = schema.get("prefixItems", []), schema.get("minItems", 0)
    needed = [*first[:least], *([schema.get("items", True)] if least > len(first) else [])]
    return all(_ends(part, left) for part in needed)
