"""Grammars in Lark's form, as llguidance reads it, put together rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from headrace.errors import InvalidRequest
from headrace.server.turn import Tool
from headrace.structured import Structured

MOST_CALLS = 16
"""Calls in one answer, where calls are forced."""


class Grammar:
    """tokens: added tokens of the vocabulary, by text. A mark that is one is written as its token: a text in a grammar
    is never an added token."""

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
        """An expression for JSON text that fits the schema, written as answers of a shape are."""
        from headrace.engine.structured.compile import JSON_OPTIONS

        given = {} if schema is True else schema
        return f"%json {json.dumps({**given, 'x-guidance': JSON_OPTIONS})}"

    def arguments(self, tool: Tool) -> str:
        """An expression for JSON text of a tool's arguments. Raises InvalidRequest as arguments_schema."""
        return self.json(arguments_schema(tool))

    def shape(self, structured: Structured) -> str:
        """An expression for an answer of this shape."""
        kind = structured.kind
        if kind == "json_object":
            return self.json({"type": "object"})
        if kind == "json":
            return self.json(_schema(structured.json or ""))
        return self.rule("%lark {\n" + _lark_of(structured) + "\n}")

    def several(self, one: str, between: str, most: int, optional: bool = False) -> str:
        """One, or up to `most` with a text between them, which may be left out if `optional`."""
        name, text = self.rule(one), quoted(between) + "?" * optional if between else ""
        return name if most == 1 else self.rule(f"{name} ({text} {name}){{0,{most - 1}}}")

    def done(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def pattern_of(text: str) -> str:
    """A regular expression that matches this text, as it stands between slashes."""
    return re.escape(text).replace("\n", "n").replace("/", "\\/")


def _schema(text: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"json is no JSON Schema: {error}", "structured") from None
    if found is not True and not isinstance(found, dict):
        raise InvalidRequest("json must be a JSON Schema that some answer fits: an object or true", "structured")
    return found


def _lark_of(structured: Structured) -> str:
    """The grammar of a shape that is no JSON. Raises InvalidRequest for one that cannot be taken."""
    from headrace.engine.structured.compile import grammar_of

    if structured.kind == "grammar":
        return structured.grammar or ""
    text = grammar_of(structured)
    return str(json.loads(text)["grammars"][0]["lark_grammar"]) if text.startswith("{") else text


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """What the schema of a tool's arguments, which are an object, says of them. Where it names them and says no more,
    there are no others: a tool without parameters is called without arguments. Raises InvalidRequest, naming the tool,
    if it wants another type or cannot be forced."""
    kind = tool.parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise refused(tool, f"the type must be 'object', got {str(kind)[:60]!r}")
    try:
        schema = {**bare(tool.parameters), "type": "object"}
        fault = _fault(json.dumps(schema))
    except RecursionError:
        fault = "nested too deeply"
    if fault:
        raise refused(tool, f"its calls cannot be forced: {fault}")
    if set(schema) <= _SIMPLE and set(schema.get("required", [])) <= set(schema.get("properties", {})):
        schema.setdefault("additionalProperties", False)
    return schema


def refused(tool: Tool, why: str) -> InvalidRequest:
    """What is wrong with a tool, named by its place in the request and its name."""
    return InvalidRequest(f"{tool.where} (tool {tool.name!r}): {why}", tool.where)


@lru_cache(maxsize=64)
def _fault(schema: str) -> str:
    """Why a schema cannot be forced; '' if it can."""
    from headrace.engine.structured.compile import check

    try:
        check(Structured(json=schema), None)
    except InvalidRequest as error:
        return str(error)
    return ""


_TOLD = {"description", "title", "examples", "example", "default", "deprecated", "readOnly", "writeOnly", "$comment"}
_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_SCHEMAS = {"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"}


def bare(schema: Any) -> Any:
    """A schema without what only tells readers something, which may be most of it."""
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, given in schema.items():
        if key in _TOLD:
            continue
        if key in _MAPS and isinstance(given, dict):
            given = {name: bare(inner) for name, inner in given.items()}
        elif key in _LISTS and isinstance(given, list):
            given = [bare(inner) for inner in given]
        elif key in _SCHEMAS:
            given = bare(given)
        found[key] = given
    return found


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


def json_list(grammar: Grammar, tools: Sequence[Tool], most: int, marks: tuple[str, str]) -> str:
    """An expression for calls as a JSON list between two marks."""
    begin, end = grammar.text(f"{marks[0]}[", marks), grammar.text(f"]{marks[1]}", marks)
    return f"{begin} {grammar.several(json_call(grammar, tools), ', ', most)} {end}"


_SIMPLE = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}


def is_simple(schema: dict[str, Any], key: re.Pattern[str]) -> bool:
    """Whether arguments fit the schema if each of them fits its own, and their names are keys."""
    properties = schema.get("properties", {})
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
    """A rule for items (name, expression) in this order, those that are not required or not, then the end."""
    rests = [end]
    for name, item in reversed(items):
        more, rest = f"{between} {item} {rests[-1]}", "" if name in required else f" | {rests[-1]}"
        rests.append(grammar.rule(more + rest))
    if not between:
        return rests[-1]
    # Up to the first item that is required, none may have come before.
    needed = next((i for i, (name, _) in enumerate(items) if name in required), len(items))
    begun = [f"{item} {rests[len(items) - i - 1]}" for i, (_, item) in enumerate(items[: needed + 1])]
    return grammar.rule(" | ".join(begun if needed < len(items) else [*begun, end]))
