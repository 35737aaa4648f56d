"""Calls whose arguments stand one by one between marks, their values as texts: what several formats share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from headrace.errors import InvalidRequest
from headrace.server.parsers.json_calls import NAME_LIMIT
from headrace.server.parsers.lark import (
    Grammar,
    arguments_schema,
    in_order,
    is_simple,
    own_schema,
    pattern_of,
    quoted,
    refused,
)
from headrace.server.parsers.scan import Parser, Reading, Sink, marks_of
from headrace.server.turn import Tool

_WORDS = {"True": "true", "False": "false", "None": "null"}
_KINDS = {"str": {"string"}, "bool": {"boolean"}, "int": {"integer", "number"}, "float": {"number"},
          "NoneType": {"null"}, "list": {"array"}, "dict": {"object"}}  # fmt: skip


class MarkedParser(Parser):
    """The tool's schema says which values become strings (told as they come) and which are JSON (told at their end;
    what is no JSON becomes a string).

    key_begin, key_ends: the marks before and behind an argument's name, a key_name. value_end: that behind a value.
    breaks: whether a line break at each end of a value belongs to the marks.
    """

    key_begin: str
    key_name: re.Pattern[str]
    key_ends: tuple[str, ...]
    value_end: str
    breaks = False

    def key(self) -> Reading[str]:
        """Reads up to the next argument's value; its name. '' if none comes, and then what was read is held."""
        reader = self.reader
        reader.hold()
        yield from reader.skip_space()
        if not (yield from reader.literal(self.key_begin)):
            return ""
        key = yield from reader.whole(self.key_name, NAME_LIMIT)
        if not key:
            return ""
        for number, mark in enumerate(self.key_ends):
            if number:
                yield from reader.skip_space()
            if not (yield from reader.literal(mark)):
                return ""
        reader.drop()
        return key

    def end(self) -> Reading[bool]:
        """Whether the call ends here, with its marks, which are left out; what the text's end cuts of them, too."""
        raise NotImplementedError

    def call(self, name: str) -> Reading[bool]:
        """Tells a call behind its name; whether it is whole. What follows a broken one is left in what is held."""
        number = self.start(name)
        tool, before = self.tools.get(name), "{"
        properties = {} if tool is None else tool.parameters.get("properties")
        while key := (yield from self.key()):
            self.arguments(number, f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            schema = properties.get(key, {}) if isinstance(properties, dict) else {}
            if not (yield from self._value(schema, lambda piece: self.arguments(number, piece))):
                return False
        if not (yield from self.end()):
            return False
        self.arguments(number, "{}" if before == "{" else "}")
        return True

    def _value(self, schema: Any, sink: Sink) -> Reading[bool]:
        """Tells a value as JSON; whether it is whole."""
        if self.breaks:
            yield from self.reader.literal("\n")
        marks = marks_of(self.value_end)
        if is_text(schema):
            sink('"')
            told = _escaped(sink)
            ended = yield from self.reader.until(marks, _LastLine(told).text if self.breaks else told)
            sink('"' if ended else "")
            return bool(ended)
        pieces: list[str] = []
        ended = yield from self.reader.until(marks, pieces.append)
        if ended:
            text = "".join(pieces)
            sink(as_json(text.removesuffix("\n") if self.breaks else text, schema))
        return bool(ended)


def _escaped(sink: Sink) -> Sink:
    return lambda piece: sink(json.dumps(piece, ensure_ascii=False)[1:-1])


class _LastLine:
    """Hands text on without the line break at its end."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._held = sink, ""

    def text(self, piece: str) -> None:
        text = self._held + piece
        self._held = "\n" if text.endswith("\n") else ""
        self._sink(text.removesuffix("\n"))


def is_text(schema: Any) -> bool:
    """Whether every value of this schema is a string, which is written as it is."""
    if not isinstance(schema, dict):
        return False
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if "type" not in schema and isinstance(values, list):
        return bool(values) and all(isinstance(value, str) for value in values)
    return bool(schema.get("type") == "string")


def as_json(text: str, schema: Any) -> str:
    """The JSON of a value that the schema does not say to be a string."""
    plain = text.strip()
    plain = _WORDS.get(plain, plain)
    kinds = schema.get("type") if isinstance(schema, dict) else None
    try:
        found = json.loads(plain, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = not isinstance(kinds, list) or "string" not in kinds or _KINDS[type(found).__name__] & set(kinds)
    return plain if fits else json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


class Markup(NamedTuple):
    """How forced calls write arguments. format: its name. key: names of arguments that can be written. begin: an
    expression for all before the value of an argument of this name. end: the text that ends a value. after: an
    expression for what follows it. mark: the part of `end` that no value may contain."""

    format: str
    key: re.Pattern[str]
    begin: Callable[[Grammar, str], str]
    end: str
    after: str
    mark: str

    def arguments(self, grammar: Grammar, tool: Tool, end: str) -> str:
        """An expression for a tool's arguments and what ends its call (an expression). Strings are any text up to the
        mark that ends them. Raises InvalidRequest for schemas of arguments that cannot be written one by one, and for
        strings with a pattern or format."""
        schema = arguments_schema(tool)
        if not is_simple(schema, self.key):
            raise self._cannot(tool, "its schema has more than properties")
        names = schema.get("properties", {})
        items = [(name, self._item(grammar, tool, name, own_schema(schema, name))) for name in names]
        return in_order(grammar, items, schema.get("required", []), grammar.rule(end))

    def _item(self, grammar: Grammar, tool: Tool, name: str, schema: dict[str, Any]) -> str:
        begin, end = self.begin(grammar, name), grammar.text(self.end, (self.mark,))
        if not is_text(schema):
            return f"{begin} {grammar.json(schema)} {end} {self.after}"
        if "enum" in schema or "const" in schema:
            values = [value for value in schema.get("enum", [schema.get("const")]) if isinstance(value, str)]
            if not values or any(self.mark in value for value in values):
                raise self._cannot(tool, f"{name!r} has no value, or one with {self.mark}")
            return f"{begin} ({' | '.join(map(quoted, values))}) {end} {self.after}"
        if other := {"pattern", "format"} & set(schema):
            raise self._cannot(tool, f"{name!r} has {min(other)!r}")
        text = f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})"
        ended = grammar.rule(f"/{text}{pattern_of(self.end)}/", "[lazy]")
        if self.mark in grammar.tokens:  # which may be spelled, too: a parser sees no difference
            ended = f"({ended} | {grammar.rule(f'/{text}/')} {end})"
        return f"{begin} {ended} {self.after}"

    def _cannot(self, tool: Tool, why: str) -> InvalidRequest:
        told = f"its calls cannot be forced in this model's format ({self.format}): {why}"
        return refused(tool, f"{told}; leave tool_choice 'auto'")
