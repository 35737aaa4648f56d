"""Grammars in Lark's form, as llguidance reads it, put together rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from headrace.errors import InvalidRequest
from headrace.server.turn import Tool
from headrace.structured import Structured

MOST_CALLS = 16
"""Calls in one answer, where calls are forced."""


class Grammar:
    """tokens: added tokens of the vocabulary, by text. A mark that is one is written as its token: for llguidance no
    text contains an added token."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = tokens
        self._rules: list[str] = []

    def rule(self, expression: str, attributes: str = "") -> str:
        """The name of a new rule."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def text(self, text: str, marks: Collection[str] = ()) -> str:
        """An expression for this text. marks: parts of it that are tokens where the vocabulary has them."""
        known = [mark for mark in marks if mark in self.tokens]
        parts = re.split("(" + "|".join(map(re.escape, known)) + ")", text) if known else [text]
        return " ".join(f"<[{self.tokens[part]}]>" if part in known else quoted(part) for part in parts if part)

    def json(self, schema: Any) -> str:
        """A rule for JSON text that fits the schema, written on one line."""
        from headrace.engine.structured.compile import JSON_OPTIONS

        given = {} if schema is True else schema
        return self.rule(f"%json {json.dumps({**given, 'x-guidance': JSON_OPTIONS})}")

    def arguments(self, tool: Tool) -> str:
        """A rule for JSON text of a tool's arguments. Raises InvalidRequest as arguments_schema."""
        return self.json(arguments_schema(tool))

    def shape(self, structured: Structured) -> str:
        """A rule for an answer of this shape."""
        kind = structured.kind
        if kind == "json_object":
            return self.json({"type": "object"})
        if kind == "json":
            return self.json(_schema(structured.json or ""))
        if kind == "regex":
            from llguidance import regex_to_lark

            return self.rule(f"/{regex_to_lark(structured.regex or '', use_ascii='')}/")
        if kind == "choice":
            return self.rule(" | ".join(map(quoted, structured.choice)))
        return self.rule("%lark {\n" + (structured.grammar or "") + "\n}")

    def several(self, one: str, between: str, most: int) -> str:
        """One, or up to `most` with a text between them."""
        name = self.rule(one)
        return name if most == 1 else self.rule(f"{name} ({quoted(between) if between else ''} {name}){{0,{most - 1}}}")

    def done(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema(text: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"json is no JSON Schema: {error}", "structured") from None
    if found is not True and not isinstance(found, dict):
        raise InvalidRequest("json must be a JSON Schema that some answer fits: an object or true", "structured")
    return found


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object. Raises InvalidRequest if it wants another type."""
    kind = tool.parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest(f"tools: the parameters of {tool.name!r} must have type 'object', got {kind!r}", "tools")
    return {**tool.parameters, "type": "object"}


def json_call(
    grammar: Grammar,
    tools: Sequence[Tool],
    key: str = "arguments",
    around: tuple[str, str] = ("", ""),
    marks: Collection[str] = (),
) -> str:
    """An expression for a call as a JSON object, with its arguments under `key`, between two texts."""
    calls = []
    for tool in tools:
        begin = grammar.text(f'{around[0]}{{"name": {json.dumps(tool.name)}, "{key}": ', marks)
        calls.append(f"{begin} {grammar.arguments(tool)} {grammar.text('}' + around[1], marks)}")
    return " | ".join(calls)


_SIMPLE = {"type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions",
           "$schema"}  # fmt: skip


def is_simple(schema: dict[str, Any], key: re.Pattern[str]) -> bool:
    """Whether arguments fit the schema if each of them fits its own, and their names are keys."""
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(own, dict | bool) for own in properties.values()):
        return False
    named = all(key.fullmatch(name) and own is not False for name, own in properties.items())
    return named and set(schema) <= _SIMPLE and set(schema.get("required", [])) <= set(properties)


def own_schema(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """The schema of one property, with the definitions that it may refer to."""
    given = schema["properties"][name]
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {**shared, **({} if given is True else given)}


def in_order(
    grammar: Grammar, items: Sequence[tuple[str, str]], required: Collection[str], end: str, between: str = ""
) -> str:
    """A rule for items (name, rule) in this order, those that are not required or not, then the end."""
    first = rest = end
    for name, item in reversed(items):
        begun, more = f"{item} {rest}", f"{between} {item} {rest}"
        if name in required:
            first, rest = grammar.rule(begun), grammar.rule(more)
        else:
            first, rest = grammar.rule(f"{begun} | {first}"), grammar.rule(f"{more} | {rest}")
    return first
