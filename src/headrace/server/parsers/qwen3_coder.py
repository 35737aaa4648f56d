"""Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from headrace.errors import InvalidRequest
from headrace.server.parsers.json_calls import NAME_LIMIT
from headrace.server.parsers.lark import Grammar, arguments_schema, in_order, is_simple, own_schema, quoted, refused
from headrace.server.parsers.scan import Parser, Reading, Sink, marks_of
from headrace.server.turn import Tool

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
_NAME = re.compile(r"[^\s<>]+")
_KEY = re.compile(r"[^\n<>]+")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_KINDS = {"str": {"string"}, "bool": {"boolean"}, "int": {"integer", "number"}, "float": {"number"},
          "NoneType": {"null"}, "list": {"array"}, "dict": {"object"}}  # fmt: skip


class Qwen3CoderParser(Parser):
    """The marks say that a call comes, so a call of any name is told. Values are texts: the tool's schema says which
    become strings (told as they come) and which are JSON (told at their end; what is no JSON becomes a string).

    begin, end: the marks around a call; wrap: what stands around each value, "" for nothing.
    """

    begin, end, wrap = BEGIN, END, "\n"

    def read(self) -> Reading[None]:
        marks = marks_of(self.begin, FUNCTION)
        while mark := (yield from self.reader.until(marks, self.flow.text)):
            self.reader.hold(mark)
            yield from self.reader.skip_space()
            if mark == FUNCTION or (yield from self.reader.literal(FUNCTION)):
                yield from self._function()
            self.fail()

    def _function(self) -> Reading[None]:
        """Reads a call behind its first mark; what is none, or follows a broken one, is left in what is held."""
        reader = self.reader
        name = yield from reader.whole(_NAME, NAME_LIMIT)
        if not name or not (yield from reader.literal(">")):
            return
        number = self.start(name)
        tool, before = self.tools.get(name), "{"
        properties = {} if tool is None else tool.parameters.get("properties")
        while key := (yield from self._key()):
            self.arguments(number, f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            schema = properties.get(key, {}) if isinstance(properties, dict) else {}
            if not (yield from self._value(schema, lambda piece: self.arguments(number, piece))):
                return
        if not (yield from self._end()):
            return
        self.arguments(number, "{}" if before == "{" else "}")

    def _key(self) -> Reading[str]:
        reader = self.reader
        reader.hold()
        yield from reader.skip_space()
        if not (yield from reader.literal(PARAMETER)):
            return ""
        key = yield from reader.whole(_KEY, NAME_LIMIT)
        if not key or not (yield from reader.literal(">")):
            return ""
        reader.drop()
        return key

    def _end(self) -> Reading[bool]:
        """Whether the call ends here, with its marks or one of them."""
        reader = self.reader
        ended = yield from reader.literal(FUNCTION_END)
        if ended:
            reader.drop()
            reader.hold()
        yield from reader.skip_space()
        if (yield from reader.literal(self.end)):
            reader.drop()
            return True
        if reader.cut(PARAMETER, FUNCTION_END, self.end):
            reader.drop()
        return ended

    def _value(self, schema: Any, sink: Sink) -> Reading[bool]:
        """Tells a value as JSON; whether it is whole."""
        if self.wrap:
            yield from self.reader.literal(self.wrap)
        marks = marks_of(PARAMETER_END)
        if is_text(schema):
            sink('"')

            def told(piece: str) -> None:
                sink(json.dumps(piece, ensure_ascii=False)[1:-1])

            ended = yield from self.reader.until(marks, _LastLine(told).text if self.wrap else told)
            sink('"' if ended else "")
            return bool(ended)
        pieces: list[str] = []
        ended = yield from self.reader.until(marks, pieces.append)
        if ended:
            sink(as_json("".join(pieces).removesuffix("\n"), schema))
        return bool(ended)


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


def calls_grammar(grammar: Grammar, tools: Sequence[Tool], most: int) -> str:
    return xml_calls(grammar, tools, most, BEGIN, END, "\n")


def xml_calls(grammar: Grammar, tools: Sequence[Tool], most: int, first: str, last: str, wrap: str) -> str:
    """Calls between the marks `first` and `last`, values between `wrap`s. Strings are any text up to the mark that ends
    them. Raises InvalidRequest for schemas of arguments that cannot be written one by one, and for strings with a
    pattern or format."""
    calls = []
    for tool in tools:
        schema = arguments_schema(tool)
        if not is_simple(schema, _KEY):
            raise _cannot(tool, "its schema has more than properties")
        end = grammar.rule(grammar.text(f"{FUNCTION_END}\n{last}", (last,)))
        names = schema.get("properties", {})
        items = [(name, _item(grammar, tool, name, own_schema(schema, name), wrap)) for name in names]
        begin = grammar.text(f"{first}\n{FUNCTION}{tool.name}>\n", (first,))
        calls.append(f"{begin} {in_order(grammar, items, schema.get('required', []), end)}")
    return grammar.several(" | ".join(calls), "\n", most)


def _item(grammar: Grammar, tool: Tool, name: str, schema: dict[str, Any], wrap: str) -> str:
    begin, end = quoted(f"{PARAMETER}{name}>{wrap}"), quoted(f"{wrap}{PARAMETER_END}\n")
    if not is_text(schema):
        return f"{begin} {grammar.json(schema)} {end}"
    if "enum" in schema or "const" in schema:
        values = [value for value in schema.get("enum", [schema.get("const")]) if isinstance(value, str)]
        if not values or any(PARAMETER_END in value for value in values):
            raise _cannot(tool, f"{name!r} has no value, or one with {PARAMETER_END}")
        return f"{begin} ({' | '.join(map(quoted, values))}) {end}"
    if other := {"pattern", "format"} & set(schema):
        raise _cannot(tool, f"{name!r} has {min(other)!r}")
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    after = wrap.replace("\n", "\\n")
    text = grammar.rule(f"/(?s:.{{{least},{most}}}){after}<\\/parameter>\\n/", "[lazy]")
    return f"{begin} {text}"


def _cannot(tool: Tool, why: str) -> InvalidRequest:
    told = f"its calls cannot be forced in this model's format (parameters in XML): {why}"
    return refused(tool, f"{told}; leave tool_choice 'auto'")
