"""Llama 3.2 and 4, in Python's words: [f(a=1, b="x"), g()], in <|python_start|>...<|python_end|> or not."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from headrace.server.parsers.json_calls import NAME_LIMIT, value
from headrace.server.parsers.lark import Grammar, arguments_schema, in_order, is_simple, own_schema, quoted
from headrace.server.parsers.line_calls import LineParser
from headrace.server.parsers.python_literals import literal
from headrace.server.parsers.scan import Reading
from headrace.server.turn import Tool

BEGIN, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.\-]+")
_KEY = re.compile(r"\w+")
_IDENTIFIER = re.compile(r"[^\W0-9]\w*")


class PythonicParser(LineParser):
    """Arguments are told as JSON, which literals become as they are written. Where an argument is no literal, the call
    ends with what came before, and the rest is text. The list begins a line; **{...} holds arguments as JSON."""

    opening = "["
    marks = (BEGIN,)
    last = END
    """What may follow the list, and is left out."""

    def call(self) -> Reading[bool]:
        reader, begun = self.reader, self.calls
        yield from reader.literal("[")
        while True:
            yield from reader.skip_space()
            if not (yield from self._one()):
                break
            reader.hold()
            yield from reader.skip_space()
            more = yield from reader.literal(",")
            yield from reader.skip_space()
            if (yield from reader.literal("]")):
                yield from self._end()
                break
            if not more:
                break
        if self.calls > begun and not (yield from reader.peek()):
            reader.drop()
        return self.calls > begun

    def _end(self) -> Reading[None]:
        """Leaves out the mark that may follow the list."""
        reader = self.reader
        reader.drop()
        reader.hold()
        yield from reader.skip_space()
        if (yield from reader.literal(self.last)) or reader.cut(self.last):
            reader.drop()

    def _one(self) -> Reading[bool]:
        """Reads one call; whether it is whole."""
        reader = self.reader
        name = yield from reader.whole(_NAME, NAME_LIMIT)
        if not name or (self.tools and name not in self.tools) or not (yield from reader.literal("(")):
            return False
        yield from reader.skip_space()
        if (yield from reader.literal(")")):
            self.arguments(self.start(name), "{}")
            return True
        if (yield from reader.literal("**")):
            return (yield from self._starred(name))
        key = yield from self._key()
        if not key and (yield from reader.peek()):
            return False
        number = self.start(name)
        return bool(key) and (yield from self._pairs(number, key))

    def _starred(self, name: str) -> Reading[bool]:
        reader = self.reader
        yield from reader.skip_space()
        if (yield from reader.peek()) not in ("{", ""):
            return False
        number = self.start(name)
        if not (yield from value(reader, lambda piece: self.arguments(number, piece))):
            return False
        reader.hold()
        yield from reader.skip_space()
        return (yield from reader.literal(")"))

    def _key(self) -> Reading[str]:
        """The name of an argument, with its equals sign; '' if there is none."""
        key = yield from self.reader.whole(_KEY, NAME_LIMIT)
        yield from self.reader.skip_space()
        found = key and (yield from self.reader.literal("="))
        yield from self.reader.skip_space()
        return key if key and found else ""

    def _pairs(self, number: int, key: str) -> Reading[bool]:
        reader, before = self.reader, "{"
        while True:
            self.arguments(number, f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            if not (yield from literal(reader, lambda piece: self.arguments(number, piece))):
                return False
            reader.hold()
            yield from reader.skip_space()
            more = yield from reader.literal(",")
            yield from reader.skip_space()
            if (yield from reader.literal(")")):
                break
            key = (yield from self._key()) if more else ""
            if not key:
                return False
            reader.drop()
        reader.drop()
        self.arguments(number, "}")
        return True


def calls_grammar(grammar: Grammar, tools: Sequence[Tool], most: int) -> str:
    return f'"[" {grammar.several(any_call(grammar, tools), ", ", most)} "]"'


def any_call(grammar: Grammar, tools: Sequence[Tool]) -> str:
    """A call of one of the tools."""
    return " | ".join(f"{quoted(tool.name + '(')} {_inside(grammar, tool)}" for tool in tools)


def _inside(grammar: Grammar, tool: Tool) -> str:
    """Arguments one by one, in the order of the schema, or as **{...} where only the whole schema says what fits."""
    schema = arguments_schema(tool)
    if not is_simple(schema, _IDENTIFIER):
        return f'"**" {grammar.arguments(tool)} ")"'
    items = []
    for name in schema.get("properties", {}):
        items.append((name, f"{quoted(name + '=')} {grammar.json(own_schema(schema, name))}"))
    return in_order(grammar, items, schema.get("required", []), grammar.rule('")"'), '", "')
